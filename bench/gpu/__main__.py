"""`python -m baton.bench.gpu`: the suite on a machine that lacks the packages of the command line."""

import sys

try:
    from baton.bench.gpu import suite
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("baton"):
        raise
    sys.exit(f"{error.name} is not installed: docs/benchmarks.md says how to carry it to this machine")

suite.measure.main(suite.__doc__)
