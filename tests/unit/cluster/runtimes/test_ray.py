import asyncio
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.cluster.runtimes import ray as ray_runtime
from baton.cluster.runtimes.base import ActorPlace, ProcessFailed, ProcessSpec, started_at
from baton.errors import ConfigError, WorkerLost
from baton.messages.bounds import Kind
from tests.event_loop import on_loop
from tests.waiting import until


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


class Call:
    """A method of an actor: a call of it is answered, or stays pending as on a node that hangs."""

    def __init__(self, answer: object = None) -> None:
        self._answer = answer

    def remote(self, *_: object) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(self._answer)
        return future


class Actor:
    """An actor that has started on a node; None: it cannot start."""

    def __init__(self, node_id: str | None = "a", *, ends: bool = False) -> None:
        self.serve = Call(RuntimeError("its node is lost") if ends else None)
        self.report, self.host_place = Call(), Call()
        self.place = Call(None if node_id is None else ActorPlace(NO_PID, 1, node_id))


class Runtime(ray_runtime.RayRuntime):
    """Has nodes in place of those of Ray. No placement group has room on a node that hangs."""

    def __init__(self, nodes: Sequence[Any], hung: str) -> None:
        super().__init__(b"key", address="127.0.0.1:1")
        self.hung = hung
        self._found = nodes
        self._ray = SimpleNamespace(
            exceptions=SimpleNamespace(RayError=RuntimeError),
            util=SimpleNamespace(remove_placement_group=lambda group: None),
            is_initialized=lambda: False,
        )
        self._node_id = "head"
        self.killed: ActorPlace | None = None
        self._needs["decode-0"] = [{"CPU": 1.0}] * 2
        self._roles["decode-0"] = "decode"
        self._placements["decode-0"] = ray_runtime.Placement("first", ("a", "b"))

    def _nodes(self) -> list[Any]:
        return list(self._found)

    def _create_placement_group(self, bundles: Any, node_ids: Any, timeout_s: float) -> Any:
        chosen = tuple(node_ids)[: len(bundles)]
        return None if self.hung in chosen else ray_runtime.Placement("second", chosen)

    def _request_nodes(self) -> None:
        pass

    def _kill_there(self, place: ActorPlace) -> None:
        self.killed = place


NO_PID = 2**22 + 1
SPEC = ProcessSpec(
    kind=Kind.WORKER, name="decode-0", config=ProcessFailed("", False), num_ranks=2, num_nodes=2
)


class Raylet(socketserver.BaseRequestHandler):
    """Greets a client as a raylet does."""

    def handle(self) -> None:
        self.request.sendall(ray_runtime.HTTP2_SETTINGS)


def node_at(name: str, port: int) -> ray_runtime.RayNode:
    return ray_runtime.RayNode(name, "127.0.0.1", port, {"CPU": 2.0})


@pytest.fixture
def three_nodes() -> Iterator[list[Any]]:
    """Their raylets answer, also that of a node that starts no process."""
    with ExitStack() as servers:
        nodes = []
        for name in "abc":
            server = servers.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raylet))
            servers.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            nodes.append(node_at(name, server.server_address[1]))
        yield nodes


def test_raylet_that_only_accepts_connections_does_not_answer(
    three_nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runtime, "GREETING_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.create_server(("127.0.0.1", 0)) as gone:
        others = node_at("hung", hung.getsockname()[1]), node_at("gone", gone.getsockname()[1])
        gone.close()
        found = asyncio.run(ray_runtime._answering([*others, *three_nodes], {"hung", "gone", "a", "c"}))
    assert [node.id for node in found] == ["a", "c"]


@pytest.mark.parametrize("hung", ["a", "b"])
def test_worker_that_cannot_start_on_a_hung_node_is_placed_beside_it(
    three_nodes: list[Any], hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runtime, "ACTOR_START_S", 0.05)

    async def check() -> None:
        runtime = Runtime(three_nodes, hung)
        actors = [Actor(None if name == hung else name) for name in "ab"]
        process = ray_runtime.RayProcess(SPEC, actors, runtime)
        with pytest.raises(WorkerLost, match="decode-0: a node of Ray has started no process in 0.05 s"):
            await asyncio.wait_for(process.ready(), 5.0)
        await asyncio.wait_for(runtime._move_if_needed("decode-0"), 5.0)
        assert set(runtime._placements["decode-0"].node_ids) == {"a", "b", "c"} - {hung}
        has_started = ActorPlace(NO_PID, 1, "b" if hung == "a" else "a")
        assert runtime.killed == has_started

    asyncio.run(check())


@on_loop
async def test_process_of_another_container_of_this_node_is_killed_there(three_nodes: list[Any]) -> None:
    runtime = Runtime(three_nodes, "none")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as namesake:
        place = ActorPlace(namesake.pid, started_at(namesake.pid) - 1, "head")
        runtime.give_up("router-0", [], [place])
        await until(lambda: runtime.killed == place)
        assert namesake.poll() is None, "a process of this container with the same id"
        runtime.give_up("router-0", [], [place._replace(started=place.started + 1)])
        assert namesake.wait(10) == -signal.SIGKILL


def test_worker_whose_host_ends_while_it_loads_is_lost(three_nodes: list[Any]) -> None:
    """Rank 0 itself may wait for minutes for ranks that load."""

    async def check() -> None:
        process = ray_runtime.RayProcess(SPEC, [Actor(), Actor(ends=True)], Runtime(three_nodes, "b"))
        with pytest.raises(WorkerLost, match="decode-0: it ended before it served: its node is lost"):
            await asyncio.wait_for(process.ready(), 5.0)

    asyncio.run(check())


@on_loop
async def test_ranks_of_one_worker_that_would_share_a_gpu_are_refused(three_nodes: list[Any]) -> None:
    runtime = Runtime(three_nodes, "none")
    pair = msgspec.structs.replace(SPEC, name="decode-1", num_nodes=1, gpus_per_rank=0.5)
    alone = msgspec.structs.replace(pair, name="prefill-0", num_ranks=1)
    with pytest.raises(ConfigError, match="decode-1: 2 ranks of one worker cannot share GPUs on Ray"):
        await runtime.place([alone, pair])
    assert set(runtime._needs) == {"decode-0"}


@on_loop
async def test_worker_that_has_flipped_counts_by_its_new_role(three_nodes: list[Any]) -> None:
    runtime = Runtime(three_nodes, "none")
    flipped = msgspec.structs.replace(SPEC, role="prefill")
    later = msgspec.structs.replace(SPEC, name="decode-1", role="decode", num_ranks=1, num_nodes=1)
    await runtime.place([flipped, later])
    runtime._placements["decode-0"] = ray_runtime.Placement("first", ("a", "b"))
    assert runtime._preferred("decode-1", three_nodes) == ["a", "b", "c"]


@on_loop
async def test_released_worker_that_was_given_up_is_no_longer_moved(three_nodes: list[Any]) -> None:
    runtime = Runtime(three_nodes, "none")
    runtime.give_up("decode-0", [], [])
    runtime.release("decode-0")
    runtime._needs["decode-0"] = [{"CPU": 1.0}] * 2
    runtime._placements["decode-0"] = ray_runtime.Placement("again", ("a", "b"))
    await runtime._move_if_needed("decode-0")
    assert runtime._placements["decode-0"].group == "again"


class Group:
    """A placement group that waits until `has_room` is set."""

    def __init__(self) -> None:
        self.has_room = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        self.has_room.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return True


def runtime_with(group: Group) -> tuple[ray_runtime.RayRuntime, list[Group]]:
    """A runtime whose Ray makes this group, and the groups that were removed."""
    runtime, removed = ray_runtime.RayRuntime(b"k" * 16, address="127.0.0.1:1"), list[Group]()
    util = SimpleNamespace(
        placement_group=lambda bundles, **options: group,
        placement_group_table=lambda group: {"bundles_to_node_id": {0: "a"}},
        remove_placement_group=removed.append,
    )
    runtime._ray = SimpleNamespace(util=util)
    runtime._needs["decode-1"] = [{"CPU": 1.0}]
    return runtime, removed


@on_loop
async def test_placement_group_that_finds_room_too_late_is_removed() -> None:
    group = Group()
    runtime, removed = runtime_with(group)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(runtime._place("decode-1", None, 30.0), 0.05)
    assert not removed
    group.has_room.set()
    await until(lambda: removed == [group])
    assert "decode-1" not in runtime._placements


@on_loop
async def test_placement_group_is_removed_when_ray_fails() -> None:
    group = Group()
    group.error = RuntimeError("the head is gone")
    group.has_room.set()
    runtime, removed = runtime_with(group)
    with pytest.raises(RuntimeError, match="the head is gone"):
        await runtime._place("decode-1", None, 30.0)
    assert removed == [group]
