"""Commands that wait for a step, in the order of their shard."""

from collections.abc import Iterator
from queue import Empty, Queue

import pytest

from baton.kvtransfer.ranks.executor import BackgroundThreads, StepGate
from baton.kvtransfer.ranks.messages import OpenShard, PushUnits, ShardCommand, StopShard
from baton.rpc.connection import Call
from tests.numbered_pages import PEER_RANK
from tests.rank_process import LateSteps

TRANSFER = b"t" * 16


def push(after: int, shard: int = 0, first: int = 0) -> PushUnits:
    return PushUnits(
        transfer=TRANSFER, shard=shard, first=first, stop=first + 1, more_pages=(first,), after=after
    )


def open_shard(after: int) -> OpenShard:
    return OpenShard(
        transfer=TRANSFER,
        shard=0,
        epoch=1,
        num_units=1,
        pages=(0,),
        generations=(1,),
        source=PEER_RANK,
        layers=(0, 2),
        digest_key=bytes(32),
        after=after,
    )


class Gated:
    """A gate whose rank's thread is the test's."""

    def __init__(self, *, pushes_wait: bool = True) -> None:
        self.steps = LateSteps()
        self.done: list[ShardCommand] = []
        self._inbox: Queue[Call] = Queue()
        self._threads = BackgroundThreads()
        self.gate = StepGate(
            self.steps, self.done.append, self._inbox.put, self._threads, pushes_wait=pushes_wait
        )

    def close(self) -> None:
        self.gate.close()
        self._threads.close()

    def run_one(self, timeout_s: float = 5.0) -> None:
        self._inbox.get(timeout=timeout_s)()

    def hears_nothing(self) -> bool:
        try:
            self.run_one(0.1)
        except Empty:
            return True
        return False


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.close()


def test_a_shard_hears_its_commands_in_order_and_other_shards_do_not_wait(gated: Gated) -> None:
    stop = StopShard(transfer=TRANSFER, shard=0)
    for command in (push(5), push(0, first=1), push(9, first=2), stop, push(0, shard=1)):
        gated.gate.perform(command)
    assert gated.done == [push(0, shard=1)]
    gated.steps.passed = 5
    gated.run_one()
    assert gated.done[1:] == [push(5), push(0, first=1)]
    gated.steps.passed = 9
    gated.run_one()
    assert gated.done[3:] == [push(9, first=2), stop]
    gated.gate.perform(push(0, first=3))
    assert gated.done[5:] == [push(0, first=3)]


def test_shards_do_not_wait_for_the_steps_of_other_shards(gated: Gated) -> None:
    gated.gate.perform(push(9, shard=0))
    gated.gate.perform(push(5, shard=1))
    gated.steps.passed = 5
    gated.run_one()
    assert gated.done == [push(5, shard=1)]
    gated.steps.passed = 9
    gated.run_one()
    assert gated.done[1:] == [push(9, shard=0)]


def test_pushes_do_not_wait_where_the_reading_stream_does() -> None:
    gated = Gated(pushes_wait=False)
    gated.gate.perform(push(9))
    gated.gate.perform(open_shard(9))
    assert gated.done == [push(9)]
    gated.close()


def test_waiting_commands_are_dropped_at_close(gated: Gated) -> None:
    gated.gate.perform(push(9))
    gated.gate.close()
    gated.steps.passed = 9
    gated.hears_nothing()
    assert gated.done == []
