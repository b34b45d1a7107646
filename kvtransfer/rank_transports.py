"""The ways from a rank of ours to the ranks of peers: one for each rank of each link, opened on first use."""

import threading
from collections.abc import Sequence
from typing import Final

from baton.challenge import LinkSecret
from baton.clock import Clock
from baton.kvtransfer.choose import Place, TransportCounters, TransportName, order
from baton.kvtransfer.cuda_ipc import CudaIpcTransport
from baton.kvtransfer.group import GroupTransport
from baton.kvtransfer.group_door import Knock, ask_for_meeting
from baton.kvtransfer.message_stream import Post
from baton.kvtransfer.messages import RankDoors
from baton.kvtransfer.pair import GroupName, GroupSettings
from baton.kvtransfer.pair_channel import payload_bytes
from baton.kvtransfer.peer_transports import PeerTransports
from baton.kvtransfer.rank_messages import PeerRank, RankSettings
from baton.kvtransfer.rank_pages import RankPages
from baton.kvtransfer.rendezvous import Meeting
from baton.kvtransfer.shm import ShmTransport
from baton.kvtransfer.tcp import TcpTransport
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.kvtransfer.transport import OnEnd, Transport
from baton.wire import DroppedPeers

NOBODY: Final[Sequence[TransportName]] = ()


def transports_between(source: RankDoors, destination: RankDoors, asked: str) -> Sequence[TransportName]:
    """The transports to try, best first; ConfigError when the one asked for cannot serve the two."""
    here = Place(host=source.host, device=source.device)
    there = Place(host=destination.host, device=destination.device)
    return order(here, there, destination.names, asked)


class RankTransports:
    """All calls but `stop` are made by the rank's thread."""

    def __init__(
        self,
        settings: RankSettings,
        key: LinkSecret,
        doors: RankDoors,
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

        def meet() -> Meeting:
            knock = Knock(name=name, layout=ours.layout, rank=ours.rank, payload_bytes=payload_bytes(plan))
            address, timeout_s = (peer.host, port), settings.connect_s
            return ask_for_meeting(
                address, self._key, knock, timeout_s, clock=self._clock, dropped=self._dropped
            )

        return GroupTransport(
            name, meet, self._pages.pool, plan, settings=settings, clock=self._clock, on_end=on_end
        )
