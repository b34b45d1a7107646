"""The ranks of one replica, each with its pool, as rank 0 has them at hand."""

from collections import Counter
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.errors import ConfigError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.messages import ListenerAddresses
from baton.kvtransfer.ranks.executor import Emit, Executor, Performer, RankExecutor
from baton.kvtransfer.ranks.messages import Command, DropLink, PeerRank, UseKeys
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.ranks.remote import OnLost, RankAgents, RemoteRank
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.message_stream import Post
from baton.rpc.auth import Generations as KeyGenerations

STOP_S: Final = 5.0  # for followers to say that no page leaves them; one that hangs never does


class Route(NamedTuple):
    """A part of a transfer: the rank of ours that carries it out, and the peer's rank at its other end."""

    part: int
    executor: Performer
    peer: PeerRank
    layers: tuple[int, int]


class Ranks:
    def __init__(
        self, settings: EndpointSettings, here: RankExecutor, agents: RankAgents | None, clock: Clock
    ) -> None:
        """here: rank 0, which is closed when the others do not come (WorkerLost), or are not as many as the
        layout says (ConfigError).
        """
        self._settings = settings
        self._clock = clock
        self._agents = agents
        self._others: list[RemoteRank] = []
        num_ranks = 1 if agents is None else agents.num_ranks
        try:
            if num_ranks != settings.layout.tp_size:
                raise ConfigError(f"{num_ranks} ranks have agents, the layout has {settings.layout.tp_size}")
            if agents is not None:
                self._others = agents.meet(settings)
        except BaseException:
            here.close()
            if agents is not None:
                agents.close()
            raise
        self._here = here
        self._planes: list[Executor] = [here, *self._others]

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """Hear the other ranks; on_lost as of RemoteRank.start."""
        for rank in self._others:
            rank.start(post, emit, on_lost)
        if self._agents is not None:
            self._agents.watch(self._others)

    @property
    def registrations(self) -> ReceiveRegistrations:
        """Of rank 0: part 0 of every transfer that arrives is in them."""
        return self._here.pool_doors.registrations

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of those by which rank 0's pages are reached."""
        return self._here.pool_doors.names

    @property
    def doors(self) -> ListenerAddresses:
        return ListenerAddresses(ranks=tuple(executor.doors for executor in self._planes))

    def counts(self) -> dict[str, int]:
        """What went wrong or well since the start, by name, of all ranks together."""
        total: Counter[str] = Counter()
        for executor in self._planes:
            total.update(executor.counts())
        return dict(total)

    def complaint(self) -> str | None:
        """Why no transfer can begin; None when every rank is there."""
        lost = [str(rank) for rank, executor in enumerate(self._planes) if executor.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[Route]:
        """Of a transfer over the link, part by part. is_source: from here to there."""
        found = []
        parts = self._settings.parts(link.hello, num_layer_groups, is_source=is_source)
        for part, (source, destination, layers) in enumerate(parts):
            ours, theirs = (source, destination) if is_source else (destination, source)
            peer = PeerRank(
                host=link.host, layout=link.hello.layout, rank=theirs, doors=link.doors.ranks[theirs]
            )
            found.append(Route(part, self._planes[ours], peer, layers))
        return found

    def drop(self, link: Link) -> None:
        """What the link's transports had to move has come to its end before."""
        self._perform(DropLink(link=link.number))

    def use(self, generations: KeyGenerations) -> None:
        """Have every rank prove its new connections with these keys."""
        self._perform(UseKeys(generations=generations))

    def stop(self) -> bool:
        """No page leaves any rank, now and later. Whether that is certain: a rank that hangs can't say so."""
        for executor in self._planes:
            executor.stop()
        deadline_s = self._clock.now_s() + STOP_S
        return all(
            [executor.wait_until_stopped(deadline_s - self._clock.now_s()) for executor in self._planes]
        )

    def close(self) -> None:
        if self._agents is not None:
            self._agents.close()
        for executor in self._planes:
            executor.close()

    def _perform(self, command: Command) -> None:
        for executor in self._planes:
            executor.perform(command)
