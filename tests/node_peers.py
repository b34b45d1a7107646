"""Peers for tests that call a node directly: they keep the messages that the node sends."""

from typing import Any, TypeVar

from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage, encode
from baton.messages.control import Hello
from baton.messages.workers import Address, Load, Worker, WorkerRole, WorkerStatus
from baton.request import Request, SamplingParams, TokenIds
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.peers import Node

MessageT = TypeVar("MessageT")


def id_of(name: str) -> str:
    """Return an id that shows its name in the output of a failing test."""
    return name.encode().hex().ljust(32, "0")[:32]


def name_of(id_: str) -> str:
    """Return the name that `id_of` made the id of; "" of ""."""
    return bytes.fromhex(id_).decode().rstrip("\0")


def a_worker(name: str, role: WorkerRole = WorkerRole.DECODE, **changes: Any) -> Worker:
    """Return a worker; its role is PREFILL if the name begins with "p"."""
    number = sum(map(ord, name))
    fields: dict[str, Any] = {
        "id": id_of(name),
        "name": name,
        "role": WorkerRole.PREFILL if name.startswith("p") else role,
        "model": "tiny",
        "fingerprint": "f",
        "address": Address("127.0.0.1", 1000 + number),
        "kv_address": Address("127.0.0.1", 2000 + number),
        "page_size": 16,
        "num_pages": 64,
        "max_num_seqs": 8,
        "max_model_len": 1024,
    }
    return Worker(**{**fields, **changes})


def a_worker_status(worker: Worker | str, load: Load | None = None, **fields: Any) -> WorkerStatus:
    """Return the status of a worker, or of the one that `a_worker` makes of a name."""
    given = a_worker(worker) if isinstance(worker, str) else worker
    usual: dict[str, Any] = {"load": load or Load(), "num_attempts": 0, "beat_age_s": 0.1}
    return WorkerStatus(worker=given, **{**usual, **fields})


def a_request(name: str = "r", num_tokens: int = 40, **changes: Any) -> Request:
    sampling = changes.pop("sampling", SamplingParams(max_tokens=8, temperature=0.0))
    return Request(
        request_id=id_of(name), token_ids=TokenIds.of(range(1, num_tokens + 1)), sampling=sampling, **changes
    )


def hello_of(worker: Worker) -> Hello:
    return Hello(process=Kind.WORKER, id=worker.id, worker=worker)


class ListeningPeer:
    """A peer that keeps the messages that it is sent, in `received`."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.received: list[AnyMessage] = []
        self.is_open: bool = True
        self.silence_s = self.quiet_s = 0.0
        self.clock_offset: ClockOffset | None = SAME_CLOCK

    @property
    def id(self) -> str:
        return self.hello.id

    def send(self, message: AnyMessage) -> None:
        """Take a message of the node; WireError for a message that fits no frame, as over a connection."""
        encode(message)
        if self.is_open:
            self.received.append(message)

    def close(self) -> None:
        """By the node; `left` follows when the test calls `leave`."""
        self.is_open = False

    def take(self, kind: type[MessageT]) -> list[MessageT]:
        """Return and forget the received messages of that kind."""
        taken: list[MessageT] = [message for message in self.received if isinstance(message, kind)]
        self.received = [message for message in self.received if not isinstance(message, kind)]
        return taken

    def only(self, kind: type[MessageT]) -> MessageT:
        (message,) = self.take(kind)
        return message


class TestPeer(ListeningPeer):
    """A peer that has joined a node."""

    __test__ = False

    def __init__(self, node: Node, hello: Hello) -> None:
        super().__init__(hello)
        self._node = node
        node.joined(self)

    @classmethod
    def gateway(cls, node: Node, name: str = "g") -> "TestPeer":
        return cls(node, Hello(process=Kind.GATEWAY, id=id_of(name)))

    @classmethod
    def router(cls, node: Node, name: str = "router") -> "TestPeer":
        return cls(node, Hello(process=Kind.ROUTER, id=id_of(name)))

    @classmethod
    def operator(cls, node: Node, name: str = "o") -> "TestPeer":
        return cls(node, Hello(process=Kind.OPERATOR, id=id_of(name)))

    @classmethod
    def worker(cls, node: Node, worker: Worker) -> "TestPeer":
        return cls(node, hello_of(worker))

    def say(self, message: AnyMessage) -> None:
        self._node.received(self, message)

    def leave(self) -> None:
        self.is_open = False
        self._node.left(self)
