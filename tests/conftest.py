"""Property tests run without a clock: on a loaded machine a slow example is no failure."""

from hypothesis import settings

settings.register_profile("baton", deadline=None, derandomize=True)
settings.load_profile("baton")
