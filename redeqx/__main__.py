"""`python -m redeqx`: the command `redeqx` without an installation. It is implemented in `cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
