"""`python -m msrun`."""

import sys

from msrun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
