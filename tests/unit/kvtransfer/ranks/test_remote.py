"""A rank in another process, as rank 0 sees it."""

import socket
from collections.abc import Iterator

import pytest

from baton.errors import WorkerLost
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.ranks.messages import (
    AgentHello,
    AllStopped,
    CloseShard,
    Counted,
    DropLink,
    Ready,
    SetUp,
    ShardEvent,
    ShardOpened,
    StopAll,
    StopShard,
    TellCounts,
    ToAgent,
    ToRankZero,
    decode_for_agent,
    encode,
)
from baton.kvtransfer.ranks.ranks import RemoteRank
from baton.rpc.connection import Call
from tests.fakes import proved_connections
from tests.layouts import a_layout
from tests.transfer_ends import RING
from tests.waiting import wait_for

LAYOUT = a_layout(tp_size=2, page_size=4, num_layers=1)
SETTINGS = EndpointSettings(keys=RING, fingerprint="model", layout=LAYOUT).for_rank(1)
LISTENERS = RankListenerAddresses(incarnation=b"i" * 16, host="h", device="cpu", addresses={"tcp": "1"})
SECRET = b"s" * 32
ID = b"t" * 16


class Ends:
    """The rank, and the bare connection of its agent, which a test speaks by hand."""

    def __init__(self, *first_words: ToRankZero) -> None:
        self.agent, connection = proved_connections(socket.socketpair(), SECRET)
        for word in first_words:
            self.agent.send(encode(word))
        self.calls: list[Call] = []
        self.events: list[ShardEvent] = []
        self.losses: list[tuple[bool, bool]] = []
        try:
            self.rank = RemoteRank(SETTINGS, connection)
        except WorkerLost:
            self.agent.close()
            raise
        self.rank.start(self.calls.append, self.events.append, self._lose)

    def _lose(self, rank: int, is_dead: bool) -> None:
        assert rank == self.rank.rank
        self.losses.append((self.rank.is_lost, is_dead))

    def poll(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def told(self) -> ToAgent:
        return decode_for_agent(self.agent.recv(5.0))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(Ready(listeners=LISTENERS))
    yield made
    made.agent.close()
    made.rank.close()


def test_events_are_reported_in_the_owners_thread(ends: Ends) -> None:
    opened = ShardOpened(transfer=ID, shard=0)
    ends.agent.send(encode(opened))
    wait_for(lambda: bool(ends.calls))
    assert not ends.events
    ends.poll()
    assert ends.events == [opened]


@pytest.mark.parametrize("word", [AgentHello(rank=1), AllStopped()])
def test_rank_that_does_not_listen_is_lost(word: ToRankZero) -> None:
    with pytest.raises(WorkerLost, match="rank 1 said"):
        Ends(word)


def test_end_of_the_connection_is_no_death(ends: Ends) -> None:
    ends.agent.close()
    wait_for(lambda: bool(ends.calls))
    ends.poll()
    assert ends.losses == [(True, False)]
    ends.rank.perform(CloseShard(transfer=ID, shard=0, is_confirmed=True))
    ends.rank.perform(StopShard(transfer=ID, shard=0))
    ends.poll()
    assert not ends.events
    assert not ends.rank.wait_until_stopped(0.0)


def test_death_of_a_rank_is_told_after_its_loss(ends: Ends) -> None:
    ends.rank.died()
    assert ends.rank.wait_until_stopped(0.0)
    ends.poll()
    assert ends.losses == [(True, False), (True, True)]


def test_stop_is_confirmed_without_a_poll(ends: Ends) -> None:
    ends.told()
    ends.rank.stop()
    assert ends.told() == StopAll()
    assert not ends.rank.wait_until_stopped(0.0)
    ends.agent.send(encode(AllStopped()))
    assert ends.rank.wait_until_stopped(5.0)


def test_an_agent_that_speaks_out_of_turn_is_lost(ends: Ends) -> None:
    ends.agent.send(encode(StopAll()))
    wait_for(lambda: bool(ends.calls))
    ends.poll()
    assert ends.losses == [(True, False)] and not ends.events


def test_counts_are_as_they_were_said_last_and_asked_for_once(ends: Ends) -> None:
    assert ends.rank.counts() == ends.rank.counts() == {}
    assert [type(ends.told()), ends.told()] == [SetUp, TellCounts()]
    ends.agent.send(encode(Counted(counts={"landed_pieces": 3})))
    wait_for(lambda: bool(ends.calls))
    ends.poll()
    assert ends.rank.counts() == {"landed_pieces": 3} and not ends.events
    ends.rank.perform(DropLink(link=9))
    assert [ends.told(), ends.told()] == [TellCounts(), DropLink(link=9)]


def test_counts_of_a_lost_rank_are_kept(ends: Ends) -> None:
    ends.rank.counts()
    ends.agent.send(encode(Counted(counts={"landed_pieces": 3})))
    ends.agent.close()
    wait_for(lambda: len(ends.calls) == 2)
    ends.poll()
    assert ends.losses and ends.rank.counts() == ends.rank.counts() == {"landed_pieces": 3}
