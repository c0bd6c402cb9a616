"""The command `redeqx`: `dry-run` and `launch` of scripts, `inspect` and `convert` of checkpoints and weights.

Owns the arguments of each command and what it prints; the packages below do the work, and none of them knows of it. Open
`_main.py` first.
"""

from ._main import main as main
