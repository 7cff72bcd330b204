"""`python -m taso`, which is the command `taso`."""

import sys

from taso.cli import main

if __name__ == "__main__":
    sys.exit(main())
