"""The private redis-server of a cluster with `--redis auto`.

1. `start` starts the server on a socket file that only this user can reach. The server keeps nothing on disk.
2. `keep` starts the server again each time it ends: at the same URL, and empty. The routers write their state
   to the new server. Without a server the cluster also runs: its routers share nothing, and learn everything
   again after a restart.
3. `stop` ends the server and removes its folder. The server also ends when its starter is killed; the next
   RedisServer that starts removes the folder then.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from asyncio.subprocess import DEVNULL
from pathlib import Path
from typing import Final, Self

from baton.clock import Clock, SystemClock
from baton.cluster.end_with_parent import ending_with_this_process
from baton.cluster.supervisor import BackOff
from baton.errors import ConfigError, reason_of

START_DEADLINE_S: Final = 10.0
STOP_DEADLINE_S: Final = 5.0
RETRY_S: Final = 10.0  # after a start that failed
PROGRAMS: Final = ("redis-server", "valkey-server")
PREFIX: Final = "baton-redis-"
NEW_PREFIX: Final = "baton-new-redis-"
LOCK: Final = "lock"

logger = logging.getLogger(__name__)


def find_program() -> str | None:
    """Return the path of a server program; None when PATH has none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class RedisServer:
    """A redis-server that keeps its URL when it is started again."""

    def __init__(self, max_memory_bytes: int = 2**30, *, clock: Clock | None = None) -> None:
        """max_memory_bytes: beyond this limit Redis refuses writes."""
        self._max_memory_bytes = max_memory_bytes
        self._clock = clock or SystemClock()
        self._back_off = BackOff()
        self._started_s = 0.0
        self._folder: str | None = None
        self._lock: int | None = None  # held on a file in the folder while the folder is in use
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """The server's URL, once it has started."""
        assert self._folder is not None, "call start first"
        return f"unix://{self._folder}/redis.sock"

    @property
    def pid(self) -> int:
        """The id of the server's present process."""
        assert self._process is not None, "call start first"
        return self._process.pid

    async def start(self) -> None:
        """Start the server, and return when it answers. May be called again after the server has ended.

        Raises ConfigError when there is no program, or the server does not start.
        """
        program = find_program()
        if program is None:
            raise ConfigError(f"none of {', '.join(PROGRAMS)} is on PATH: install one, or set redis to none")
        self._started_s = self._clock.now_s()
        try:
            await self._start(program)
        except OSError as error:
            raise ConfigError(f"{program} cannot be started: {reason_of(error)}") from None

    async def keep(self) -> None:
        """Start the server again each time it ends, until cancelled. Call after `start`."""
        while True:
            status = await self.ended()
            pause_s = self._back_off.after(self._clock.now_s() - self._started_s)
            logger.warning("redis ended with status %d; it is started again in %.1f s", status, pause_s)
            await asyncio.sleep(pause_s)
            while not await self._has_started():
                await asyncio.sleep(RETRY_S)

    async def ended(self) -> int:
        """Wait for the end of the server. Returns its exit status, negative for a signal."""
        assert self._process is not None, "call start first"
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop the server and remove its folder. Cancel `keep` first."""
        await self._end()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder = None
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    async def _has_started(self) -> bool:
        try:
            await self.start()
        except ConfigError as error:
            logger.error("redis does not start again: %s", error)
            return False
        return True

    async def _start(self, program: str) -> None:
        if self._folder is None:
            await asyncio.to_thread(_remove_abandoned_folders)
            folder, self._lock = await asyncio.to_thread(_new_folder)
            self._folder = folder
        socket = Path(self._folder, "redis.sock")
        socket.unlink(missing_ok=True)
        # fmt: off
        self._process = await asyncio.create_subprocess_exec(
            *ending_with_this_process((
                program, "--port", "0", "--unixsocket", str(socket),
                "--unixsocketperm", "700", "--save", "", "--appendonly", "no", "--dir", self._folder,
                "--maxmemory", str(self._max_memory_bytes), "--maxmemory-policy", "noeviction",
                "--daemonize", "no", "--logfile", "redis.log",
            )),
            stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, process_group=0,
        )
        # fmt: on
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                while not await self._answers(socket):
                    await asyncio.sleep(0.01)
        except BaseException as error:
            await self._end()
            if not isinstance(error, TimeoutError):
                raise
            raise ConfigError(f"{program} did not answer in {START_DEADLINE_S:.0f} s") from None

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await asyncio.wait_for(self._process.wait(), STOP_DEADLINE_S)
        self._process = None

    async def _answers(self, socket: Path) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            raise ConfigError(f"the redis-server of this cluster ended at once ({self._process.returncode})")
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket))
        except OSError:
            return False
        writer.write(b"PING\r\n")
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer == b"+PONG\r\n"


def _new_folder() -> tuple[str, int]:
    """Create a folder with a held lock. Return the folder's path and the open lock file.

    The folder gets its final name when the lock is held, so that no other process removes it.
    """
    made = Path(tempfile.mkdtemp(prefix=NEW_PREFIX))
    lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = made.with_name(PREFIX + made.name.removeprefix(NEW_PREFIX))
    made.rename(folder)
    return str(folder), lock


def _remove_abandoned_folders() -> None:
    """Remove this user's folders with a lock that no process holds.

    Process ids do not identify owners: containers that share the temporary folder use the same ids.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
