"""Slow steps, steps that never end, and links that swallow or delay bytes leave no request waiting.

The cluster runs in this process, over real sockets; the tests control the duration of steps and the links.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

from baton.bench.faults.link_proxy import Direction, LinkProxy
from baton.cluster.worker_process import HostedWorker
from baton.config.engine import CacheConfig, EngineConfig
from baton.decode_worker.worker import DecodeWorker
from baton.errors import Overloaded
from baton.gateway.streams.request_stream import ReplayLimits
from baton.gateway.streams.routers import SILENT_S
from baton.kvtransfer.links import Link
from baton.kvtransfer.transports import tcp
from baton.kvtransfer.transports.base import LocalRank
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.messages.operations import WatchWorkers, WorkerRemoved
from baton.messages.workers import Address, WorkerRole
from baton.prefill_worker.worker import PrefillWorker
from baton.request import Request, SamplingParams
from baton.rpc.server import RpcThread
from tests.cluster_threads import Cluster, GatewayThread, wait_for
from tests.node_peers import TestPeer, a_request

FIRST_TOKEN_S: Final = 10.0
GAP_S: Final = 12.0  # between two tokens of a stream
MAX_WAIT_S: Final = 4.0  # of a call that no router takes
LIMITS: Final = ReplayLimits(max_wait_s=MAX_WAIT_S)
MEGABIT_PER_S: Final = 125_000.0  # in bytes
SLACK_S: Final = 3.0  # of a busy machine


class SlowWorker(HostedWorker):
    """A worker with longer steps; like the kernels of a model, they hold no interpreter lock."""

    step_s: float = 0.0
    hang: threading.Event | None = None  # each step waits for this event

    def serve(self, stop: threading.Event) -> None:
        on_batch = self.engine.on_batch

        def begin(num_tokens: int) -> None:
            on_batch(num_tokens)
            if self.hang is not None:
                self.hang.wait()
            time.sleep(self.step_s)

        self.engine.on_batch = begin
        super().serve(stop)


class Links:
    """Proxies of all links between workers, made when the links are dialled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proxies: dict[tuple[str, int], LinkProxy] = {}
        self._carries: dict[LinkProxy, str] = {}

    def through(self, address: tuple[str, int], carries: str = "control") -> tuple[str, int]:
        """Return the proxy's address. carries: "control", "kv" (messages about pages) or "pages"."""
        with self._lock:
            if address not in self._proxies:
                self._proxies[address] = LinkProxy(address)
                self._carries[self._proxies[address]] = carries
            return self._proxies[address].address

    def swallow_to(self, address: Address) -> None:
        """Swallow all links to this address, both ways."""
        self._proxies[address.host, address.port].swallow()

    def swallow(self, carries: str = "", *directions: Direction) -> None:
        """Swallow all links, or the links that carry this; both ways, or in these directions alone."""
        for proxy in list(self._proxies.values()):
            if carries in ("", self._carries[proxy]):
                proxy.swallow(*directions)

    def slow(self, carries: str = "", *, delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        """Slow all links, or the links that carry this; see LinkProxy.slow."""
        for proxy in list(self._proxies.values()):
            if carries in ("", self._carries[proxy]):
                proxy.slow(delay_s=delay_s, bytes_per_s=bytes_per_s)

    def restore(self) -> None:
        for proxy in list(self._proxies.values()):
            proxy.restore()

    @property
    def num_connections(self) -> int:
        return sum(proxy.num_connections for proxy in list(self._proxies.values()))

    def close(self) -> None:
        for proxy in list(self._proxies.values()):
            proxy.close()


LINKS: Links = Links()


class ProxiedWorker(SlowWorker):
    """A worker that reaches other workers through `LINKS`."""

    def _make_node(self, thread: RpcThread) -> PrefillWorker | DecodeWorker:
        routers = set(self._config.routers)
        dial, link = thread.dial, self.endpoint.link

        def dial_through(address: Address) -> None:
            dial(address if address in routers else Address(*LINKS.through((address.host, address.port))))

        def link_through(address: tuple[str, int]) -> Link:
            return link(LINKS.through(address, "kv"))

        thread.dial = dial_through  # type: ignore[method-assign]
        self.endpoint.link = link_through  # type: ignore[method-assign]
        return super()._make_node(thread)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """A new LINKS, also for the page bytes of the TCP transport."""
    made = Links()
    monkeypatch.setattr(f"{__name__}.LINKS", made)
    make = tcp.TcpSender.__init__

    def through(self: tcp.TcpSender, rank: LocalRank, address: tuple[str, int]) -> None:
        make(self, rank, made.through(address, "pages"))

    monkeypatch.setattr(tcp.TcpSender, "__init__", through)
    yield made
    made.close()


def engine() -> EngineConfig:
    return EngineConfig(model="tiny", cache=CacheConfig(kv_cache_memory_bytes=16 << 20))


def expected(cluster: Cluster, request: Request) -> list[int | None]:
    """Return the tokens of a request without faults."""
    (answer,) = cluster.ask([request])
    return answer.token_ids


def named(name: str, *, max_tokens: int = 8, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return a_request(name, 200, sampling=sampling, **fields)


def watching(cluster: Cluster) -> TestPeer:
    """Return an operator to which the router reports the workers that it removes."""
    peer = TestPeer.operator(cluster.router)
    peer.say(WatchWorkers())
    return peer


def hosted(cluster: Cluster, role: WorkerRole) -> list[SlowWorker]:
    found = [worker.hosted for worker in cluster.workers_of(role)]
    assert all(isinstance(each, SlowWorker) for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.timeout(180)
def test_swallowed_links_between_prefill_and_decode_cost_a_local_prefill(links: Links) -> None:
    with Cluster([engine()], [engine()], transport="tcp", kind=ProxiedWorker) as cluster:
        tokens = expected(cluster, named("before"))
        assert links.num_connections >= 3  # control, KV control, pages
        operator = watching(cluster)
        links.swallow()
        begun_s = time.monotonic()
        answer = cluster.begin(named("after", cache_salt=b"other"))
        wait_for(lambda: bool(answer.events), FIRST_TOKEN_S + SLACK_S)
        assert time.monotonic() - begun_s < FIRST_TOKEN_S
        wait_for(lambda: answer.has_ended)
        assert answer.token_ids == tokens
        wait_for(lambda: not links_reached(cluster))  # the router pairs no workers over broken links
        (later,) = cluster.ask([named("later", cache_salt=b"third")])
        assert later.token_ids == tokens
        assert operator.take(WorkerRemoved) == []
        cluster.check_nothing_is_held()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("carries", ["control", "kv", "pages"])
@pytest.mark.parametrize(
    "directions",
    [
        pytest.param((), id="both"),
        pytest.param((Direction.FORTH,), id="forth", marks=pytest.mark.slow),
        pytest.param((Direction.BACK,), id="back", marks=pytest.mark.slow),
    ],
)
def test_one_swallowed_link_between_prefill_and_decode_delays_a_stream_briefly(
    links: Links, carries: str, directions: tuple[Direction, ...]
) -> None:
    with Cluster([engine()], [engine()], transport="tcp", kind=ProxiedWorker) as cluster:
        tokens = expected(cluster, named("before"))
        links.swallow(carries, *directions)
        begun_s = time.monotonic()
        answer = cluster.begin(named("after", cache_salt=b"other"))
        wait_for(lambda: bool(answer.events), FIRST_TOKEN_S + SLACK_S)
        first_s = time.monotonic() - begun_s
        wait_for(lambda: answer.has_ended, GAP_S + SLACK_S)
        whole_s = time.monotonic() - begun_s
        assert answer.token_ids == tokens
        assert first_s < FIRST_TOKEN_S and whole_s - first_s < GAP_S


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("carries", "delay_s", "bytes_per_s"),
    [
        pytest.param("", 0.25, MEGABIT_PER_S, id="all"),
        pytest.param("control", 0.25, math.inf, id="delayed messages", marks=pytest.mark.slow),
        pytest.param("pages", 0.0, MEGABIT_PER_S, id="throttled pages", marks=pytest.mark.slow),
        pytest.param("pages", 0.0, MEGABIT_PER_S / 20, id="crawling pages"),
    ],
)
def test_slow_links_between_prefill_and_decode_cost_only_time(
    links: Links, carries: str, delay_s: float, bytes_per_s: float
) -> None:
    with Cluster([engine()], [engine()], transport="tcp", kind=ProxiedWorker) as cluster:
        tokens = expected(cluster, named("before"))
        operator = watching(cluster)
        links.slow(carries, delay_s=delay_s, bytes_per_s=bytes_per_s)
        for number in range(3):
            begun_s = time.monotonic()
            answer = cluster.begin(named(f"slow {number}", cache_salt=b"%d" % number))
            wait_for(lambda: bool(answer.events), FIRST_TOKEN_S + SLACK_S)  # noqa: B023
            first_s = time.monotonic() - begun_s
            wait_for(lambda: answer.has_ended, GAP_S + SLACK_S)  # noqa: B023
            assert answer.token_ids == tokens
            assert first_s < FIRST_TOKEN_S
        assert operator.take(WorkerRemoved) == []
        links.restore()
        (later,) = cluster.ask([named("later", cache_salt=b"later")])
        assert later.token_ids == tokens
        cluster.check_nothing_is_held()


def links_reached(cluster: Cluster) -> bool:
    """Return whether any worker reports that it reaches another."""
    return any(member.reached for member in cluster.router.members.all())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("step_s", "num_tokens"), [(3.5, 2), pytest.param(6.0, 10, marks=pytest.mark.slow)])
def test_slow_steps_that_end_cost_no_membership_and_no_request(step_s: float, num_tokens: int) -> None:
    with Cluster([engine()], [engine()], kind=SlowWorker) as cluster:
        tokens = expected(cluster, named("before", max_tokens=num_tokens))
        operator = watching(cluster)
        for role in WorkerRole:
            for worker in hosted(cluster, role):
                worker.step_s = step_s
        answers = [
            cluster.begin(named(f"slow {number}", max_tokens=num_tokens, cache_salt=b"%d" % number))
            for number in range(3)
        ]
        wait_for(lambda: all(answer.has_ended for answer in answers), 240.0)
        assert [answer.token_ids for answer in answers] == [tokens] * 3
        assert operator.take(WorkerRemoved) == []
        assert not any(name.startswith("replays") for name in cluster.frontend.counters)


@pytest.mark.timeout(180)
def test_worker_hung_in_a_step_is_removed_within_its_bound_and_its_streams_go_on() -> None:
    bound_s, released = 4.0, threading.Event()
    with (
        contextlib.ExitStack() as ends,
        Cluster([engine()], [engine()] * 2, kind=SlowWorker, step_timeout_s=bound_s) as cluster,
    ):
        ends.callback(released.set)
        tokens = expected(cluster, named("before"))
        cluster.ask([named(f"warm {number}", cache_salt=b"w%d" % number) for number in range(4)])
        operator = watching(cluster)
        answers = [cluster.begin(named(f"hung {number}", cache_salt=b"%d" % number)) for number in range(4)]
        hung = hosted(cluster, WorkerRole.DECODE)[0]
        hung.hang = released
        begun_s = time.monotonic()
        wait_for(lambda: any(isinstance(each, WorkerRemoved) for each in operator.received), bound_s + 30.0)
        removed = operator.only(WorkerRemoved)
        assert (removed.name, "its bound is 4 s" in removed.reason) == ("decode-0", True)
        assert bound_s - 1.0 < time.monotonic() - begun_s < bound_s + 2.0 + SLACK_S
        wait_for(lambda: all(answer.has_ended for answer in answers))
        assert [answer.token_ids for answer in answers] == [tokens] * 4
        hung.hang = None
        released.set()


def other_gateway(cluster: Cluster, links: Links, limits: ReplayLimits = LIMITS) -> GatewayThread:
    """A second gateway of a cluster that reaches routers and workers through `links`."""

    def through(address: Address) -> Address:
        return Address(*links.through((address.host, address.port)))

    return GatewayThread(cluster.workers[0].config.routers, limits, through)


@pytest.mark.timeout(180)
def test_first_token_lost_in_a_swallowed_link_comes_from_another_attempt() -> None:
    with (
        Cluster([engine()], [engine()]) as cluster,
        contextlib.closing(Links()) as links,
        contextlib.closing(other_gateway(cluster, links, ReplayLimits())) as other,
    ):
        tokens = expected(cluster, named("before"))
        wait_for(lambda: len(other.frontend.workers) == 2 and not other.frontend.why_not_ready)
        (prefill,) = (m.worker for m in cluster.router.members.all() if m.worker.role is WorkerRole.PREFILL)
        links.swallow_to(prefill.address)
        begun_s = time.monotonic()
        for number in range(2):
            answer = other.begin(named(f"after {number}", cache_salt=b"%d" % number))
            wait_for(lambda: answer.has_ended)  # noqa: B023
            assert answer.token_ids == tokens
        assert time.monotonic() - begun_s < LINK_TIMEOUT_S + 2.0 + SLACK_S
        cluster.check_nothing_is_held()


@pytest.mark.timeout(180)
def test_gateway_with_swallowed_links_reports_it_is_dropped_and_recovers() -> None:
    with (
        contextlib.ExitStack() as ends,
        Cluster([engine()], [engine()], kind=SlowWorker) as cluster,
        contextlib.closing(Links()) as links,
        contextlib.closing(other_gateway(cluster, links)) as other,
    ):
        wait_for(lambda: not other.frontend.why_not_ready)
        (decode,) = hosted(cluster, WorkerRole.DECODE)
        decode.step_s = 0.05
        ends.callback(setattr, decode, "step_s", 0.0)
        stream = other.begin(named("long", max_tokens=700))
        wait_for(lambda: bool(stream.events))
        links.swallow()
        begun_s = time.monotonic()
        wait_for(lambda: bool(other.frontend.why_not_ready))
        assert time.monotonic() - begun_s < SILENT_S + SLACK_S
        assert "no router has answered" in other.frontend.why_not_ready
        # Workers drop the gateway within the links' timeout, and end its attempts.
        wait_for(lambda: not decode.node.attempts)
        assert time.monotonic() - begun_s < LINK_TIMEOUT_S + 1.0 + SLACK_S
        assert len(stream.events) < 700
        refused = other.begin(named("refused"))
        wait_for(lambda: refused.has_ended, MAX_WAIT_S + 1.0 + SLACK_S)
        assert isinstance(refused.error, Overloaded) and refused.error.retry_after_s > 0
        assert "no router answered" in str(refused.error)
        links.restore()
        wait_for(lambda: not other.frontend.why_not_ready)
        decode.step_s = 0.0
        wait_for(lambda: stream.has_ended)
        assert len(stream.token_ids) == 700
        again = other.begin(named("again"))
        wait_for(lambda: again.has_ended)
        assert again.token_ids == stream.token_ids[:8]
        cluster.check_nothing_is_held()
