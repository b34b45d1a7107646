import subprocess
import sys

from baton.router.index_sharing import Alone, Sharing
from baton.router.redis_link import RedisLink

KINDS: tuple[type[Sharing], ...] = (Alone, RedisLink)  # a type checker holds them to the protocol


def test_who_shares_with_nobody_needs_no_redis_library() -> None:
    program = (
        "import sys; sys.modules['redis'] = None; "
        "import baton.router.index_sharing, baton.router.prefix_index, baton.router.redis_messages"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
