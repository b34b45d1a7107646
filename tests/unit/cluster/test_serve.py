import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from baton.bench.sim.suite import usual_times
from baton.cluster.runtimes.base import ProcessSpec
from baton.cluster.runtimes.local import LocalProcess, LocalRuntime
from baton.cluster.serve import COMPILING, LONGEST_COMPILATION_S, Cluster, are_compiled_now, kept_port
from baton.cluster.serve_plan import Topology, specs
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.planner import PlannerConfig
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.kernels import native
from baton.messages.workers import Address, WorkerRole
from tests.event_loop import on_loop

LOOPBACK = "127.0.0.1"


def listen(port: int, option: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((LOOPBACK, port))
    sock.listen()
    return sock


@pytest.mark.parametrize(("option", "num_listeners"), [(socket.SO_REUSEADDR, 1), (socket.SO_REUSEPORT, 3)])
def test_processes_can_listen_on_a_kept_port(option: int, num_listeners: int) -> None:
    with kept_port(LOOPBACK, 0, option) as kept:
        port = kept.getsockname()[1]
        for _ in range(2):
            listening = [listen(port, option) for _ in range(num_listeners)]
            with socket.create_connection((LOOPBACK, port), 1.0):
                pass
            for sock in listening:
                sock.close()


def test_kept_port_accepts_no_connection_by_itself() -> None:
    with kept_port(LOOPBACK, 0, socket.SO_REUSEPORT) as kept, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, kept.getsockname()[1]), 1.0)


def test_port_in_use_is_refused() -> None:
    with listen(0, socket.SO_REUSEPORT) as other:
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {number} on 127.0.0.1 is in use"):
            kept_port(LOOPBACK, number, socket.SO_REUSEPORT)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host: 203.0.113.1 cannot be listened on"):
        kept_port("203.0.113.1", 0, socket.SO_REUSEPORT)


def test_kernels_are_compiled_while_their_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "none"))
    assert not are_compiled_now()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels-0.so").touch()
    assert not are_compiled_now()
    folder = tmp_path / f"{native.COMPILING}x"
    folder.mkdir()
    assert folder.match(COMPILING) and are_compiled_now()
    left_s = time.time() - LONGEST_COMPILATION_S - 1
    os.utime(folder, (left_s, left_s))
    assert not are_compiled_now()


class Machine(LocalRuntime):
    """A machine with room for so many workers. No process starts there."""

    def __init__(self, room: int) -> None:
        super().__init__(b"k" * 20)
        self.room = room
        self.released: list[str] = []

    async def place(self, specs: list[ProcessSpec]) -> None:
        if sum(bool(spec.num_ranks) for spec in specs) > self.room:
            raise ConfigError("there is no room")

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        await asyncio.Event().wait()
        raise AssertionError

    def release(self, name: str) -> None:
        self.released.append(name)


def a_cluster(num_prefill: int, num_decode: int, room: int) -> tuple[Cluster, Machine]:
    config = ServeConfig(
        model="tiny",
        prefill=WorkersConfig(num_workers=num_prefill),
        decode=WorkersConfig(num_workers=num_decode),
    )
    machine = Machine(room)
    cluster = Cluster(config, machine, b"k" * 20, print)
    address = Address(LOOPBACK, 1)
    cluster._topology = Topology(routers=(address,), host=LOOPBACK, port=1, num_gpus=0)
    cluster._processes = [cluster._supervised(spec) for spec in specs(config, cluster._topology)]
    return cluster, machine


@on_loop
async def test_drained_workers_give_their_room_to_others_when_a_cluster_is_scaled() -> None:
    cluster, machine = a_cluster(1, 3, room=4)
    drained = cluster._worker("decode-1")
    assert drained is not None
    drained.is_drained = True
    for _ in range(2):
        await cluster.scale(1, 3)
        assert cluster.ordered()[WorkerRole.DECODE] == ["decode-0", "decode-2", "decode-1"]
        assert machine.released == ["decode-1"]
    await cluster.scale(1, 2)
    await asyncio.sleep(0)
    assert machine.released == ["decode-1", "decode-1"]
    await cluster.close()


@on_loop
async def test_no_worker_is_taken_away_when_there_is_no_room_for_the_others() -> None:
    cluster, machine = a_cluster(2, 2, room=4)
    await cluster.scale(1, 3)
    await asyncio.sleep(0)
    assert cluster.ordered() == {
        WorkerRole.PREFILL: ["prefill-0", "prefill-1"],
        WorkerRole.DECODE: ["decode-0", "decode-1"],
    }
    assert not machine.released
    await cluster.close()


@on_loop
async def test_log_of_plans_that_cannot_be_made_is_an_error_before_the_workers_are_placed(
    tmp_path: Path,
) -> None:
    times = tmp_path / "times.json"
    usual_times().save(times)
    log = str(times / "plans.jsonl")
    config = ServeConfig(
        model="tiny",
        port=0,
        router=RouterConfig(redis="none"),
        planner=PlannerConfig(mode="advise", ttft_ms=1000, times=str(times), log=log),
    )
    cluster = Cluster(config, Machine(room=0), b"k" * 20, print)
    with pytest.raises(ConfigError, match=r"planner.log: .*times.json cannot be made: File exists"):
        await cluster.start()
    await cluster.close()
