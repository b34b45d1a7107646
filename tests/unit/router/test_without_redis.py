import subprocess
import sys


def test_router_without_sharing_needs_no_redis_library() -> None:
    program = "import sys; sys.modules['redis'] = None; import baton.router.router, baton.cluster.serve"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_missing_redis_library_is_explained() -> None:
    program = """
import sys; sys.modules['redis'] = None
import asyncio
from baton.errors import ConfigError
from baton.router.router import serve_router
from baton.config.router import RouterConfig

config = RouterConfig(policy="cost", redis="redis://127.0.0.1:1")
try:
    asyncio.run(serve_router(config, b"k" * 32, print, asyncio.Event()))
except ConfigError as error:
    sys.exit(str(error))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1 and "Python library is not installed" in result.stderr
