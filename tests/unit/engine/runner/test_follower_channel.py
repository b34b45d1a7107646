"""Both ends in one process."""

import os
from collections.abc import Iterator

import pytest

from baton.engine.runner.tp_worker import RankZero, TpWorkerChannel
from baton.errors import BatonError, ConfigError, ModelError, WorkerLost


@pytest.fixture
def channel() -> Iterator[TpWorkerChannel]:
    channel = TpWorkerChannel(3)
    yield channel
    channel.close()


@pytest.fixture
def rank_0(channel: TpWorkerChannel) -> RankZero:
    inherited = RankZero(os.dup(channel.descriptor))
    channel.handed_over()
    return inherited


def test_a_follower_that_is_ready_has_no_failure(channel: TpWorkerChannel, rank_0: RankZero) -> None:
    rank_0.say_ready()
    channel.wait_until_ready()
    assert channel.failure() is None


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ModelError("a.json: is damaged"), ModelError, "rank 3: a.json: is damaged"),
        (ConfigError("device: none"), ConfigError, "rank 3: device: none"),
        (MemoryError("9 bytes"), WorkerLost, "rank 3: MemoryError: 9 bytes"),
    ],
)
@pytest.mark.parametrize("is_ready", [False, True])
def test_an_error_arrives_as_what_it_was(
    channel: TpWorkerChannel,
    rank_0: RankZero,
    error: Exception,
    kind: type[BatonError],
    message: str,
    is_ready: bool,
) -> None:
    if is_ready:
        rank_0.say_ready()
        channel.wait_until_ready()
    rank_0.say_failure(error)
    if is_ready:
        failure = channel.failure()
        assert type(failure) is kind and message in str(failure)
    else:
        with pytest.raises(kind, match=message):
            channel.wait_until_ready()


def test_the_end_of_a_follower_is_the_end_of_the_pipe(channel: TpWorkerChannel, rank_0: RankZero) -> None:
    rank_0.close()
    with pytest.raises(EOFError):
        channel.wait_until_ready()
    assert channel.failure() is None


def test_a_failure_that_nobody_hears_is_no_error(channel: TpWorkerChannel, rank_0: RankZero) -> None:
    channel.close()
    rank_0.say_failure(ModelError("x"))
