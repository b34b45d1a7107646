"""The helper processes of one gateway, and who has them.

1. `do` waits for its tenant's turn, takes a helper that is idle, and hands it the job.
2. The helper is given back when the result is there, also where the caller has been cancelled meanwhile.
3. A job that takes longer than MAX_JOB_S, or a helper that ends, is the end of both: the helper is killed,
   and the next job starts another.

One of the helpers takes no job above EXPRESS_BYTES: ordinary prompts never wait for the largest ones alone.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import InvalidRequest, Overloaded
from baton.gateway.text_helper import LENGTH_BYTES, RESULTS, Job, Result, frame
from baton.gateway.text_turns import TextTurns

EXPRESS_BYTES: Final = 64 * 2**10
MAX_JOB_S: Final = 30.0
START_S: Final = 60.0  # a helper's imports and tokenizer on a busy machine
RETRY_AFTER_S: Final = 1.0

logger = logging.getLogger(__name__)


class HelperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a helper reads for."""

    directory: Path
    chat_template: str | None = None  # a file in place of the model's own


class TextPool:
    """To be used on one loop; `close` ends it."""

    def __init__(self, spec: HelperSpec) -> None:
        self._express = _Lane(spec)
        self._any = _Lane(spec)
        self._running: set[asyncio.Task[Result]] = set()

    async def start(self) -> None:
        """Start the processes before somebody waits for one."""
        await asyncio.gather(self._express.helper.start(), self._any.helper.start())

    async def do(self, tenant: str, job: Job) -> Result:
        """Raises Overloaded when too many wait, or the helper failed, and InvalidRequest for a job that takes
        too long.
        """
        lane = self._lane(len(job.data))
        await lane.turns.take(tenant, len(job.data))
        task = asyncio.create_task(lane.helper.do(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: lane.turns.leave())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Kill the processes; what they work on fails."""
        for lane in (self._express, self._any):
            await lane.helper.close()

    def _lane(self, num_bytes: int) -> "_Lane":
        """Small jobs go where fewer jobs are."""
        if num_bytes > EXPRESS_BYTES or self._any.turns.num_taken < self._express.turns.num_taken:
            return self._any
        return self._express


class _Lane:
    """One helper, and the jobs that wait for it."""

    def __init__(self, spec: HelperSpec) -> None:
        self.helper = _Helper(spec)
        self.turns = TextTurns(1)


class _Helper:
    """One process, started when it is first needed; it has at most one job."""

    def __init__(self, spec: HelperSpec) -> None:
        self._spec = spec
        self._process: Process | None = None
        self._is_closed = False

    async def start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            arguments = [str(self._spec.directory)]
            if self._spec.chat_template is not None:
                arguments.append(self._spec.chat_template)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton.gateway.text_helper", *arguments, stdin=PIPE, stdout=PIPE
            )
        return self._process

    async def do(self, job: Job) -> Result:
        process = await self.start()
        try:
            async with asyncio.timeout(MAX_JOB_S):
                return await _exchange(process, job)
        except TimeoutError:
            await self._kill()
            raise InvalidRequest(f"the body takes longer than {MAX_JOB_S:g} s to be read") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._kill()
            logger.warning("a text helper failed: %r", error)
            raise Overloaded("a text helper failed", retry_after_s=RETRY_AFTER_S) from None

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _exchange(process: Process, job: Job) -> Result:
    """Raises OSError and EOFError when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(frame(job))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))
