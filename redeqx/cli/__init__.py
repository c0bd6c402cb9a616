"""The command `redeqx`: `dry-run` and `launch` of scripts, `inspect` of checkpoints and weights.

Owns the arguments and the output of each command. The packages below do the work and know nothing of this one. Open
`_main.py` first.
"""

from ._main import main as main
