"""Workers that sleep and wake, in one process with the test: what they free, and what comes back."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.cluster import worker_process
from baton.engine.engine import Engine
from baton.messages.operations import Drain
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenIds
from tests.cluster_threads import Cluster, GatewayThread, WorkerThread, wait_for
from tests.node_peers import id_of
from tests.tiny_models import tiny_config, write_config

VOCAB_SIZE, HIDDEN_SIZE = 16_384, 512
WEIGHT_BYTES = 2 * VOCAB_SIZE * HIDDEN_SIZE * 4  # of the embedding and the head, of each worker


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A prefill and a decode worker. The parameter: keys of the model."""
    model = write_config(tmp_path / "model", **getattr(request, "param", {}))
    config = tiny_config(model, cache={"kv_cache_memory_bytes": 2**23})
    with Cluster([config], [config]) as found:
        yield found


def answers(cluster: Cluster, name: str) -> list[list[int | None]]:
    requests = [
        Request(
            request_id=id_of(f"{name}{number}"),
            token_ids=TokenIds.of(range(number, number + 40)),
            sampling=SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True),
        )
        for number in range(4)
        for temperature in (0.0, 1.0)[number % 2 : number % 2 + 1]
    ]
    return [answer.token_ids for answer in cluster.ask(requests)]


def checked_parts(engine: Engine) -> list["weakref.ref[object]"]:
    """Check the engine's integrity; return references that keep none of its parts alive."""
    engine.scheduler.check_integrity()
    runner = engine.runner
    return [weakref.ref(part) for part in (engine, engine.pages, runner.model, runner.pool.device)]


def order(cluster: Cluster, message: Sleep | Wake, *, are_asleep: bool) -> None:
    """Give an order, and wait until both workers have followed."""
    before = {worker.id for worker in cluster.frontend.workers}
    cluster.gateway.call(lambda: cluster.frontend.send_order(message))

    def have_followed() -> bool:
        workers = [each for each in cluster.frontend.workers if each.id not in before]
        return len(workers) == 2 and all(each.is_asleep is are_asleep for each in workers)

    wait_for(have_followed)


@pytest.mark.parametrize(
    "cluster", [{"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE}], indirect=True, ids=["large"]
)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_weights_and_pages_and_the_tokens_after_the_wake_are_those_before(
    cluster: Cluster, level: int
) -> None:
    expected = answers(cluster, "before")
    freed = [each for worker in cluster.workers for each in checked_parts(worker.hosted.engine)]
    before = psutil.Process().memory_info().rss
    order(cluster, Sleep(level=level, number=1), are_asleep=True)
    assert {each.sleep_level for each in cluster.frontend.workers if each.is_asleep} == {level}
    gc.collect()  # in one process, links of the worker that falls asleep last refer to the other one
    assert [part for part in freed if part() is not None] == []
    assert psutil.Process().memory_info().rss < before - 1.8 * WEIGHT_BYTES
    assert cluster.router.cluster_state.index.num_pages == 0
    order(cluster, Wake(number=2), are_asleep=False)
    assert answers(cluster, "after") == expected


@pytest.mark.parametrize(("reserved_bytes", "num_warnings"), [(2**28, 0), (3 * 2**30, 2)])
def test_memory_of_a_gpu_that_sleep_does_not_free_is_logged(
    reserved_bytes: int,
    num_warnings: int,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker_process, "give_back_freed_memory", lambda: reserved_bytes)
    order(cluster, Sleep(level=2, number=1), are_asleep=True)
    assert caplog.text.count("3.0 GiB of its GPU are still in use") == num_warnings


def send(gateway: GatewayThread, *messages: Sleep | Wake) -> None:
    def give() -> None:
        for message in messages:
            gateway.frontend.send_order(message)

    gateway.call(give)


def serving(cluster: Cluster) -> set[str]:
    """Return the ids of the workers that do not sleep."""
    return {each.id for each in cluster.frontend.workers if not each.is_asleep}


def test_worker_that_is_woken_while_it_drains_serves_again(cluster: Cluster) -> None:
    expected = answers(cluster, "before")
    before = serving(cluster)
    send(cluster.gateway, Sleep(number=1), Wake(number=2))
    wait_for(lambda: len(serving(cluster) - before) == 2)
    assert answers(cluster, "after") == expected


def test_orders_of_two_gateways_that_repeat_them_settle_on_the_later_one(cluster: Cluster) -> None:
    before = serving(cluster)
    with contextlib.closing(GatewayThread(cluster.workers[0].config.routers)) as other:
        wait_for(lambda: len(other.frontend.workers) == 2)
        send(cluster.gateway, Sleep(number=1))
        wait_for(lambda: bool(other.frontend.draining))

        def repeat() -> None:
            send(cluster.gateway, Sleep(number=1))
            send(other, Wake(number=2))

        def is_awake_again() -> bool:
            repeat()
            return len(serving(cluster) - before) == 2

        wait_for(is_awake_again)
        settled = serving(cluster) - before
        for number in range(20):
            repeat()
            assert answers(cluster, f"after {number}")
        assert serving(cluster) - before == settled


def test_worker_that_starts_again_while_its_model_sleeps_falls_asleep(cluster: Cluster) -> None:
    expected = answers(cluster, "before")
    order(cluster, Sleep(number=1), are_asleep=True)
    (former,) = cluster.workers_of(WorkerRole.DECODE)
    former.close()
    before = {worker.id for worker in cluster.frontend.workers}
    with contextlib.closing(WorkerThread(former.config)) as again:
        again.wait()
        wait_for(lambda: any(each.is_asleep and each.id not in before for each in cluster.frontend.workers))
        wait_for(lambda: not serving(cluster))  # ids of former processes leave the gateway's list
        order(cluster, Wake(number=2), are_asleep=False)
        assert answers(cluster, "after") == expected


@pytest.mark.parametrize("is_drained_first", [True, False])
def test_worker_that_is_drained_for_good_does_not_sleep(cluster: Cluster, is_drained_first: bool) -> None:
    """A long answer keeps the worker draining until both orders are there."""
    long = Request(
        request_id=id_of("long"),
        token_ids=TokenIds.of(range(8)),
        sampling=SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
    )
    answer = cluster.begin(long)
    wait_for(lambda: bool(answer.token_ids))
    decode = cluster.router.members.find("decode-0")
    assert decode is not None
    orders: list[Drain | Sleep] = [Drain(worker=decode.id), Sleep()]
    for order in orders if is_drained_first else reversed(orders):
        decode.peer.send(order)
    (worker,) = cluster.workers_of(WorkerRole.DECODE)
    wait_for(lambda: worker.has_ended)
