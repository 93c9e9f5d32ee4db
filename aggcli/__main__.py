"""`python -m aggcli`."""

import sys

from aggcli.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
