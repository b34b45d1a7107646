"""The agent of a rank that is not rank 0. kvtransfer/ranks/ranks.py has its life, as rank 0 sees it."""

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import msgspec
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.errors import WireError, WorkerLost
from baton.kvtransfer.protocol.messages import ID_BYTES
from baton.kvtransfer.ranks.agent_arguments import AgentArguments
from baton.kvtransfer.ranks.executor import CompletedSteps, RankExecutor
from baton.kvtransfer.ranks.messages import (
    RANK_SCHEMA,
    AgentHello,
    AllStopped,
    Counted,
    Ready,
    SetUp,
    StopAll,
    TellCounts,
    ToAgent,
    ToRankZero,
    UseKeys,
    decode_for_agent,
    encode,
)
from baton.kvtransfer.ranks.ranks import CONNECT_S
from baton.kvtransfer.transports.base import RankSettings
from baton.kvtransfer.transports.pages import SharedPool
from baton.kvtransfer.transports.registry import transport_set
from baton.messages.bounds import Kind
from baton.rpc.auth import RANKS, KeyRing, LinkKeys, Role
from baton.rpc.auth import Generations as KeyGenerations
from baton.rpc.connection import Call, Connection, DroppedPeers, MessageStream

logger = logging.getLogger(__name__)


class RankAgent:
    """A thread beside a rank's steps that moves the rank's pages: the sidecar of a TP worker."""

    def __init__(self, arguments: str) -> None:
        """arguments: AgentArguments as JSON."""
        self._arguments = msgspec.json.decode(arguments, type=AgentArguments)
        network = self._network = self._arguments.network
        # None: rank 0 sends them.
        self._keys = None if network is None else KeyRing(Kind.WORKER, network.keys)
        self._shared: SharedPool | None = None
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._dropped = DroppedPeers()
        self._pool: Tensor
        self._steps: CompletedSteps | None = None
        self._stream: MessageStream[ToAgent] | None = None
        self._thread: threading.Thread | None = None
        self._executor: RankExecutor | None = None
        self._is_over = False

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for the pool that sources on this host can map."""
        self._shared = SharedPool()
        return self._shared.zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: CompletedSteps | None = None) -> None:
        """Connect to rank 0, at the address in the arguments. steps: those of the rank, which write the pool.

        WorkerLost, WireError or PeerGone when rank 0 cannot be reached.
        """
        self._pool = pool
        self._steps = steps
        connection = self._dial().handshake(CONNECT_S)
        replica = b"" if self._network is None else self._network.rank_zero.replica
        connection.send(encode(AgentHello(rank=rank, replica=replica)))
        self._stream = MessageStream(connection, decode_for_agent, "kv-rank-0")
        self._stream.start(self._inbox.put, self._perform, self._end)
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        self._thread.start()

    def hear(self, line: bytes) -> None:
        """Replace the keys of an agent on another node than rank 0's. line: KeyGenerations as JSON."""
        assert self._keys is not None
        self._keys.replace(msgspec.json.decode(line, type=KeyGenerations))

    def close(self) -> None:
        """Stop the agent. After the return, no page of this rank moves."""
        if self._stream is not None and self._thread is not None:
            self._stream.close()  # ends the thread
            self._thread.join()
        if self._shared is not None:
            self._shared.close()

    def _dial(self) -> Connection:
        network, dropped = self._network, self._dropped
        try:
            if network is not None and self._keys is not None:
                address = network.rank_zero.address
                sock = socket.create_connection((address.host, address.port), CONNECT_S)
                return Connection(
                    sock,
                    LinkKeys(self._keys, RANKS),
                    Role.CONNECTING,
                    dropped=dropped,
                    schema=RANK_SCHEMA,
                    link_timeout_s=network.link_timeout_s,
                )
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(CONNECT_S)
                sock.connect(self._arguments.address)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            raise WorkerLost(f"rank 0 cannot be reached: {error}") from error
        secret = self._arguments.secret
        return Connection(sock, secret, Role.CONNECTING, dropped=dropped, schema=RANK_SCHEMA)

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
            if self._executor is not None:
                self._executor.close()

    def _perform(self, message: ToAgent) -> None:
        if isinstance(message, SetUp):
            self._set_up(message.settings)
            return
        if self._executor is None:
            raise WireError(f"{type(message).__name__} came before SetUp", reason="order")
        if isinstance(message, StopAll):
            self._executor.stop()
            self._send(AllStopped())
        elif isinstance(message, TellCounts):
            self._send(Counted(counts=self._executor.counts()))
        else:
            self._executor.perform(message)

    def _set_up(self, settings: RankSettings) -> None:
        if self._executor is not None:
            raise WireError("SetUp came twice", reason="order")
        network = self._network
        if network is not None and self._keys is not None:
            settings = msgspec.structs.replace(settings, host=network.own_host, keys=self._keys.generations)
        self._executor = executor = RankExecutor(
            settings,
            self._pool,
            self._shared,
            secrets.token_bytes(ID_BYTES),
            transport_set(settings.transport),
            self._inbox.put,
            self._send,
            clock=SystemClock(),
            dropped=self._dropped,
            steps=self._steps,
            node="" if network is None else network.own_host,
        )
        if self._keys is not None:
            self._keys.follow(lambda: self._inbox.put(self._use_keys))
            self._use_keys()  # they may have been replaced meanwhile
        self._send(Ready(listeners=executor.listeners))

    def _use_keys(self) -> None:
        if self._executor is not None and self._keys is not None:
            self._executor.perform(UseKeys(generations=self._keys.generations))

    def _send(self, message: ToRankZero) -> None:
        assert self._stream is not None
        self._stream.send(encode(message))

    def _end(self) -> None:
        self._is_over = True
