"""Damaged streams of control messages against routers and gateways.

A peer that holds the key may send any bytes: it is dropped and counted, no other error is raised, its work
ends with it, and memory is bounded.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.errors import WireError
from baton.gateway.streams.frontend import Frontend
from baton.messages import control as c
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.workers import Address
from baton.request import Request, SamplingParams, TokenEvent, TokenIds
from baton.router.router import Router
from baton.rpc.peers import Node
from baton.rpc.session import FrameReader, encode_frame
from tests.answer import Answer
from tests.flat_memory import memory_stays_flat
from tests.node_peers import TestPeer, a_worker, id_of
from tests.unit.baton.messages.test_control import one_of_each
from tests.unit.kvtransfer.frame_mutations import BOMBS, mutated

OPEN_ID = id_of("open")


class Process:
    """A node that serves one rogue peer after another."""

    def __init__(self, node: Node, joins: Sequence[Callable[[Node], TestPeer]]) -> None:
        self.node = node
        self.messages: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._joins = joins

    def serve(self, rng: random.Random, stream: bytes) -> None:
        peer = rng.choice(self._joins)(self.node)
        reader = FrameReader()
        try:
            for body in reader.feed(stream):
                message = decode(body)
                self.messages[type(message).__name__] += 1
                self.node.received(peer, message)
        except WireError as error:
            self.dropped[error.reason] += 1
        peer.leave()


def a_router() -> Process:
    router = Router(RouterConfig(), ManualClock(), id_of("router"))
    for name in ("p0", "d0"):
        TestPeer.worker(router, a_worker(name))
    workers = [lambda node, name=name: TestPeer.worker(node, a_worker(name)) for name in ("p1", "d1")]
    return Process(router, [reaching_gateway, reaching_gateway, TestPeer.operator, *workers])


def reaching_gateway(node: Node) -> TestPeer:
    peer = TestPeer.gateway(node)
    peer.say(c.Reachable(workers=(id_of("p0"), id_of("d0"))))
    return peer


def a_gateway() -> Process:
    frontend = Frontend(id_of("g"), [Address("h", 1)], lambda address: None, ManualClock())
    workers = [lambda node, name=name: TestPeer.worker(node, a_worker(name)) for name in ("p1", "d1")]
    return Process(frontend, [TestPeer.router, *workers])


def message_for(rng: random.Random) -> AnyMessage:
    """Return a valid message, often about the open request."""
    message = rng.choice(one_of_each(rng))
    fields = msgspec.structs.asdict(message)
    for name in ("request_id", "attempt"):
        if name in fields:
            fields[name] = {"request_id": OPEN_ID, "attempt": rng.randrange(3)}[name]
    if isinstance(message, c.Tokens):
        index = rng.randrange(4)
        fields["events"] = (TokenEvent(OPEN_ID, rng.randrange(3), index, rng.randrange(5)),)
    if isinstance(message, c.Submit):
        fields["request"] = Request(
            request_id=OPEN_ID, token_ids=TokenIds.of((1,) * 40), attempt=rng.randrange(3)
        )
    return type(message)(**fields)


def frames(rng: random.Random) -> list[bytes]:
    return [encode_frame(encode(message_for(rng))) for _ in range(rng.randint(1, 12))]


def open_one(process: Process) -> None:
    """Open a request at a gateway."""
    frontend = process.node
    if isinstance(frontend, Frontend) and not frontend.num_open:
        sampling = SamplingParams(max_tokens=64, temperature=0.0)
        frontend.open(
            Request(request_id=OPEN_ID, token_ids=TokenIds.of((1, 2, 3)), sampling=sampling), Answer()
        )


def fuzz(process: Process, seed: int, num_frames: int) -> None:
    rng = random.Random(seed)
    while num_frames > 0:
        open_one(process)
        stream = mutated(rng, frames(rng)) if rng.randrange(8) else frames(rng)
        num_frames -= len(stream)
        process.serve(rng, b"".join(stream))
    if isinstance(process.node, Router):
        process.node.in_flight.check_integrity()
        assert len(process.node.in_flight) == 0


def check(process: Process) -> None:
    assert set(process.dropped) >= {"length", "version", "message", "protocol"}
    kinds = {type(message).__name__ for message in one_of_each(random.Random(1))}
    assert set(process.messages) == kinds


@pytest.mark.parametrize("make", [a_router, a_gateway])
def test_damaged_frames_crash_and_leak_nothing(make: Callable[[], Process]) -> None:
    process = make()
    fuzz(process, 1, 16_000)
    check(process)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [a_router, a_gateway])
def test_half_a_million_damaged_frames_crash_and_leak_nothing(make: Callable[[], Process]) -> None:
    process = make()
    fuzz(process, 2, 50_000)
    with memory_stays_flat():
        fuzz(process, 3, 500_000)
    check(process)


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_huge_announcement_is_an_error_at_once(bomb: bytes) -> None:
    with pytest.raises(WireError):
        decode(bomb)
