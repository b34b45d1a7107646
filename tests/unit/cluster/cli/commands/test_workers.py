"""Orders about workers that are refused before any router is asked, and orders that a router gets."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from baton.clock import SystemClock
from baton.cluster import operator_node
from baton.cluster.cli.commands import workers
from baton.cluster.cli.main import main
from baton.cluster.files import write_secret
from baton.config.router import RouterConfig
from baton.errors import FAILED, USER_ERROR
from baton.messages.operations import Flip
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Address, WorkerRole
from baton.router.router import Router
from baton.rpc.server import RpcServer
from tests.event_loop import on_loop
from tests.node_peers import TestPeer, a_worker, id_of
from tests.waiting import until

KEY: Final = b"0123456789abcdef"


@pytest.mark.parametrize(
    "layout", ["2P", "P2D", "1P0D", "2p-1d", "1P1D1D", "513P1D", "1P513D", f"{'9' * 5000}P1D"]
)
def test_layout_without_numbers_of_both_roles_is_refused(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", layout]) == USER_ERROR
    assert "layout: expected such as 2P3D" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["0" * 32, "--from", "decode-0"]])
def test_requests_to_migrate_are_named_in_one_way(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", *options]) == USER_ERROR
    assert "give one of REQUEST and --from WORKER" in capsys.readouterr().err


# Orders that a router gets.


class ServedRouter:
    """A router that listens, with one worker."""

    def __init__(self, name: str, *, is_asleep: bool = False, order_number: int = 0) -> None:
        self.router = Router(RouterConfig(), SystemClock(), id_of(name))
        worker = a_worker("d0", is_asleep=is_asleep, order_number=order_number)
        self.worker = TestPeer.worker(self.router, worker)
        self._rpc_server = RpcServer(KEY)
        self._rpc_server.serve(self.router)

    async def listen(self, port: int = 0) -> Address:
        return await self._rpc_server.listen("127.0.0.1", port)

    async def close(self) -> None:
        await self._rpc_server.close()


def run(tmp_path: Path, address: Address, *arguments: str) -> "asyncio.Task[int]":
    """Run a command in a thread; return its exit status."""
    key = tmp_path / "key"
    write_secret(key, KEY)
    options = ["--router", f"{address.host}:{address.port}", "--cluster-key-file", str(key)]
    return asyncio.create_task(asyncio.to_thread(main, [*arguments, *options]))


@on_loop
async def test_command_that_waits_for_a_worker_goes_on_when_the_router_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_node, "ANSWER_TIMEOUT_S", 0.3)
    first = ServedRouter("a")
    address = await first.listen()
    command = run(tmp_path, address, "flip", "d0", "prefill", "--force")
    await until(lambda: bool(first.worker.take(Flip)))
    await first.close()
    await asyncio.sleep(2 * operator_node.ANSWER_TIMEOUT_S)
    second = ServedRouter("b")
    await second.listen(address.port)
    second.worker.leave()
    TestPeer.worker(second.router, a_worker("d0", WorkerRole.PREFILL, id=id_of("flipped")))
    assert await command == 0
    await second.close()
    assert capsys.readouterr().out == "d0 is a prefill worker now\n"


@on_loop
async def test_order_is_repeated_when_the_router_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ServedRouter("a")
    address = await first.listen()
    command = run(tmp_path, address, "sleep")
    await until(lambda: any(isinstance(each, Sleep) for each in first.worker.received))
    (given, *_) = first.worker.take(Sleep)
    await first.close()
    second = ServedRouter("b")  # it has never heard of the order
    await second.listen(address.port)
    await until(lambda: any(isinstance(each, Sleep) for each in second.worker.received))
    assert set(second.worker.take(Sleep)) == {given} and not command.done()
    second.worker.leave()
    TestPeer.worker(second.router, a_worker("d0", id=id_of("s"), is_asleep=True, order_number=given.number))
    assert await command == 0
    await second.close()
    assert capsys.readouterr().out == "the model sleeps\n"


@on_loop
async def test_order_for_workers_that_are_away_waits_for_them(tmp_path: Path) -> None:
    served = ServedRouter("a")
    served.worker.leave()
    command = run(tmp_path, await served.listen(), "sleep")
    await asyncio.sleep(2 * workers.REPEAT_S)
    assert not command.done()
    back = TestPeer.worker(served.router, a_worker("d0", id=id_of("back")))
    await until(lambda: any(isinstance(each, Sleep) for each in back.received))
    (given, *_) = back.take(Sleep)
    back.leave()
    TestPeer.worker(served.router, a_worker("d0", id=id_of("s"), is_asleep=True, order_number=given.number))
    assert await command == 0
    await served.close()


@on_loop
async def test_order_without_a_router_ends_within_a_bound_and_does_not_tell_of_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "UNREACHED_S", 0.5)
    monkeypatch.setattr(operator_node, "ANSWER_TIMEOUT_S", 0.3)
    only = ServedRouter("a")
    command = run(tmp_path, await only.listen(), "sleep")
    await until(lambda: bool(only.worker.take(Sleep)))
    await only.close()
    assert await command == FAILED
    captured = capsys.readouterr()
    assert not captured.out
    assert (
        "no router has answered for 0.5 s; check with `baton status` whether the model has followed"
        in captured.err
    )


@on_loop
async def test_order_tells_that_the_opposite_was_ordered_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ServedRouter("a")
    command = run(tmp_path, await served.listen(), "sleep")
    await until(lambda: any(isinstance(each, Sleep) for each in served.worker.received))
    (given, *_) = served.worker.take(Sleep)
    TestPeer.gateway(served.router).say(Wake(number=given.number + 1))
    assert await command == FAILED
    await served.close()
    captured = capsys.readouterr()
    assert not captured.out and "a later order to do the opposite was given to the model" in captured.err
