"""Whatever dies, breaks or stands still, and whenever: every request has one end and the right tokens."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.unit.gateway.scripted_cluster import ScriptedCluster

WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
PROCESSES = st.sampled_from(["p0", "p1", "d0", "d1", "router"])
ALL = st.sampled_from(["p0", "p1", "d0", "d1", "router", "g0", "g1"])


class Faults(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.cluster = ScriptedCluster(seed)
        self.cluster.wait_until_ready()

    @rule(
        gateway=st.sampled_from(["g0", "g1"]),
        num_tokens=st.sampled_from([3, 40, 100]),
        max_tokens=st.sampled_from([1, 2, 5, 30]),
    )
    def open(self, gateway: str, num_tokens: int, max_tokens: int) -> None:
        self.cluster.open(gateway, num_tokens, max_tokens)

    @rule(number=st.integers(0, 50))
    def cancel(self, number: int) -> None:
        if number < len(self.cluster.clients):
            self.cluster.cancel(number)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.05, 0.3, 2.0]))
    def run(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(name=PROCESSES)
    def crash(self, name: str) -> None:
        self.cluster.crash(name)

    @rule(name=PROCESSES)
    def restart(self, name: str) -> None:
        self.cluster.restart(name)

    @rule(name=ALL)
    def pause(self, name: str) -> None:
        self.cluster.pause(name)

    @rule(name=ALL)
    def resume(self, name: str) -> None:
        process = self.cluster.running[name].process
        if process.is_paused:
            process.resume()

    @rule(number=st.integers(0, 20))
    def cut(self, number: int) -> None:
        wires = list(self.cluster.network.wires)
        if wires:
            wires[number % len(wires)].cut()

    @rule(name=WORKERS, is_busy=st.booleans())
    def fill(self, name: str, is_busy: bool) -> None:
        self.cluster.workers[name].is_busy = is_busy

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.come_to_rest()
            self.cluster.check()


TestFaults: Any = Faults.TestCase
TestFaults.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class ManyFaults(Faults):
    pass


TestManyFaults: Any = ManyFaults.TestCase
TestManyFaults.settings = settings(max_examples=2_000, stateful_step_count=40, deadline=None)
TestManyFaults.pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_undisturbed_requests_are_answered_at_the_first_attempt() -> None:
    cluster = ScriptedCluster(1)
    cluster.wait_until_ready()
    clients = [cluster.open(f"g{number % 2}", 40, 20) for number in range(50)]
    cluster.come_to_rest()
    cluster.check()
    assert {client.end for client in clients} == {"length"}
    for frontend in cluster.frontends.values():
        assert not [name for name in frontend.counters if name.startswith(("replays", "failed"))]
