"""Timelines of requests through real processes, under load and with a killed decode worker."""

import asyncio
import math
import time

import pytest

from baton.bench.clusters import WatchedCluster
from baton.bench.report import percentile
from baton.bench.serve.waterfall import OPTIONS, UNACCOUNTED_BAR, Checked
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import connected
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.request import SamplingParams
from baton.rpc.peers import Peer
from tests.cluster_threads import wait_for
from tests.node_peers import a_request
from tests.process_cluster import ProcessCluster
from tests.served import served

LOAD_S = 3.0  # half a dozen pings each way
LONGEST_LOAD_S = 30.0  # other processes of the machine may delay every ping of some seconds
BAR_S = 100e-6
KILLS_A_DECODE_WORKER = 3  # a seed
NUM_PROCESSES = 5  # a gateway, a router and three workers


@pytest.fixture(scope="module")
def checked() -> Checked:
    """Some hundred requests at one prefill and two decode workers, one of which is killed meanwhile."""

    async def run() -> Checked:
        record = find_record(cluster.port)
        async with connected(record.routers, record.keys) as operator:
            watched = WatchedCluster(cluster.url, operator, NUM_PROCESSES, cluster.process.pid)
            checked = Checked(await watched.come_together(), 200, seed=KILLS_A_DECODE_WORKER)
            await checked.run(num_clients=8, num_kills=1)
            return checked

    with served("tiny", *OPTIONS, "--prefill", "1", "--decode", "2", OMP_NUM_THREADS="1") as cluster:
        return asyncio.run(run())


def test_every_answered_request_has_a_timeline_that_sums_to_its_time(checked: Checked) -> None:
    assert len(checked.timelines) >= len(checked.taken_s) >= 190 and checked.num_kills
    for timeline in checked.timelines.values():
        assert sum(timeline.seconds.values()) == pytest.approx(timeline.total_s, abs=1e-6)


def test_next_to_nothing_is_unaccounted(checked: Checked) -> None:
    shares = [each.unaccounted_s / each.total_s for each in checked.timelines.values()]
    assert percentile(shares, 99) <= UNACCOUNTED_BAR


def test_client_measures_the_same_time_as_the_gateway(checked: Checked) -> None:
    """The client's time includes the way there and back; the gateway may go on a turn of its loop later."""
    apart_s = [taken_s - timeline.total_s for taken_s, timeline in checked.pairs]
    assert -0.005 < percentile(apart_s, 50) < 0.05


def test_parts_come_from_every_process(checked: Checked) -> None:
    parts = {part.name for timeline in checked.timelines.values() for part in timeline.parts}
    assert {"queued", "prefill_computing", "first_token", "decode_computing", "decode_waiting"} <= parts
    assert {"transfer_exposed", "delivered", "written"} <= parts


def test_killed_worker_costs_a_part_of_its_own(checked: Checked) -> None:
    replayed = [each for each in checked.timelines.values() if "replayed" in each.seconds]
    assert replayed
    for timeline in replayed:
        assert any(attempt.end == "lost" for attempt in timeline.attempts)
        assert timeline.outcome != "answered" or timeline.attempts[-1].end in ("finished", "cancelled")


def answer(cluster: ProcessCluster, name: str) -> None:
    """Wait for the answer to one request."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    running = cluster.begin(a_request(name, 200, sampling=sampling))
    wait_for(lambda: running.has_ended)


def error_s(peer: Peer | None) -> float:
    """Return the error of the measured offset of a process on this machine, whose true offset is 0."""
    assert peer is not None
    return math.inf if peer.clock_offset is None else abs(peer.clock_offset.offset_s)


def test_clocks_of_all_processes_under_load_are_known_within_100_us() -> None:
    """The processes of one machine share its monotonic clock, so every true offset is 0."""
    config = ServeConfig(
        model="tiny",
        runtime="local",
        port=0,
        prefill=WorkersConfig(num_workers=1),
        decode=WorkersConfig(num_workers=1),
        engine=EngineSettings(cache=CacheConfig(kv_cache_memory_bytes=16 << 20)),
        router=RouterConfig(policy="least-loaded"),
    )
    with ProcessCluster(config) as cluster:
        registry = cluster.frontend._peer_registry
        peers = [registry.router, *map(registry.peer, registry.connected())]
        assert len(peers) == 3
        began_s, number, errors_s = time.monotonic(), 0, [math.inf]
        while (loaded_s := time.monotonic() - began_s) < LOAD_S or max(errors_s) > BAR_S:
            assert loaded_s < LONGEST_LOAD_S, errors_s
            number += 1
            answer(cluster, f"r{number}")
            errors_s = [error_s(peer) for peer in peers]
