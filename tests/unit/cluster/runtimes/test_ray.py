import asyncio

import pytest

from baton.errors import ConfigError

ray_runtime = pytest.importorskip("baton.cluster.runtimes.ray")


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "cores"),
    [
        (2, [2], 2),
        (2, [16], 16),
        (3, [16], 15),  # five each
        (4, [0, 8, 8], 16),  # nothing computes on a head without cores
        (3, [0, 8, 4], 6),  # two on the smaller, so two cores each
        (8, [2], 8),  # one each, though they must wait for each other
        (1, [], 1),
        (0, [4], 0),
    ],
)
def test_ranks_take_an_even_share_of_each_node(num_ranks: int, nodes: list[int], cores: int) -> None:
    assert ray_runtime.cores_for(num_ranks, nodes) == cores


def test_role_goes_to_the_large_enough_nodes_that_have_the_fewest_of_it() -> None:
    nodes = [
        ray_runtime.RayNode(name, "127.0.0.1", 1, {"CPU": cores} if cores else {})
        for name, cores in (("head", 0), ("a", 2), ("b", 2), ("c", 1))
    ]
    assert ray_runtime.least_used([{"CPU": 2.0}], nodes, {}) == ["a", "b"]
    assert ray_runtime.least_used([{"CPU": 2.0}], nodes, {"a": 1}) == ["b"]
    assert ray_runtime.least_used([{"CPU": 1.0}], nodes, {"a": 1, "b": 1}) == ["c"]
    assert ray_runtime.least_used([{"CPU": 1.0}], nodes, {"a": 1, "b": 1, "c": 1}) == ["a", "b", "c"]
    assert ray_runtime.least_used([{"GPU": 1.0}], nodes, {}) == []


def test_worker_of_several_nodes_goes_to_those_that_have_the_fewest_of_its_role() -> None:
    nodes = [ray_runtime.RayNode(name, "127.0.0.1", 1, {"CPU": 2}) for name in "abcd"]
    bundles = [{"CPU": 2.0}] * 2
    assert ray_runtime.least_used(bundles, nodes, {"a": 1}) == ["b", "c", "d"]
    assert ray_runtime.least_used(bundles, nodes, {"a": 2, "b": 1, "c": 1}) == ["b", "c", "d"]
    assert ray_runtime.least_used([{"CPU": 2.0}] * 5, nodes, {"a": 2}) == ["a", "b", "c", "d"]  # too few


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "Ray at 127.0.0.1:1 cannot be joined: .*[Rr]efused"),
        ("ray://127.0.0.1:10001", "expected HOST:PORT of a cluster that this machine belongs to, or auto"),
        ("nonsense", "expected HOST:PORT"),
    ],
)
def test_unreachable_ray_is_refused(address: str, message: str) -> None:
    pytest.importorskip("ray")
    runtime = ray_runtime.RayRuntime(b"k" * 16, address=address)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(runtime.open())


def test_first_line_of_an_error_of_ray_is_shown() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    died = exceptions.RayActorError(error_msg="The actor died unexpectedly.\n\tclass_name: X\n\tpid: 1")
    assert ray_runtime.first_line(died) == "The actor died unexpectedly"
    raised = exceptions.RayTaskError("serve", "Traceback ...\n  at length", ValueError("page 7\nand more"))
    assert ray_runtime.first_line(raised) == "ValueError: page 7"
    assert ray_runtime.first_line(RuntimeError()) == "RuntimeError"
