"""``python -m ortrain.compat [-m module | script.py] …``, also below torchrun and accelerate."""

from __future__ import annotations

import sys

from ortrain.compat.running import NothingToRun, run


def main() -> None:
    """Runs what the command line names; ends with status 2 where there is no such thing."""
    try:
        run(sys.argv[1:])
    except NothingToRun as error:
        print(f"ortrain.compat: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
