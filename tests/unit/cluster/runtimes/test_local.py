import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import pytest

from baton.cluster.runtimes.base import Loading, ProcessFailed, share_out, share_out_threads
from baton.cluster.runtimes.local import MAX_REPORT_BYTES, LocalRuntime
from baton.errors import ConfigError, WorkerLost
from baton.messages.workers import Address
from baton.rpc.auth import derive
from tests.event_loop import on_loop
from tests.process_cluster import templates
from tests.process_peer import PEER, spec

KEY: Final = b"k" * 20

KEY_AS_PORT = int.from_bytes(derive(KEY, "id")[:2])  # as tests/process_peer.py says that it has the key


@asynccontextmanager
async def open_runtime() -> AsyncIterator[LocalRuntime]:
    runtime = LocalRuntime(KEY, command=PEER)
    await runtime.open()
    try:
        yield runtime
    finally:
        await runtime.close()


@on_loop
async def test_a_process_says_where_it_serves_and_ends_when_asked() -> None:
    async with open_runtime() as runtime:
        process = await runtime.spawn(spec("serves"))
        assert await process.ready() == Address("127.0.0.1", KEY_AS_PORT)  # it had the key
        process.stop()
        assert await process.watch() == ""


# Ends with the number of further SIGTERMs within a moment after the first.
COUNT_SIGNALS: Final = """
import signal, sys, time
sys.stdin.readline()
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
print('{"type":"ProcessStarted","address":["127.0.0.1",1]}', flush=True)
while not signals:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(len(signals) - 1)
"""


@on_loop
async def test_process_that_drains_is_told_once() -> None:
    """The second SIGTERM would end it at once: `baton restart`, and Ctrl-C while the worker drains."""
    runtime = LocalRuntime(KEY, command=(sys.executable, "-c", COUNT_SIGNALS))
    await runtime.open()
    try:
        process = await runtime.spawn(spec("worker"))
        await process.ready()
        process.stop()
        await asyncio.sleep(0.1)
        process.stop()
        assert await process.watch() == ""
    finally:
        await runtime.close()


@on_loop
async def test_line_that_is_no_report_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async with open_runtime() as runtime:
        process = await runtime.spawn(spec("prints"))
        assert await process.ready() == Address("127.0.0.1", KEY_AS_PORT)
    assert "prints wrote a line that is no report" in caplog.text


def test_reason_of_a_failed_start_fits_a_report() -> None:
    whole = msgspec.json.encode(ProcessFailed.of(ValueError("\x01" * 2**20)))
    assert (
        whole.startswith(b'{"type":"ProcessFailed","reason":"ValueError: ') and len(whole) < MAX_REPORT_BYTES
    )
    assert ProcessFailed.of(ConfigError("none")) == ProcessFailed("none", is_users_error=True)
    assert ProcessFailed.of(WorkerLost("gone")) == ProcessFailed("gone", is_users_error=False)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("fails", ConfigError, "fails: the model is nowhere"),
        ("fails-us", WorkerLost, "fails-us: a bug"),
        ("crashes", WorkerLost, "crashes: it ended by SIGKILL before it served"),
        ("says-much", WorkerLost, "says-much: it ended with status 1 before it served"),
    ],
)
@on_loop
async def test_failed_start_has_a_reason(name: str, kind: type[Exception], message: str) -> None:
    async with open_runtime() as runtime:
        process = await runtime.spawn(spec(name))
        with pytest.raises(kind, match=message):
            await process.ready()
        assert await process.watch() != ""


@on_loop
async def test_how_far_loading_is_can_be_asked() -> None:
    async with open_runtime() as runtime:
        process = await runtime.spawn(spec("loads"))
        assert await process.ready() == Address("127.0.0.1", KEY_AS_PORT)
        assert await process.loading() == Loading(3, 4)  # the last that was said


@on_loop
async def test_closing_leaves_nothing_behind() -> None:
    pids: list[int] = []
    async with open_runtime() as runtime:
        for name in ("serves", "deaf"):
            process = await runtime.spawn(spec(name))
            await process.ready()
            pids.append(process.pid)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_shares_are_even_unless_cores_per_rank_is_set() -> None:
    asked = msgspec.structs.replace(spec("c", num_ranks=2), cores_per_rank=3)
    assert share_out([spec("a", num_ranks=1), spec("b", num_ranks=2), spec("router"), asked], 20) == {
        "a": 4,
        "b": 8,
        "c": 6,
    }


def test_each_role_has_all_cores() -> None:
    workers = [spec(name, num_ranks=1) for name in ("p0", "p1", "d0")]
    roles = [msgspec.structs.replace(each, role=each.name[0]) for each in workers]
    assert share_out_threads(roles, 8) == {"p0": 4, "p1": 4, "d0": 8}
    crowded = [spec("a", num_ranks=1), spec("b", num_ranks=16)]
    assert share_out_threads(crowded, 8) == {"a": 1, "b": 16}  # one for each rank at the least


@on_loop
async def test_more_ranks_than_gpus_cannot_be_placed() -> None:
    async with open_runtime() as runtime:
        greedy = msgspec.structs.replace(spec("worker-0", num_ranks=99), gpus_per_rank=1.0)
        with pytest.raises(ConfigError, match="worker-0: 99 ranks need a GPU each, this machine has"):
            await runtime.place([greedy])


# Reports the variables as the host that it serves at.
PRINT_VARIABLES: Final = """
import os, sys
sys.stdin.readline()
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_CLIENT_PRIORITY")
values = " ".join(os.environ[name] for name in names)
print('{"type":"ProcessStarted","address":["%s",1]}' % values, flush=True)
sys.stdin.readline()
"""


@on_loop
async def test_further_workers_get_free_gpus_and_those_of_released_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.cluster.runtimes.local.usable_gpus", lambda: ["3", "5"])
    for name in ("OMP_NUM_THREADS", "CUDA_MPS_CLIENT_PRIORITY"):
        monkeypatch.delenv(name, raising=False)
    worker = msgspec.structs.replace(
        spec("", num_ranks=1), gpus_per_rank=1.0, role="decode", mps_priority=1, cores_per_rank=3
    )
    a, b, c = (msgspec.structs.replace(worker, name=name) for name in "abc")
    runtime = LocalRuntime(KEY, command=(sys.executable, "-c", PRINT_VARIABLES))
    await runtime.open()
    try:
        await runtime.place([a])
        await runtime.place([a, b])
        with pytest.raises(ConfigError, match="c: all 2 GPUs of this machine are in use"):
            await runtime.place([a, b, c])
        runtime.release("a")
        await runtime.place([b, c])
        said = [(await (await runtime.spawn(each)).ready()).host for each in (b, c)]
    finally:
        await runtime.close()
    assert said == ["3 5 1", "3 3 1"]  # threads, GPU, priority


@on_loop
async def test_an_interrupt_in_the_terminal_is_for_the_parent_alone() -> None:
    async with open_runtime() as runtime:
        process = await runtime.spawn(spec("serves"))
        await process.ready()
        assert os.getpgid(process.pid) != os.getpgid(0)


MODULE: Final = (sys.executable, "-m", "tests.process_peer")


@on_loop
async def test_several_workers_are_forked_from_a_template() -> None:
    runtime = LocalRuntime(KEY, command=MODULE)
    specs = [spec("serves"), spec("crashes"), spec("drains")]
    try:
        await runtime.place(specs)
        serves, crashes, drains = [await runtime.spawn(each) for each in specs]
        assert len(templates()) == 1
        assert await serves.ready() == Address("127.0.0.1", KEY_AS_PORT)
        with pytest.raises(WorkerLost, match="crashes: it ended by SIGKILL before it served"):
            await crashes.ready()
        assert await drains.watch() == ""
        serves.stop()
        assert await serves.watch() == ""
    finally:
        await runtime.close()
    assert not templates()


@on_loop
async def test_the_only_worker_is_a_subprocess() -> None:
    runtime = LocalRuntime(KEY, command=MODULE)
    try:
        await runtime.place([spec("serves")])
        await (await runtime.spawn(spec("serves"))).ready()
        assert not templates()
    finally:
        await runtime.close()


@on_loop
async def test_workers_are_subprocesses_when_the_template_does_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"PYTHONHOME": "/nowhere"}
    monkeypatch.setattr("baton.cluster.template.environment_of_template", lambda num_threads: broken)
    runtime = LocalRuntime(KEY, command=MODULE)
    try:
        specs = [spec("serves"), spec("lives")]
        for _ in range(2):
            await runtime.place(specs)  # a second time, as when workers are added
            for process in [await runtime.spawn(each) for each in specs]:
                await process.ready()
    finally:
        await runtime.close()
    assert caplog.text.count("their template fails: it ended before it was ready") == 1
