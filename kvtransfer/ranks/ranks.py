"""All ranks of one replica, as its rank 0 commands them."""

from collections import Counter
from typing import Final

from baton.clock import Clock
from baton.errors import ConfigError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.messages import ListenerAddresses, PeerRank
from baton.kvtransfer.ranks.executor import Emit, Executor, RankExecutor
from baton.kvtransfer.ranks.messages import Command, DropLink, Route, UseKeys
from baton.kvtransfer.ranks.remote import OnLost, RankAgents, RemoteRank
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.message_stream import Post
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations
from baton.rpc.auth import Generations as KeyGenerations

STOP_S: Final = 5.0  # for followers to confirm that no page leaves them


class Ranks:
    """The ranks of a replica; commands go to one of them or to all. `close` closes all ranks."""

    def __init__(
        self, settings: EndpointSettings, here: RankExecutor, agents: RankAgents | None, clock: Clock
    ) -> None:
        """here: rank 0. It is closed when another rank does not connect (WorkerLost), or when the number of
        ranks is not the layout's (ConfigError).
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
        self._executors: list[Executor] = [here, *self._others]

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """Hear the other ranks. on_lost: as of RemoteRank.start."""
        for rank in self._others:
            rank.start(post, emit, on_lost)
        if self._agents is not None:
            self._agents.watch(self._others)

    @property
    def registrations(self) -> ReceiveRegistrations:
        """The registrations of rank 0, which include part 0 of every transfer that arrives."""
        return self._here.rank.registrations

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that rank 0 listens with."""
        return self._here.listeners.names

    @property
    def listeners(self) -> ListenerAddresses:
        return ListenerAddresses(ranks=tuple(executor.listeners for executor in self._executors))

    def counts(self) -> dict[str, int]:
        """The counters since the start, by name, summed over all ranks."""
        total: Counter[str] = Counter()
        for executor in self._executors:
            total.update(executor.counts())
        return dict(total)

    def complaint(self) -> str | None:
        """The reason why no transfer can begin; None when no rank is lost."""
        lost = [str(rank) for rank, executor in enumerate(self._executors) if executor.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[Route]:
        """One route for each part of a transfer over the link. is_source: this replica is the source."""
        found = []
        parts = self._settings.parts(link.hello, num_layer_groups, is_source=is_source)
        for part, (source, destination, layers) in enumerate(parts):
            ours, theirs = (source, destination) if is_source else (destination, source)
            peer = PeerRank(
                host=link.host, layout=link.hello.layout, rank=theirs, listeners=link.listeners.ranks[theirs]
            )
            found.append(Route(part, self._executors[ours], peer, layers))
        return found

    def drop(self, link: Link) -> None:
        """Close the transports of a link whose transfers have ended."""
        self._perform(DropLink(link=link.number))

    def use(self, generations: KeyGenerations) -> None:
        """Let every rank prove its new connections with these keys."""
        self._perform(UseKeys(generations=generations))

    def stop(self) -> bool:
        """Let no page leave any rank, now and later. False when a rank does not confirm that in time."""
        for executor in self._executors:
            executor.stop()
        deadline_s = self._clock.now_s() + STOP_S
        return all(
            [executor.wait_until_stopped(deadline_s - self._clock.now_s()) for executor in self._executors]
        )

    def close(self) -> None:
        if self._agents is not None:
            self._agents.close()
        for executor in self._executors:
            executor.close()

    def _perform(self, command: Command) -> None:
        for executor in self._executors:
            executor.perform(command)
