"""The extension point `Transport`: moves page bytes from one rank's pool into another rank's pool.

1. A destination rank listens with every automatic transport, and with the one that its operator asked for.
   Its `RankListenerAddresses` tell peers the address of each listener.
2. A source rank puts the transports that both ranks have in order (`TransportSet.order`) and connects with
   the first. The `Sender` moves pieces; `LocalRank.registrations` at the destination admit them.
3. A transport that does not open, or breaks, is replaced by the next (kvtransfer/ranks/peer_transports.py).
   When none is left, the destination computes the pages itself.

The transports and their order are the dictionary in kvtransfer/transports/registry.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import ConfigError
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.transports.pages import PageGenerations, PageMemory, PagePacking, SharedPool, packing_of
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.transfer_queue import OnEnd, Piece, TransferQueue
from baton.pages import PageLayout
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import DroppedPeers

AUTO: Final = "auto"  # the setting by which a transport is chosen by where the two ranks are
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """An id of this boot of this machine: two ranks have the same id only if they share a kernel."""
    return _BOOT_ID.read_text().strip()


class LocalRank:
    """A rank of this process, with everything that its transports need. `close` frees what it has made."""

    def __init__(
        self,
        pool: Tensor,
        *,
        layout: PageLayout,
        rank: int,
        host: str,
        key: LinkSecret,
        incarnation: bytes,
        shared: SharedPool | None = None,
        on_writer_death: Callable[[list[bytes]], None] = lambda registrations: None,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """pool: contiguous [num_pages, ...], on a CPU or a GPU; ValueError for any other.

        host: the address to listen on. key: of page links. incarnation: 16 bytes that name this process.
        shared: has made `pool`, if other processes on this host may map the pool. on_writer_death: called
        from any thread with the ids of open registrations whose writing process has died.
        """
        self.pool = pool
        self.num_pages = len(pool)
        self.device: Literal["cpu", "cuda"] = "cuda" if pool.is_cuda else "cpu"
        self.memory = None if pool.is_cuda else PageMemory.of(pool)
        self.layout = layout
        self.rank = rank
        self.host = host
        self.key = key
        self.incarnation = incarnation
        self.shared = shared
        self.on_writer_death = on_writer_death
        self.clock = clock or SystemClock()
        self.dropped = dropped or DroppedPeers()
        self.registrations = ReceiveRegistrations(self.num_pages)
        # None: other processes cannot write into the pool directly
        self.generations = PageGenerations(self.num_pages) if pool.is_cuda else None
        if shared is not None:
            self.generations = shared.generations

    def packing(self) -> PagePacking:
        """Packs and unpacks runs of the pool, for one user: on a GPU each user has a stream of its own."""
        return packing_of(self.pool)

    def close(self) -> None:
        """Free what this rank has made; the listeners have been closed before."""
        if self.generations is not None and self.shared is None:
            self.generations.file.close()


class Sender(Protocol):
    """Moves pieces from one source rank to one destination rank. Calls are safe from any thread.

    A failure of one sender never affects another. All calls but `open`, `abort` and `close` return at once.
    """

    @property
    def is_broken(self) -> bool:
        """Whether every piece of every transfer fails from now on."""

    def open(self) -> None:
        """Connect. TransferFailed when the destination cannot be reached; `close` is still due."""

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Queue a piece. A sender that is broken or closed fails it.

        The source's pages must stay as they are until the piece has ended; those of a failed piece until
        `abort` or `close` has returned.
        """

    def abort(self, transfer: bytes) -> None:
        """Fail all pieces of a transfer that have not ended.

        On return this process neither reads the transfer's source pages nor writes its destination pages.
        The destination refuses bytes that are still in the network (see receive_registration.py).
        """

    def close(self) -> None:
        """Fail all pieces, stop the threads, free memory and sockets. May be called twice.

        An `open` that waits in another thread fails soon; `close` is due once more when it has.
        """


class TransportListener(Protocol):
    """Admits sources to the pool of one rank. A listener lets only registered bytes into the pages."""

    @property
    def address(self) -> str:
        """The address for `Transport.connect`: at most 107 characters; the peer knows the host already."""

    def close(self) -> None:
        """Accept no source any more. On return no page is written, but by processes that have mapped it."""


class Transport(Protocol):
    """One way to move pages, and one entry of the registry."""

    name: str  # at most 16 characters, for settings and counters
    is_automatic: bool  # False: only where the operator asks for the transport by name

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        """Whether pages can move between these two ranks; their `host` and `device` say where they are."""

    def listen(self, rank: LocalRank) -> TransportListener | None:
        """Begin to admit sources; None when the rank's pool cannot be reached by this transport."""

    def connect(self, rank: LocalRank, peer: PeerRank) -> Sender:
        """A sender to the peer's listener, not open yet. TransferFailed for an address that is none."""


class TransportSet:
    """The transports that a rank uses, best first. The last one serves every pair of ranks."""

    def __init__(self, transports: Sequence[Transport], asked: Transport | None = None) -> None:
        """asked: the transport to try first; None to go by where the two ranks are."""
        self._transports = transports
        self._asked = asked

    def listen(self, rank: LocalRank) -> dict[str, TransportListener]:
        """The rank's listeners by the name of their transport. The caller closes them."""
        listeners: dict[str, TransportListener] = {}
        try:
            for transport in self._transports:
                if transport.is_automatic or transport is self._asked:
                    listener = transport.listen(rank)
                    if listener is not None:
                        listeners[transport.name] = listener
        except BaseException:
            for listener in listeners.values():
                listener.close()
            raise
        return listeners

    def order(
        self, source: RankListenerAddresses, destination: RankListenerAddresses
    ) -> tuple[Transport, ...]:
        """The transports to try, best first, of those that the destination listens with.

        ConfigError when the transport that was asked for cannot serve the two ranks.
        """
        usable = [each for each in self._transports if each.can_serve(source, destination)]
        names = [each for each in usable if each.is_automatic]
        if self._asked is not None:
            if self._asked not in usable:
                raise ConfigError(
                    f"transport: {self._asked.name} cannot serve {_place(source)} to {_place(destination)}"
                )
            names = [self._asked, *(each for each in names[-1:] if each is not self._asked)]
        return tuple(each for each in names if each.name in destination.addresses)


def _place(rank: RankListenerAddresses) -> str:
    return f"{rank.device} on host {rank.host}"


class QueueSender:
    """The part of a `Sender` that all of Baton's transports share: pieces wait in a TransferQueue."""

    def __init__(self, rank: LocalRank, part_bytes: int, num_threads: int) -> None:
        """part_bytes, num_threads: as of TransferQueue. rank: the source."""
        self._rank = rank
        self._packing = rank.packing()
        self._queue = TransferQueue(part_bytes, num_threads, rank.clock)

    @property
    def is_broken(self) -> bool:
        return self._queue.end_reason is not None

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Queue a piece. ValueError for pages that the pool does not have."""
        pages, num_pages = piece.transfer.source_pages, self._rank.num_pages
        if pages and not 0 <= min(pages) <= max(pages) < num_pages:
            raise ValueError(f"the pool has {num_pages} pages: {pages}")
        self._packing.note_written()
        self._enqueue(piece, on_end)

    def abort(self, transfer: bytes) -> None:
        self._queue.abort(transfer)

    def _enqueue(self, piece: Piece, on_end: OnEnd) -> None:
        self._queue.push(piece, on_end)
