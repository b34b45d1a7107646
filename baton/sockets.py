"""Socket options that bound a peer's silence, and open files that travel with a frame."""

import array
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

from baton.link_life import LINK_TIMEOUT_S

Rights: TypeAlias = "list[tuple[int, int, array.array[int]]]"  # ancillary data, as sendmsg takes it

MAX_DESCRIPTORS: Final = 4  # open files that come with one frame, over unix sockets only
NUM_PROBES: Final = 3  # unanswered, of keepalive


def keep_alive(sock: socket.socket, timeout_s: float = LINK_TIMEOUT_S) -> None:
    """Have the kernel end a TCP connection whose peer's host acknowledges nothing for `timeout_s`.

    TCP_USER_TIMEOUT bounds data that was sent and is not acknowledged, keepalive a connection that is idle.
    """
    pause_s = max(1, int(timeout_s / (NUM_PROBES + 1)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, pause_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000))),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def rights_of(descriptors: Sequence[int]) -> Rights:
    """ValueError for more than the peer takes."""
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} open files in one frame, {MAX_DESCRIPTORS} is most")
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
