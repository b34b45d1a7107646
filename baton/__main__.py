"""`python -m baton` is the command `baton`."""

import sys

from baton.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
