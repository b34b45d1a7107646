"""Marks of tests that need a program which may be missing."""

from typing import Final

import pytest

from baton.cluster.redis_server import find_program

needs_redis: Final = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")
