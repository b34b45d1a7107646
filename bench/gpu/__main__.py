"""`python -m baton.bench.gpu` runs the GPU suite."""

import sys

from baton.bench.gpu.suite import __doc__, add_options, run
from baton.bench.report import run_command

sys.exit(run_command(__doc__, add_options, run))
