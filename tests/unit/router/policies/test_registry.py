"""A routing policy from outside the tree, by `package.module:Class`, and names that are none."""

from typing import ClassVar
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.messages.control import Routed
from baton.request import Request
from baton.router.policies.base import NO_CLAIM, ClusterView, PolicyContext, RoutingChoice, TenantClaim
from baton.router.policies.load import LeastLoaded, RoundRobin
from baton.router.policies.registry import POLICIES, policy_class
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import cluster

OUTSIDE = f"{__name__}:LastByName"


class LastByName:
    """Chooses the workers with the last ids."""

    uses_prefix_index: ClassVar[bool] = False
    weighs_local_prefill: ClassVar[bool] = False

    def __init__(self, context: PolicyContext) -> None:
        self.expected: list[int] = []
        self.forgotten: list[str] = []

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_CLAIM) -> RoutingChoice:
        decode = max(member.id for member in view.open_decoders())
        return RoutingChoice(decode, max(view.partners[decode]))

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        self.expected.append(num_tokens)

    def forget(self, worker_id: str) -> None:
        self.forgotten.append(worker_id)


def test_policy_from_outside_the_tree_routes_requests() -> None:
    c = cluster("p0", "p1", "d0", "d1", policy=OUTSIDE)
    for number in range(3):
        routed = c.submit(a_request(f"r{number}", num_tokens=50))
        assert isinstance(routed, Routed)
        assert (routed.decode, routed.prefill) == (id_of("d1"), id_of("p1"))
    policy = c.router.cluster_state.policy
    assert isinstance(policy, LastByName) and policy.expected == [50, 50, 50]


def test_every_policy_of_the_registry_implements_the_protocol() -> None:
    assert all(policy_class(name) is made for name, made in POLICIES.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("least-loded", "did you mean 'least-loaded'"),
        ("no.such.module:Policy", "cannot be imported"),
        ("math:NoSuchPolicy", "cannot be imported"),
        ("math:floor", "is no RoutingPolicy: it lacks choose"),
        (":", "cannot be imported"),
    ],
)
def test_unknown_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_class(name)


LOADS = st.lists(st.floats(min_value=0, max_value=1e9), min_size=1, max_size=8)
BITS = st.integers(0, 2**32 - 1)
CONTEXT = Mock()  # `pick` is pure: it reads no state


@given(LOADS, st.integers(0, 1000), BITS)
def test_least_loaded_is_never_beaten(loads: list[float], num_before: int, random: int) -> None:
    assert loads[LeastLoaded(CONTEXT).pick(loads, num_before, random)] == min(loads)


@given(st.integers(1, 8), st.integers(0, 100))
def test_every_equal_is_picked_by_some_draw(num: int, num_before: int) -> None:
    picked = {LeastLoaded(CONTEXT).pick([1.0] * num, num_before, random) for random in range(num)}
    assert picked == set(range(num))


@given(LOADS, st.integers(0, 1000))
def test_round_robin_visits_all_before_any_twice(loads: list[float], num_before: int) -> None:
    visited = [RoundRobin(CONTEXT).pick(loads, num_before + number, 0) for number in range(len(loads))]
    assert sorted(visited) == list(range(len(loads)))
