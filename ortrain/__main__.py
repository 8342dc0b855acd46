"""``python -m ortrain``: the command ``ortrain``, by the interpreter of one's choice."""

import sys

from ortrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
