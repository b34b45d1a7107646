"""Two ranks that meet to form a process group of torch's, of the two of them alone.

1. For each source rank, and again after each failure, there is a new `Meeting`, with a secret that the two
   alone know (see group_door.py). They meet on a connection that only who holds the secret can make, and tell
   each other there how to connect (rendezvous.py).
2. Both `join` within a deadline, the destination as rank 0, the source as rank 1, each with a thread of its
   own. The default group is never touched, and whoever else is alive, dead or new makes no difference.
3. A group ends by `abort`, here or there. It is not mended: the next meeting has another secret.

Neither gloo nor NCCL knows who connects. Their sockets listen on the address given, which is for a network of
trusted hosts only; records are sealed under the secret (see tcp_records.py), and pages are checked by keyed
digests (digests.py), so that a stranger can break a pair but not have a page taken for right.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, Literal, Protocol, cast

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from baton.errors import TransferFailed

DESTINATION: Final = 0
SOURCE: Final = 1
FOREVER: Final = timedelta(days=365)
_ABORT_TAG: Final = 2**20  # nothing is ever sent under it


GroupName = Literal["gloo", "nccl"]


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"  # of this machine, where the peer reaches it
    connect_s: float = 10.0  # for both ranks to meet
    stall_s: float = 5.0  # without an answer


class Pending(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...


class PairGroup(Protocol):
    """The part of torch's process groups that is used here, gloo's and NCCL's alike."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Pending: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Pending: ...

    def abort(self) -> None: ...


def join_gloo(store: Store, rank: int, host: str, timeout_s: float) -> PairGroup:
    """host: an address of this machine, the one to listen on. TransferFailed when the peer does not come."""
    with translated("gloo"):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        return cast(PairGroup, ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options))


def abort_gloo(group: PairGroup, peer: int, scratch: Tensor) -> None:
    """End every wait on the group, in whatever thread, and its connection: the peer sees that at once.

    gloo has no call for it, but a receive that times out does just that.
    """
    with contextlib.suppress(RuntimeError):
        group.recv([scratch], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def join_nccl(store: Store, rank: int, timeout_s: float) -> PairGroup:
    """Connects with the first message. TransferFailed when this torch has no NCCL.

    torch ends the process when one of its own deadlines passes; that it never does is for our deadlines and
    `abort`, which come long before. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 keeps it from doing so for a peer that
    died on another host: `config.prepare_nccl` sets that when an engine is loaded.
    """
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds
    except ImportError as error:
        raise TransferFailed("this build of torch has no NCCL") from error
    with translated("nccl"):
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = FOREVER
        prefixed = PrefixStore("nccl", store)
        prefixed.set_timeout(timedelta(seconds=timeout_s))
        return cast(PairGroup, ProcessGroupNCCL(prefixed, rank, 2, options))


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """torch's errors as ours, at this border."""
    try:
        yield
    except RuntimeError as error:  # all of torch.distributed's derive from it
        raise TransferFailed(f"{what}: {_first_line(error)}") from error


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
