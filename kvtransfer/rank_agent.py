"""The agent of a rank that is not rank 0: a thread beside the rank's steps that moves its pages when told to.

1. The rank's process makes it before its pool: `zeros_on_cpu` puts the pool of a CPU into shared memory.
2. `start` connects to rank 0, whose meeting place came with the arguments (rank_agents.py).
3. It opens the doors of its pool when it is set up, and does what rank 0 says, and nothing else.
4. When rank 0's connection ends, for whatever reason, every push is stopped and every door closed.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

import msgspec
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.errors import WireError, WorkerLost
from baton.kvtransfer.message_stream import Call, MessageStream
from baton.kvtransfer.page_memory import SharedPool
from baton.kvtransfer.rank_agents import AgentArguments
from baton.kvtransfer.rank_messages import (
    RANK_SCHEMA,
    AllStopped,
    Came,
    Counted,
    PartEvent,
    RankSettings,
    Ready,
    SetUp,
    StopAll,
    TellCounts,
    ToFollower,
    decode_for_follower,
    encode,
)
from baton.kvtransfer.rank_plane import RankPlane
from baton.kvtransfer.reservation import ID_BYTES
from baton.kvtransfer.step_gate import StepMarks
from baton.wire import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

CONNECT_S: Final = 30.0  # rank 0 may be busy with its own part of a large model


class RankAgent:
    """A companion of an engine's follower."""

    def __init__(self, arguments: str) -> None:
        self._arguments = msgspec.json.decode(arguments, type=AgentArguments)
        self._shared: SharedPool | None = None
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._dropped = DroppedPeers()
        self._pool: Tensor
        self._steps: StepMarks | None = None
        self._stream: MessageStream[ToFollower] | None = None
        self._thread: threading.Thread | None = None
        self._plane: RankPlane | None = None
        self._is_over = False

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the pool that sources on this host can map."""
        self._shared = SharedPool()
        return self._shared.zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: StepMarks | None = None) -> None:
        """steps: of the rank, which write the pool. WorkerLost and the like when rank 0 can't be reached."""
        self._pool = pool
        self._steps = steps
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._arguments.address)
        except OSError as error:
            sock.close()
            raise WorkerLost(f"rank 0 is not there to be met: {error}") from error
        connection = Connection(
            sock, self._arguments.secret, Role.CONNECTING, dropped=self._dropped, schema=RANK_SCHEMA
        )
        connection.handshake(CONNECT_S)
        connection.send(encode(Came(rank=rank)))
        self._stream = MessageStream(connection, decode_for_follower, "kv-rank-0")
        self._stream.start(self._inbox.put, self._obey, self._end)
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """On return no page of this rank moves any more."""
        if self._stream is not None and self._thread is not None:
            self._stream.close()  # which is the end that the thread waits for
            self._thread.join()
        if self._shared is not None:
            self._shared.close()

    def _run(self) -> None:
        try:
            if self._pool.is_cuda:
                torch.cuda.set_device(self._pool.device)
            while not self._is_over:
                self._inbox.get()()
        except Exception:
            logger.exception("the agent of a rank has failed")
        finally:
            if self._stream is not None:
                self._stream.close()
            if self._plane is not None:
                self._plane.close()

    def _obey(self, message: ToFollower) -> None:
        if isinstance(message, SetUp):
            self._set_up(message.settings)
            return
        if self._plane is None or self._stream is None:
            raise WireError(f"{type(message).__name__} came before SetUp", reason="order")
        if isinstance(message, StopAll):
            self._plane.stop()
            self._stream.send(encode(AllStopped()))
        elif isinstance(message, TellCounts):
            self._stream.send(encode(Counted(counts=self._plane.counts())))
        else:
            self._plane.perform(message)

    def _set_up(self, settings: RankSettings) -> None:
        if self._plane is not None:
            raise WireError("SetUp came twice", reason="order")
        self._plane = RankPlane(
            settings,
            self._pool,
            self._shared,
            secrets.token_bytes(ID_BYTES),
            self._inbox.put,
            self._tell,
            clock=SystemClock(),
            dropped=self._dropped,
            steps=self._steps,
        )
        assert self._stream is not None
        self._stream.send(encode(Ready(doors=self._plane.doors)))

    def _tell(self, event: PartEvent) -> None:
        assert self._stream is not None
        self._stream.send(encode(event))

    def _end(self) -> None:
        self._is_over = True
