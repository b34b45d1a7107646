"""What a follower says to rank 0 before the ranks are a group, and why it went away.

The pipe is the follower's alone, so that nothing it prints is taken for an answer. Rank 0 hears:

1. READY, or a Failure, or the end of a process that died; silence for START_TIMEOUT_S is a hang.
2. A Failure of loading, after which the group is broken. It is written before the group's connections close,
   so whoever sees those close finds it here.
"""

from multiprocessing.connection import Connection, Pipe
from typing import Final

import msgspec

from baton.errors import BatonError, ConfigError, ModelError, WorkerLost

START_TIMEOUT_S: Final = 120.0  # to import torch, from a cold disk and on a busy machine, takes a minute
READY: Final = b"ready"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str  # name of the error's class
    message: str


class FollowerChannel:
    """Rank 0's end for one follower."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._reader, self._writer = Pipe(duplex=False)

    @property
    def descriptor(self) -> int:
        """For the process to inherit; call `handed_over` once it has."""
        return self._writer.fileno()

    def handed_over(self) -> None:
        self._writer.close()  # the follower's is the only one now: its end is the end of the pipe

    def wait_until_ready(self) -> None:
        """Raises the follower's own error, WorkerLost on a hang, EOFError when it died without a word."""
        if not self._reader.poll(START_TIMEOUT_S):
            raise WorkerLost(
                f"tensor-parallel rank {self.rank} was not ready within {START_TIMEOUT_S:g} s: it is ended"
            )
        answer = self._reader.recv_bytes()
        if answer != READY:
            raise self._error(answer)

    def failure(self) -> BatonError | None:
        """What the follower has said about its end, if it has; asked after it was ready."""
        try:
            return self._error(self._reader.recv_bytes()) if self._reader.poll() else None
        except EOFError:
            return None

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _error(self, answer: bytes) -> BatonError:
        failure = msgspec.json.decode(answer, type=Failure)
        known = {kind.__name__: kind for kind in (ConfigError, ModelError)}
        kind = known.get(failure.kind, WorkerLost)
        return kind(f"tensor-parallel rank {self.rank}: {failure.message}")


class RankZero:
    """The follower's end."""

    def __init__(self, descriptor: int) -> None:
        self._writer = Connection(descriptor, readable=False)

    def close(self) -> None:
        self._writer.close()

    def say_ready(self) -> None:
        self._writer.send_bytes(READY)

    def say_failure(self, error: Exception) -> None:
        """Nothing is raised when rank 0 is gone: nobody is left to tell."""
        own = isinstance(error, BatonError)
        message = str(error) if own else f"{type(error).__name__}: {error}"
        failure = Failure(kind=type(error).__name__, message=message)
        try:
            self._writer.send_bytes(msgspec.json.encode(failure))
        except OSError:
            return
