"""Run the command `aiordma` as `python -m aiordma`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
