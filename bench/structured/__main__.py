"""Runs the suite as a command: python -m baton.bench.structured."""

import sys

from baton.bench.structured import suite

sys.exit(suite.SUITE.main(suite.__doc__))
