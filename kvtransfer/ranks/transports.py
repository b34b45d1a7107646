"""The ways from a rank of ours to the ranks of peers: one for each rank of each link, opened on first use."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.listeners import RankPages
from baton.kvtransfer.ranks.messages import PeerRank, RankSettings
from baton.kvtransfer.transports.base import OnEnd, Piece, TransferProgress, TransferStatus, Transport
from baton.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from baton.kvtransfer.transports.group_receiver import RendezvousRequest, request_rendezvous
from baton.kvtransfer.transports.message_stream import Call, Post
from baton.kvtransfer.transports.rank_pair import GroupName, GroupSettings, payload_bytes
from baton.kvtransfer.transports.registry import RankLocation, TransportCounters, TransportName, order
from baton.kvtransfer.transports.rendezvous import Rendezvous
from baton.kvtransfer.transports.shm import ShmTransport
from baton.kvtransfer.transports.tcp import TcpTransport
from baton.kvtransfer.transports.torch_distributed import GroupTransport
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import DroppedPeers

logger = logging.getLogger(__name__)
Made: TypeAlias = Callable[[TransportName, OnEnd], Transport]
Ended: TypeAlias = Callable[[TransferProgress], None]


class _Delivery:
    def __init__(self, piece: Piece, on_end: Ended) -> None:
        self.piece = piece
        self.on_end = on_end
        self.num_tries = 0
        self.is_cancelled = False


class PeerTransports:
    """The transports from this rank to one peer: the best that opens carries all pieces, until it breaks.

    1. `when_settled` opens a transport, in a thread: connecting may take seconds. `push` takes a piece and
       the call to make when it has ended.
    2. A piece that fails is pushed again, over the next transport if this one is broken, else over the same
       one: a piece has as many tries as there are transports.
    3. With no transport left, or no try, the piece has failed for good. The next transfer tries all of them
       anew.

    All calls but `close` are made by the rank's thread, `post` brings the others' news there.
    """

    def __init__(
        self, names: Sequence[TransportName], make: Made, post: Post, counters: TransportCounters
    ) -> None:
        """names: best first, as of choose.order."""
        self._all_names = tuple(names)
        self._names = list(names)  # those that have not failed
        self._num_names = len(names)
        self._generation = 0  # of transports: tells the tickets of one from those of the next
        self._make = make
        self._post = post
        self._counters = counters
        self._transport: Transport | None = None
        self._opening: tuple[threading.Thread, Transport] | None = None
        self._waiting: list[_Delivery] = []  # for a transport to open
        self._unsettled: list[Call] = []  # as well
        self._under_way: dict[int, _Delivery] = {}  # by ticket of the present transport
        self._lock = threading.Lock()  # a thread is started before it is joined
        self._is_closed = False

    @property
    def name(self) -> str | None:
        """Of the transport that is open now."""
        return self._transport.name if self._transport is not None else None

    def when_settled(self, call: Call) -> None:
        """Make the call once a transport is open, or none is left: a peer may want to see us come first.

        Where all have failed they are tried once more: what broke them may have passed.
        """
        if self._transport is not None or not self._all_names:
            call()
            return
        if not self._names and self._opening is None:
            self._names = list(self._all_names)
        self._unsettled.append(call)
        self._open_next()

    def push(self, piece: Piece, on_end: Ended) -> None:
        """on_end: called later, never from within, with the outcome."""
        self._deliver(_Delivery(piece, on_end))

    def abort(self, transfer: bytes) -> None:
        """On return nobody here reads or writes for the transfer; its pieces' `on_end` are not called."""
        for delivery in (*self._waiting, *self._under_way.values()):
            delivery.is_cancelled |= delivery.piece.transfer.id == transfer
        if self._transport is not None:
            self._transport.abort(transfer)

    def close(self) -> None:
        """From any thread."""
        with self._lock:
            self._is_closed = True
        if self._opening is not None:
            thread, transport = self._opening
            transport.close()
            thread.join()
            transport.close()
        if self._transport is not None:
            self._transport.close()

    def _deliver(self, delivery: _Delivery) -> None:
        if delivery.is_cancelled:
            return
        if self._transport is None:
            self._waiting.append(delivery)
            self._open_next()
            return
        delivery.num_tries += 1
        handle = self._transport.push(delivery.piece)
        self._under_way[handle] = delivery

    def _open_next(self) -> None:
        if self._opening is not None:
            return
        if not self._names or self._is_closed:
            self._counters.recomputed()
            self._settle()
            waiting, self._waiting = self._waiting, []
            for delivery in waiting:
                failed = TransferProgress(TransferStatus.FAILED, reason="no transport is left")
                self._post(partial(self._tell, delivery, failed))
            return
        name = self._names[0]
        self._generation += 1
        generation = self._generation
        transport = self._make(name, lambda handle: self._post(partial(self._ended, generation, handle)))
        thread = threading.Thread(target=self._open, args=(name, transport), name="kv-open", daemon=True)
        try:
            with self._lock:
                if not self._is_closed:
                    thread.start()
                    self._opening = thread, transport
        except RuntimeError as error:  # the process may have no more threads
            logger.warning("%s could not be opened: %s", name, error)
            transport.close()
            self._use_next()

    def _open(self, name: TransportName, transport: Transport) -> None:
        try:
            transport.open()
        except Exception as error:
            if not isinstance(error, TransferFailed):
                logger.exception("%s could not be opened", name)
            transport.close()
            self._post(partial(self._opened, name, None))
        else:
            self._post(partial(self._opened, name, transport))

    def _opened(self, name: TransportName, transport: Transport | None) -> None:
        if self._is_closed or self._opening is None:
            return
        self._opening[0].join()
        self._opening = None
        if transport is None:
            self._use_next()
            return
        self._counters.opened(name, self._num_names - len(self._names))
        self._transport = transport
        self._settle()
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            self._deliver(delivery)

    def _use_next(self) -> None:
        self._counters.failed(self._names.pop(0))
        self._open_next()

    def _ended(self, generation: int, handle: int) -> None:
        if self._transport is None or generation != self._generation:
            return  # of a transport that was given up: its pieces have been taken over
        delivery = self._under_way.pop(handle)
        progress = self._transport.poll(handle)
        self._transport.forget(handle)
        if progress.status is TransferStatus.DONE or delivery.is_cancelled:
            self._tell(delivery, progress)
            return
        if self._transport.is_broken:
            self._give_up_transport()
        if delivery.num_tries >= self._num_names:
            self._tell(delivery, progress)
        else:
            self._deliver(delivery)

    def _give_up_transport(self) -> None:
        assert self._transport is not None
        self._counters.failed(self._names.pop(0))
        self._transport.close()
        self._transport = None
        self._waiting += self._under_way.values()
        self._under_way = {}
        if self._waiting:
            self._open_next()

    def _settle(self) -> None:
        calls, self._unsettled = self._unsettled, []
        for call in calls:
            call()

    def _tell(self, delivery: _Delivery, progress: TransferProgress) -> None:
        if not delivery.is_cancelled:
            delivery.on_end(progress)


NOBODY: Final[Sequence[TransportName]] = ()


def transports_between(
    source: RankListenerAddresses, destination: RankListenerAddresses, asked: str
) -> Sequence[TransportName]:
    """The transports to try, best first; ConfigError when the one asked for cannot serve the two."""
    here = RankLocation(host=source.host, device=source.device)
    there = RankLocation(host=destination.host, device=destination.device)
    return order(here, there, destination.names, asked)


class RankTransports:
    """All calls but `stop` are made by the rank's thread."""

    def __init__(
        self,
        settings: RankSettings,
        key: LinkSecret,
        doors: RankListenerAddresses,
        pages: RankPages,
        post: Post,
        *,
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """doors: the rank's own."""
        self.counters = TransportCounters()
        self._settings = settings
        self._key = key
        self._doors = doors
        self._pages = pages
        self._post = post
        self._clock = clock
        self._dropped = dropped
        self._lock = threading.Lock()
        self._ways: dict[tuple[int, int], PeerTransports] = {}  # (link, the peer's rank)
        self._is_stopped = False

    def to(self, link: int, peer: PeerRank) -> PeerTransports:
        """None of them opens once all were stopped."""
        with self._lock:
            ways = self._ways.get((link, peer.rank))
            if ways is None:
                ways = self._ways[link, peer.rank] = PeerTransports(
                    NOBODY if self._is_stopped else self._order(peer),
                    lambda name, on_end: self._make(peer, name, on_end),
                    self._post,
                    self.counters,
                )
        return ways

    def drop(self, link: int) -> None:
        """The link has ended, and with it whatever its transports had to move."""
        with self._lock:
            keys = [key for key in self._ways if key[0] == link]
            dropped = [self._ways.pop(key) for key in keys]
        for ways in dropped:
            ways.close()

    def stop(self) -> None:
        """No page leaves any more, and none will. From any thread, any number of times."""
        with self._lock:
            self._is_stopped = True
            ways = list(self._ways.values())
        for way in ways:
            way.close()

    def _order(self, peer: PeerRank) -> Sequence[TransportName]:
        return transports_between(self._doors, peer.doors, self._settings.transport)

    def _make(self, peer: PeerRank, name: TransportName, on_end: OnEnd) -> Transport:
        key, pages, clock, dropped = self._key, self._pages, self._clock, self._dropped
        doors, incarnation = peer.doors, self._doors.incarnation
        match name:
            case "shm":
                assert pages.memory is not None
                return ShmTransport(
                    doors.shm_address,
                    key,
                    pages.memory,
                    incarnation,
                    clock=clock,
                    on_end=on_end,
                    dropped=dropped,
                )
            case "cuda_ipc":
                return CudaIpcTransport(
                    doors.cuda_ipc_address,
                    key,
                    pages.pool,
                    incarnation,
                    clock=clock,
                    on_end=on_end,
                    dropped=dropped,
                )
            case "tcp":
                address = (peer.host, doors.tcp_port)
                return TcpTransport(
                    address, key, pages.for_sockets(), clock=clock, on_end=on_end, dropped=dropped
                )
            case "gloo":
                return self._make_group(peer, name, doors.gloo_port, on_end)
            case "nccl":
                return self._make_group(peer, name, doors.nccl_port, on_end)

    def _make_group(self, peer: PeerRank, name: GroupName, port: int, on_end: OnEnd) -> GroupTransport:
        ours, settings = self._settings, GroupSettings(host=self._settings.host)
        plan = plan_transfer(ours.layout, peer.layout, ours.rank, peer.rank)

        def meet() -> Rendezvous:
            rendezvous_request = RendezvousRequest(
                name=name, layout=ours.layout, rank=ours.rank, payload_bytes=payload_bytes(plan)
            )
            address, timeout_s = (peer.host, port), settings.connect_s
            return request_rendezvous(
                address, self._key, rendezvous_request, timeout_s, clock=self._clock, dropped=self._dropped
            )

        return GroupTransport(
            name, meet, self._pages.pool, plan, settings=settings, clock=self._clock, on_end=on_end
        )
