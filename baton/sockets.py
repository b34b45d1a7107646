"""What the kernel is asked for beside bytes: open files for the peer, and whether it is still there."""

import array
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

Rights: TypeAlias = "list[tuple[int, int, array.array[int]]]"  # ancillary data, as sendmsg takes it

MAX_DESCRIPTORS: Final = 4  # open files that come with one frame, over unix sockets only
KEEP_ALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}  # 25 s in all


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask a silent TCP peer for a sign of life: its host may be gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def rights_of(descriptors: Sequence[int]) -> Rights:
    """ValueError for more than the peer takes."""
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} open files in one frame, {MAX_DESCRIPTORS} is most")
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
