"""A rank of ours that is another process, as rank 0 sees it: what is asked of it travels to its agent.

1. It comes (rank_agents.py), is set up and says where its doors are.
2. Commands and events go over its connection, in order.
3. The connection ends: it is lost, nothing more begins with it, and what was under way fails. Its agent stops
   writing then, but only its death is proof of that: until then its parts' pages stay where they are.
4. Its process has died, which a pidfd tells: whatever is asked of it has been done.
5. Pages are pushed that rank 0 has written. A push names the step that it needs, and the other rank waits
   until its own part of that step is written (step_gate.py): a digest of the page would not tell.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from baton.errors import BatonError, WorkerLost
from baton.kvtransfer.message_stream import MessageStream, Post
from baton.kvtransfer.messages import RankDoors
from baton.kvtransfer.rank_messages import (
    AllStopped,
    Came,
    ClosePart,
    Command,
    Counted,
    PartEvent,
    PartStopped,
    RankSettings,
    Ready,
    SetUp,
    StopAll,
    StopPart,
    TellCounts,
    ToRankZero,
    WriterStopped,
    decode_for_rank_zero,
    encode,
)
from baton.kvtransfer.rank_plane import Emit
from baton.wire import Connection

OnLost: TypeAlias = Callable[["RemoteRank"], None]

SET_UP_S: Final = 60.0  # doors of a GPU's pool take a while: staging memory, the first CUDA call of a thread


class RemoteRank:
    """`doors` are known from the start. All but `stop`, `close` and `died` are calls of rank 0's thread."""

    def __init__(self, settings: RankSettings, connection: Connection) -> None:
        """connection: to the agent of rank `settings.rank`, past its first word. WorkerLost if it is none."""
        self.rank = settings.rank
        self.is_lost = False
        self._is_dead = False
        self._has_stopped = threading.Event()
        self._counts: dict[str, int] = {}
        self._is_asked = False  # for newer ones
        self._stream = MessageStream(connection, self._decode, f"kv-rank-{settings.rank}")
        self._post: Post
        self._emit: Emit
        self._on_lost: OnLost
        try:
            connection.send(encode(SetUp(settings=settings)))
            answer = decode_for_rank_zero(connection.recv(SET_UP_S))
        except (BatonError, TimeoutError) as error:
            connection.close()
            raise WorkerLost(f"rank {self.rank} did not open its doors: {error}") from error
        if not isinstance(answer, Ready):
            connection.close()
            raise WorkerLost(f"rank {self.rank} said {type(answer).__name__} instead of Ready")
        self.doors: RankDoors = answer.doors

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """on_lost: called twice, when the connection has ended and when the process has; first `is_lost` is
        true, then `is_dead`.
        """
        self._post, self._emit, self._on_lost = post, emit, on_lost
        self._stream.start(post, self._hear, self._lose)

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    def perform(self, command: Command) -> None:
        if not self._is_dead:
            self._stream.send(encode(command))
        elif isinstance(command, ClosePart):
            self._answer(WriterStopped(transfer=command.transfer, part=command.part))
        elif isinstance(command, StopPart):
            self._answer(PartStopped(transfer=command.transfer, part=command.part))

    def counts(self) -> dict[str, int]:
        """Asks for newer ones, which the next call will have."""
        if not self._is_asked and not self.is_lost:
            self._is_asked = True
            self._stream.send(encode(TellCounts()))
        return self._counts

    def stop(self) -> None:
        self._stream.send(encode(StopAll()))

    def wait_until_stopped(self, timeout_s: float) -> bool:
        return self._has_stopped.wait(max(0.0, timeout_s))

    def died(self) -> None:
        """Its process is gone for certain. From any thread."""
        self._has_stopped.set()
        self._post(self._bury)

    def close(self) -> None:
        """Its agent closes its doors by itself, a moment later."""
        self._stream.close()

    def _decode(self, body: bytes) -> ToRankZero:
        """In the reading thread: whoever waits for the last word polls no more."""
        message = decode_for_rank_zero(body)
        if isinstance(message, AllStopped):
            self._has_stopped.set()
        return message

    def _hear(self, message: ToRankZero) -> None:
        if isinstance(message, Counted):
            self._counts, self._is_asked = message.counts, False
        elif not isinstance(message, Came | Ready | AllStopped):
            self._emit(message)

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._on_lost(self)

    def _bury(self) -> None:
        self._lose()
        self._is_dead = True
        self._on_lost(self)

    def _answer(self, event: PartEvent) -> None:
        self._post(partial(self._emit, event))
