"""`python -m aggcli`."""

import sys

from aggcli.lifeline import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()
    from aggcli.cli.main import main  # after that: what it imports takes its time

    sys.exit(main())
