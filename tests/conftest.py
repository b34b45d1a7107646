"""Property tests run without a clock: on a loaded machine a slow example is no failure.

And an interrupt is one in tests that a shell has started in the background too, where it has everybody ignore
them.
"""

import signal

from hypothesis import settings

settings.register_profile("baton", deadline=None, derandomize=True)
settings.load_profile("baton")
signal.signal(signal.SIGINT, signal.default_int_handler)
