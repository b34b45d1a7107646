"""Ranks that a host starts, as on another node; the host is in this process."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import psutil
import pytest

from baton.cluster import rank_host
from baton.cluster.rank_host import (
    MAX_LINKS,
    SCHEMA,
    HostedRank,
    HostedRanks,
    RankEnded,
    RankHost,
    RankSaid,
    StartRanks,
)
from baton.cluster.runtimes.base import ProcessSpec, assignment
from baton.cluster.worker_process import HostedWorker
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig
from baton.engine.engine import Engine, load_engine
from baton.engine.runner import rank_process, tp_worker
from baton.engine.runner.rank_process import TpAssignment, TpWorkerProcess, error_of
from baton.engine.speculation.draft_lengths import StepCosts
from baton.errors import ORPHANED, ConfigError, ModelError, PeerGone, WireError, WorkerLost
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.ranks.ranks import RankAgents
from baton.messages.bounds import Kind
from baton.messages.workers import Address, HostPlace, RankZero, WorkerRole
from baton.rpc import connection as rpc_connection
from baton.rpc.auth import PAGES, RANKS, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection, RankNetwork
from tests.tiny_models import add, generate, run_to_end, tiny_config, tiny_engine, token_ids, write_config
from tests.transfer_ends import KEY, RING
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

HOST = "127.0.0.2"  # of the other node
PROMPTS = ([1], [3, 1, 4, 1, 5, 9, 2, 6], list(range(60)))
NOWHERE = RankZero(address=Address("127.0.0.1", 1), replica=b"")
NEW_KEY = b"the next key of the cluster"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("nodes") / "model", num_hidden_layers=4)


def spread(model: Path, tp_size: int = 1, **settings: Any) -> EngineConfig:
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": tp_size, "nnodes": 2}
    return tiny_config(model, **sizes, **settings)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


class Nodes:
    """A host, and what rank 0's process has."""

    def __init__(self, config: EngineConfig, ring: KeyRing, host_ring: KeyRing, **settings: Any) -> None:
        """settings: of the worker."""
        self.ring = ring
        self.host = RankHost(self.worker(config, HOST, **settings), 1, host_ring)
        self.agents = self.make_agents(config)
        self.serving = threading.Thread(target=self._serve, daemon=True)
        self.error: WorkerLost | None = None

    def make_agents(self, config: EngineConfig) -> RankAgents:
        here = config.ranks_per_node
        return RankAgents(config.num_ranks, ranks_here=here, host="127.0.0.1", keys=self.ring)

    def worker(self, config: EngineConfig, host: str, **settings: Any) -> WorkerConfig:
        return WorkerConfig(
            role=WorkerRole.DECODE,
            name="decode-0",
            model_name="m",
            engine=config,
            routers=(),
            host=host,
            **settings,
        )

    def hosted(self) -> HostedRanks:
        return HostedRanks([self.host.place], "127.0.0.1", self.ring, self.agents.node_place)

    def load(self, config: EngineConfig) -> Engine:
        return load_engine(config, sidecar=self.agents.sidecar, nodes=self.hosted())

    def _serve(self) -> None:
        try:
            self.host.serve()
        except WorkerLost as error:
            self.error = error

    def close(self) -> None:
        self.agents.close()
        self.host.close()


Make = Callable[..., Nodes]


@pytest.fixture
def make() -> Iterator[Make]:
    before = children()
    with ExitStack() as ends:

        def nodes(
            config: EngineConfig, ring: KeyRing = RING, host_ring: KeyRing | None = None, **settings: Any
        ) -> Nodes:
            made = Nodes(config, ring, host_ring or KeyRing.of(KEY, Kind.WORKER), **settings)
            ends.callback(made.close)
            return made

        yield nodes
    wait_for(lambda: children() == before)


@pytest.fixture
def config(model: Path) -> EngineConfig:
    return spread(model)


@pytest.fixture
def nodes(make: Make, config: EngineConfig) -> Nodes:
    return make(config)


def answers(engine: Engine) -> list[Any]:
    sampling = {"temperature": 1.0, "logprobs": 3}
    return [generate(engine, prompt, seed=seed, **sampling) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(("tp_size", "has_drafts"), [(1, False), (1, True), (2, False)])
def test_stages_on_two_nodes_give_the_tokens_and_logprobs_of_one_rank(
    make: Make, model: Path, tp_size: int, has_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StepCosts({1: 1.0, 4096: 1.0}, {1: 1.0, 4096: 1.0})  # the first drafts pay on any machine
    monkeypatch.setattr("baton.engine.engine.time_steps", lambda *_: costs)
    config = spread(model, tp_size, speculative={"model": str(model)} if has_drafts else None)
    nodes = make(config)
    with closing(tiny_engine(model)) as alone:
        expected = answers(alone)
    before = children()
    with closing(nodes.load(config)) as engine:
        assert len(children() - before) == 2 * tp_size - 1
        assert answers(engine) == expected
        assert (engine.load().num_draft_tokens > 0) == has_drafts
    assert children() == before, "a rank outlives its engine"


def test_worker_that_has_slept_starts_its_ranks_again(nodes: Nodes, config: EngineConfig) -> None:
    nodes.load(config).close()
    nodes.agents.close()
    nodes.agents = nodes.make_agents(config)
    with closing(nodes.load(config)) as engine:
        assert len(generate(engine, [1, 2, 3])) == 8


def test_host_pages_are_pinned_while_steps_are_in_flight(make: Make, model: Path) -> None:
    num_bytes = 24 * 2**11  # 24 pages of 4 tokens in a stage of 2 layers
    cache = {"kv_cache_memory_bytes": num_bytes, "host_cache_memory_bytes": num_bytes}
    config = spread(model, cache=cache)
    prompt, other = list(range(48)), [*range(40, 100), *range(20)]
    with closing(make(config).load(config)) as engine:
        expected = [token_ids(generate(engine, [1, 2, last], max_tokens=20)) for last in (3, 4)]
        generate(engine, prompt, max_tokens=1)
        generate(engine, other, max_tokens=1)  # some of the prompt's pages go to the host
        keys = engine.page_keys(prompt, b"", 4)
        assert None in [engine.scheduler.cache.page_of(key) for key in keys]
        for last in (3, 4):
            add(engine, str(last), [1, 2, last], max_tokens=20)
        outputs = [output for _ in range(6) for output in engine.step()]
        pages = engine.pin(keys, "a reader")
        assert pages is not None
        outputs += run_to_end(engine)
        found = [[each.token_id for each in outputs if each.request_id == str(last)] for last in (3, 4)]
        assert found == expected
        engine.pages.release(pages, "a reader")


def test_agent_listens_on_its_node_with_the_keys_of_its_host(make: Make, model: Path) -> None:
    """The host replaces the keys of the agent: rank 0 sends none."""
    config, host_ring = spread(model), KeyRing.of(KEY, Kind.WORKER)
    nodes = make(config, RING, host_ring)
    with closing(nodes.load(config)) as engine:
        settings = EndpointSettings(keys=RING, fingerprint="m", layout=engine.runner.layout).for_rank(0)
        (rank,) = nodes.agents.set_up(settings)
        assert rank.listeners.node == HOST
        port = int(rank.listeners.addresses["tcp"])
        new_ring = KeyRing.of(NEW_KEY, Kind.WORKER)
        assert admits(port, RING) and not admits(port, new_ring)
        host_ring.replace(new_ring.generations)
        wait_for(lambda: admits(port, new_ring))
        assert not admits(port, RING)
        rank.close()


def test_keys_that_are_replaced_while_a_rank_starts_reach_it(
    make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, host_ring, new_ring = (
        spread(model),
        KeyRing.of(KEY, Kind.WORKER),
        KeyRing.of(NEW_KEY, Kind.WORKER),
    )

    class SlowStart(TpWorkerProcess):
        def __init__(self, assignment: TpAssignment) -> None:
            super().__init__(assignment)
            host_ring.replace((*RING.generations, *new_ring.generations))

    monkeypatch.setattr(rank_host, "TpWorkerProcess", SlowStart)
    nodes = make(config, RING, host_ring)
    with closing(nodes.load(config)) as engine:
        settings = EndpointSettings(keys=RING, fingerprint="m", layout=engine.runner.layout).for_rank(0)
        (rank,) = nodes.agents.set_up(settings)
        wait_for(lambda: admits(int(rank.listeners.addresses["tcp"]), new_ring))
        rank.close()


def admits(port: int, ring: KeyRing) -> bool:
    """Return whether a rank's listener accepts a peer with these keys."""
    sock = socket.create_connection((HOST, port))
    connection = Connection(sock, LinkKeys(ring, PAGES), Role.CONNECTING)
    try:
        connection.handshake()
    except WireError:
        return False
    connection.close()
    return True


def test_rank_that_is_killed_ends_the_engine_and_the_host(nodes: Nodes, config: EngineConfig) -> None:
    before = children()
    nodes.serving.start()
    engine = nodes.load(config)
    (rank,) = children() - before
    rank.kill()
    nodes.serving.join(20.0)  # though no step has asked for the rank
    assert str(nodes.error) == "rank 1 ended with status -9"
    with pytest.raises(WorkerLost, match="rank 1: the (peer is gone|connection is closed)"):
        generate(engine, [1, 2, 3])
    engine.close()


def test_step_raises_the_error_of_a_rank_on_another_node(nodes: Nodes, config: EngineConfig) -> None:
    with closing(nodes.load(config)) as engine:
        engine.runner.rank.send_command(b"no step")
        with pytest.raises(WorkerLost, match="rank 1: .*Error: "):
            generate(engine, [1, 2, 3])


@pytest.mark.parametrize("cut", ["rank", "host"])
def test_idle_worker_ends_with_a_connection_to_another_node(
    nodes: Nodes, config: EngineConfig, cut: str
) -> None:
    before = children()
    worker = HostedWorker(nodes.worker(config, "127.0.0.1"), RING, rank_hosts=[nodes.host.place])
    with closing(worker), ThreadPoolExecutor(1) as threads:
        serving = threads.submit(worker.serve, threading.Event())
        links: Any = worker.engine.runner.rank.links if cut == "rank" else worker._nodes
        for link in links._links.values():
            link._connection.close()
        with pytest.raises(WorkerLost, match="rank 1 ended with status" if cut == "rank" else "is gone"):
            serving.result(20.0)
    wait_for(lambda: children() == before)


@pytest.mark.parametrize("cut", ["rank", "agent"])
def test_idle_worker_of_one_node_ends_with_its_rank(model: Path, cut: str) -> None:
    before = children()
    config = msgspec.structs.replace(spread(model), nnodes=1)
    worker = HostedWorker(
        WorkerConfig(role=WorkerRole.DECODE, name="decode-0", model_name="m", engine=config, routers=()), RING
    )
    with closing(worker), ThreadPoolExecutor(1) as threads:
        serving = threads.submit(worker.serve, threading.Event())
        if cut == "rank":
            (rank,) = children() - before
            rank.kill()
        else:  # the process lives
            ranks: Any = worker.endpoint._ranks
            ranks._others[0]._stream.close()
        with pytest.raises(WorkerLost, match="rank 1 is lost"):
            serving.result(20.0)
    wait_for(lambda: children() == before)


def test_hung_ranks_of_a_node_share_every_timeout(
    make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rank 0 gives up on the host while ranks live on."""
    monkeypatch.setattr(rank_host, "CLOSE_S", 0.7)
    monkeypatch.setattr(rank_host, "FAILURE_S", 0.3)
    hosted_ranks: list[psutil.Process] = []

    class Noted(TpWorkerProcess):
        def __init__(self, assignment: TpAssignment) -> None:
            super().__init__(assignment)
            hosted_ranks.append(psutil.Process(self.process.pid))

    monkeypatch.setattr(rank_host, "TpWorkerProcess", Noted)
    config = tiny_config(model, pipeline_parallel_size=4, nnodes=2)
    nodes = make(config)
    hosted = nodes.hosted()
    with closing(load_engine(config, sidecar=nodes.agents.sidecar, nodes=hosted)):
        for process in hosted_ranks:
            process.suspend()
        begun_s = time.monotonic()
        assert hosted.failure() is None
        assert time.monotonic() - begun_s < 0.5
        hosted.close(1.0)
        assert len(hosted_ranks) == 2 and not any(process.is_running() for process in hosted_ranks)


def test_host_ends_when_rank_0_leaves_a_rank_without_stopping_it(nodes: Nodes, config: EngineConfig) -> None:
    nodes.serving.start()
    with closing(nodes.load(config)) as engine:
        links: Any = engine.runner.rank.links
        links.close()
        nodes.serving.join(20.0)
        assert str(nodes.error) == f"rank 1 ended with status {ORPHANED}"


def test_ranks_end_with_the_link_of_rank_0(nodes: Nodes, config: EngineConfig) -> None:
    before = children()
    nodes.serving.start()
    hosted = nodes.hosted()
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load_engine, config, sidecar=nodes.agents.sidecar, nodes=hosted)
        engine = loading.result()
    assert children() != before
    for link in hosted._links.values():
        link._connection.close()
    wait_for(lambda: children() == before)
    nodes.serving.join(20.0)
    assert "the link of rank 0's process is lost" in str(nodes.error)
    with pytest.raises(WorkerLost):
        generate(engine, [1, 2, 3])
    engine.close()


def dial(nodes: Nodes) -> Connection:
    """A link to the host, as a process with workers' keys makes it."""
    sock = socket.create_connection((nodes.host.place.host, nodes.host.place.port))
    return Connection(sock, LinkKeys(RING, RANKS), Role.CONNECTING, schema=SCHEMA).handshake()


ORDER: Final = msgspec.msgpack.encode(StartRanks(num_threads=1, ranks=NOWHERE, agents=NOWHERE))


def refusal(link: Connection) -> str:
    """The next failure that the host reports."""
    while True:
        said = msgspec.msgpack.decode(link.recv(20.0), type=RankSaid | RankEnded)
        if isinstance(said, RankSaid):
            return str(error_of(said.rank, said.answer))


def test_silent_links_keep_no_replica_from_its_host(nodes: Nodes, config: EngineConfig) -> None:
    with closing(dial(nodes)), closing(dial(nodes)), closing(nodes.load(config)) as engine:
        assert len(generate(engine, [1, 2, 3])) == 8


def test_host_with_too_many_links_says_so(make: Make, model: Path, tmp_path: Path) -> None:
    nodes = make(msgspec.structs.replace(spread(model), model=str(tmp_path / "missing")))
    with ExitStack() as links:
        for _ in range(MAX_LINKS):
            link = links.enter_context(closing(dial(nodes)))
            link.send(ORDER)
            assert "missing" in refusal(link)
        link = links.enter_context(closing(dial(nodes)))
        link.send(ORDER)
        assert refusal(link) == "rank 1: the host has too many links"


def test_silent_link_is_refused(make: Make, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "FIRST_ORDER_S", 0.1)
    with closing(dial(make(spread(model)))) as link, pytest.raises(PeerGone):
        link.recv(20.0)


def test_second_order_to_start_ends_the_ranks_and_the_host(nodes: Nodes) -> None:
    before = children()
    nodes.serving.start()
    with closing(dial(nodes)) as link:
        for _ in range(2):
            link.send(ORDER)
        nodes.serving.join(20.0)
        wait_for(lambda: children() == before)
    assert "the ranks have been started" in str(nodes.error)


def test_rank_that_cannot_load_reports_its_error(make: Make, model: Path, tmp_path: Path) -> None:
    config = spread(model)
    nodes = make(msgspec.structs.replace(config, model=str(tmp_path / "missing")))
    with pytest.raises(ModelError, match="rank 1: .*missing"):
        nodes.load(config)


def test_rank_that_is_killed_in_the_middle_of_an_answer_is_reported(
    make: Make, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is left to connect, so a host that does not say so keeps rank 0 waiting for two minutes."""
    script = tmp_path / "dies"
    script.write_text("#!/bin/sh\nprintf '\\000\\000\\000\\377half' > /proc/self/fd/$3; kill -9 $$\n")
    script.chmod(0o755)
    nodes = make(spread(model))
    monkeypatch.setattr(rank_process, "subprocess", subprocess)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(WorkerLost, match="rank 1 ended with status -9"):
        nodes.load(spread(model))


def test_answer_that_no_rank_gives_is_an_error(model: Path) -> None:
    """Rank 0 would otherwise wait for a rank whose host says what it cannot read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        place = HostPlace("127.0.0.1", listener.getsockname()[1], "elsewhere")
        lying = threads.submit(lie, listener)
        with pytest.raises(WorkerLost, match="rank 1 gave an answer that is no TpWorkerFailure"):
            load_engine(spread(model), nodes=HostedRanks([place], "127.0.0.1", RING, NOWHERE))
        lying.result()


def lie(listener: socket.socket) -> None:
    """Be a host whose ranks say nonsense."""
    sock, _ = listener.accept()
    link = Connection(sock, LinkKeys(RING, RANKS), Role.ACCEPTING, schema=SCHEMA).handshake()
    with closing(link):
        link.recv()
        link.send(msgspec.msgpack.encode(RankSaid(rank=1, answer=b"no JSON")))
        link.recv(20.0)  # CloseRanks


class Unreachable(HostedRanks):
    """Gives the ranks of other nodes an address of rank 0 where nothing listens."""

    def start(self, config: EngineConfig, num_threads: int, network: RankNetwork) -> Sequence[HostedRank]:
        elsewhere = msgspec.structs.replace(network, rank_zero=NOWHERE)
        return super().start(config, num_threads, elsewhere)


def test_reason_why_a_rank_cannot_join_is_reported_at_once(nodes: Nodes, config: EngineConfig) -> None:
    hosted = Unreachable([nodes.host.place], "127.0.0.1", RING, nodes.agents.node_place)
    with pytest.raises(WorkerLost, match="rank 1: rank 1 of 2 did not meet the others: .*refused"):
        load_engine(config, sidecar=nodes.agents.sidecar, nodes=hosted)


def test_reason_why_an_agent_cannot_join_is_reported(nodes: Nodes, config: EngineConfig) -> None:
    hosted = HostedRanks([nodes.host.place], "127.0.0.1", RING, NOWHERE)
    with pytest.raises(WorkerLost, match="rank 1: rank 0 cannot be reached: .*refused"):
        load_engine(config, sidecar=nodes.agents.sidecar, nodes=hosted)


def test_other_weights_on_another_node_are_an_error_that_names_the_node(make: Make, model: Path) -> None:
    config = spread(model)
    nodes = make(msgspec.structs.replace(config, seed=2))
    with pytest.raises(ModelError, match="rank 1: the model's files on node 127.0.0.2 differ from those"):
        nodes.load(config)


def test_rank_checks_the_memory_of_its_own_node(make: Make, model: Path, tmp_path: Path) -> None:
    huge = write_config(tmp_path / "huge", num_hidden_layers=4, hidden_size=2**16, intermediate_size=2**30)
    nodes = make(spread(huge))
    with pytest.raises(ModelError, match=r"rank 1: .*/huge: [\d,]+ bytes of weights; this machine has"):
        nodes.load(spread(model))


def test_host_without_the_cluster_key_is_refused(make: Make, config: EngineConfig) -> None:
    nodes = make(config, RING, KeyRing.of(NEW_KEY, Kind.WORKER))
    with pytest.raises(WorkerLost, match="the host of ranks at 127.0.0.2:.* cannot be reached: .*key"):
        nodes.load(config)


def test_host_and_rank_0_notice_silence_after_the_link_timeout(
    make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts_s: list[float] = []
    monkeypatch.setattr(rpc_connection, "keep_alive", lambda sock, timeout_s: timeouts_s.append(timeout_s))
    nodes = make(spread(model), link_timeout_s=3.0)
    hosted = HostedRanks([nodes.host.place], "127.0.0.1", RING, NOWHERE, link_timeout_s=3.0)
    network = RankNetwork(rank_zero=NOWHERE, own_host="127.0.0.1", keys=RING.generations)
    hosted.start(spread(model), 1, network)
    hosted.close()
    assert timeouts_s == [3.0, 3.0]  # of both ends


def test_links_between_ranks_have_the_timeout_of_the_worker(
    make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[RankNetwork | None] = []

    class Noted(TpWorkerProcess):
        def __init__(self, assignment: TpAssignment) -> None:
            given.append(assignment.network)
            super().__init__(assignment)

    for module in (rank_host, tp_worker):
        monkeypatch.setattr(module, "TpWorkerProcess", Noted)
    config = tiny_config(model, pipeline_parallel_size=4, nnodes=2)
    nodes = make(config, link_timeout_s=3.0)
    agents, timeout_s = nodes.agents.node_place, 3.0
    hosted = HostedRanks([nodes.host.place], "127.0.0.1", RING, agents, link_timeout_s=timeout_s)
    load_engine(config, sidecar=nodes.agents.sidecar, nodes=hosted).close()
    assert [network and network.link_timeout_s for network in given] == 3 * [timeout_s]


def test_log_lines_of_a_host_name_its_node(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's have the worker's name alone."""
    ray_process = pytest.importorskip("baton.cluster.runtimes.ray_process")
    names: list[str] = []
    monkeypatch.setattr(ray_process, "set_up_logging", lambda name, **_: names.append(name))
    context = SimpleNamespace(get_node_id=lambda: "elsewhere")
    monkeypatch.setattr(ray_process.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("BATON_NODE_NAME", "elsewhere")
    config = WorkerConfig(
        role=WorkerRole.DECODE,
        name="decode-0",
        model_name="m",
        engine=spread(model),
        routers=(NOWHERE.address,),
        host=HOST,
    )
    spec = ProcessSpec(kind=Kind.WORKER, name="decode-0", config=config)
    actor = ray_process.RankHostActor(assignment(spec, RING), 1)
    assert names == ["decode-0-node-1"]
    actor._host.close()


def test_host_that_is_gone_is_worker_lost(model: Path) -> None:
    hosted = HostedRanks([HostPlace(HOST, 1, "elsewhere")], "127.0.0.1", RING, NOWHERE)
    with pytest.raises(WorkerLost, match="the host of ranks at 127.0.0.2:1 cannot be reached: .*refused"):
        load_engine(spread(model), nodes=hosted)


def test_engine_without_hosts_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="nnodes: 2 nodes for a worker need `baton serve`"):
        load_engine(spread(model))
    with pytest.raises(ConfigError, match="nnodes: there are hosts on 0 other nodes, not on 1"):
        load_engine(spread(model), nodes=HostedRanks([], "127.0.0.1", RING, None))
