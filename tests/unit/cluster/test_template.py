"""Workers that a template forks differ from subprocesses in nothing that they could notice.

Most templates here have no code of workers, whose import takes seconds of a core.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from typing import Final

import msgspec
import psutil
import pytest

from baton.cluster.template import ForkedProcess, Template
from baton.config.environment import environment_of_child
from tests.forked_program import DIES, HANGS, HAS_TORCH, Facts
from tests.process_cluster import children, templates

MODULE: Final = "tests.forked_program"
PROGRAM: Final = (MODULE, "an argument")
CHILD: Final = environment_of_child(num_threads=1, gpus=("7",), mps_priority=1)
RUNTIME: Final = """
import asyncio, sys
from baton.cluster.template import Template

asyncio.run(Template(sys.argv[1:], limit=1, preload=sys.argv[1]).fork({}))
"""
ENVIRONMENT: Final = CHILD | {"OMP_NUM_THREADS": "1", "NO_TEXT": "\udcff\n"}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def template(runner: asyncio.Runner) -> Iterator[Template]:
    template = small_template(*PROGRAM)
    yield template
    runner.run(template.close())
    assert templates() == []


def small_template(*program: str) -> Template:
    """Return a template without the code of workers."""
    return Template(program, limit=2**20, preload=MODULE)


async def facts_of(process: Process | ForkedProcess) -> Facts:
    assert process.stdout is not None
    return msgspec.json.decode(await process.stdout.readline(), type=Facts)


async def fork(template: Template) -> ForkedProcess:
    process = await template.fork(ENVIRONMENT)
    assert process is not None
    return process


async def end(process: Process | ForkedProcess, status: int = 0) -> int:
    """Have the process end with this status; return the status that the runtime sees."""
    assert process.stdin is not None
    process.stdin.write(f"{status}\n".encode())
    return await process.wait()


def test_forked_process_is_what_a_subprocess_is(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (*PROGRAM, HAS_TORCH)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the template has a thread for each core

    async def both() -> tuple[Facts, Facts]:
        template = Template(program, limit=2**20)
        forked = await fork(template)
        plain = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *program), stdin=PIPE, stdout=PIPE, process_group=0, env=ENVIRONMENT
        )
        facts = await facts_of(forked), await facts_of(plain)
        assert facts[0].pid == forked.pid
        assert await end(forked) == await end(plain) == 0
        await template.close()
        return facts

    facts, expected = runner.run(both())
    assert expected.parent == os.getpid() and expected.group == expected.pid and expected.num_threads == 1
    own = {"pid": facts.pid, "group": facts.pid, "random": facts.random}
    assert facts == msgspec.structs.replace(expected, **own)


def test_end_of_a_forked_process_is_reported_as_that_of_a_subprocess(
    runner: asyncio.Runner, template: Template
) -> None:
    async def statuses() -> list[int]:
        first, second, third, fourth = [await fork(template) for _ in range(4)]
        os.kill(second.pid, signal.SIGKILL)
        third.terminate()
        fourth.stdin.close()  # no other process has this end of the pipe
        return [await end(first, 5), await second.wait(), await third.wait(), await fourth.wait()]

    assert runner.run(statuses()) == [5, -signal.SIGKILL, -signal.SIGTERM, 1]


def test_forked_processes_draw_different_random_numbers(runner: asyncio.Runner, template: Template) -> None:
    async def drawn() -> list[float]:
        processes = [await fork(template) for _ in range(2)]
        numbers = [(await facts_of(each)).random for each in processes]
        for each in processes:
            await end(each)
        return numbers

    assert len(set(runner.run(drawn()))) == 2


def test_killed_template_is_started_again_and_its_processes_live_on(
    runner: asyncio.Runner, template: Template
) -> None:
    async def after_kill() -> None:
        before = await fork(template)
        (killed,) = templates()
        killed.kill()
        after = await fork(template)
        assert templates() not in ([], [killed])
        assert (await facts_of(before)).parent == (await facts_of(after)).parent == os.getpid()
        assert [await end(before, 6), await end(after, 7)] == [6, 7]

    runner.run(after_kill())


def test_template_that_dies_in_a_fork_leaves_no_zombie(runner: asyncio.Runner) -> None:
    async def two_deaths() -> list[int]:
        template = small_template(MODULE, DIES)
        processes = [await fork(template) for _ in range(2)]
        assert len({(await facts_of(each)).pid for each in processes}) == 2
        statuses = [await end(each, 8) for each in processes]
        await template.close()
        return statuses

    before = psutil.Process().children()
    assert runner.run(two_deaths()) == [8, 8]
    assert psutil.Process().children() == before


def test_template_that_hangs_in_an_import_ends_with_the_runtime() -> None:
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, MODULE, HANGS])
    templates: list[psutil.Process] = []
    while not templates or "end_with_parent.py" in " ".join(templates[0].cmdline()):
        time.sleep(0.01)
        templates = psutil.Process(runtime.pid).children()
    runtime.kill()
    runtime.wait()
    assert psutil.wait_procs(templates, 20)[1] == []


def test_template_that_hangs_is_killed_and_not_started_again(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def while_it_hangs() -> None:
        template, before = small_template(*PROGRAM), templates()
        await end(await fork(template))
        (hanging,) = [each for each in templates() if each not in before]
        hanging.suspend()
        monkeypatch.setattr("baton.cluster.template.FORK_TIMEOUT_S", 0.1)
        assert await template.fork(ENVIRONMENT) is None
        assert not hanging.is_running()
        assert await template.fork(ENVIRONMENT) is None
        assert templates() == before

    runner.run(while_it_hangs())


def test_template_that_cannot_start_is_tried_once_for_all_that_wait(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def at_once() -> list[ForkedProcess | None]:
        template = small_template("no.such.module")
        return await asyncio.gather(*(template.fork(ENVIRONMENT) for _ in range(3)))

    assert runner.run(at_once()) == [None] * 3
    assert [each.name for each in caplog.records].count("baton.cluster.template") == 1


def test_template_that_is_closed_while_it_starts_does_not_start_again(runner: asyncio.Runner) -> None:
    async def closed_early() -> ForkedProcess | None:
        template, before = small_template(*PROGRAM), template_children()
        forking = asyncio.create_task(template.fork(ENVIRONMENT))
        while template_children() == before:
            await asyncio.sleep(0.01)
        await template.close()
        assert template_children() == before
        return await forking

    assert runner.run(closed_early()) is None


def template_children() -> list[psutil.Process]:
    """Return the children that are, or will be, templates."""
    return children(lambda command: "baton.cluster.template" in command) + templates()


def test_process_that_another_part_of_the_program_has_waited_for_has_ended(
    runner: asyncio.Runner, template: Template
) -> None:
    async def status() -> int:
        process = await fork(template)
        process.terminate()
        os.waitpid(process.pid, 0)
        return await process.wait()

    assert runner.run(status()) == 255
