"""Stubs behave as workers do: whole answers, one event a token, in both roles; and they need no torch."""

import asyncio
import subprocess
import sys

import pytest

from baton.bench.serve.stub import StubWorker, worker_of
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig
from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.control import (
    Cancel,
    Dispatch,
    Heartbeat,
    Hello,
    Members,
    Prefill,
    Prefilled,
    Reachable,
    Tokens,
)
from baton.messages.operations import StatusQuery
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import FinishReason, Request, SamplingParams, TokenEvent, TokenIds
from tests.event_loop import on_loop
from tests.fakes import Post, PostedPeer

ROUTER = Hello(process=Kind.ROUTER, id="1" * 32)
GATEWAY = Hello(process=Kind.GATEWAY, id="2" * 32)


class Stub:
    def __init__(self, role: WorkerRole) -> None:
        self.post = Post()
        self.dialled: list[Address] = []
        self.node = StubWorker(a_stub(role), (Address("127.0.0.1", 1),), self.dialled.append, vocab_size=50)
        self.hello = self.node.hello
        self.peers = {each.id: PostedPeer(self.hello.id, each, self.post) for each in (ROUTER, GATEWAY)}
        for peer in self.peers.values():
            self.node.joined(peer)

    def join(self, hello: Hello) -> PostedPeer:
        peer = self.peers[hello.id] = PostedPeer(self.hello.id, hello, self.post)
        self.node.joined(peer)
        return peer

    def events(self) -> list[TokenEvent]:
        said = [letter.message for letter in self.post.take()]
        return [event for each in said if isinstance(each, Tokens) for event in each.events]

    async def finish(self) -> None:
        while self.node.attempts:
            await asyncio.sleep(0)


def a_stub(role: WorkerRole) -> Worker:
    engine, routers = EngineConfig(model="tiny"), (Address("127.0.0.1", 1),)
    config = WorkerConfig(role=role, name=f"{role}-0", model_name="tiny", engine=engine, routers=routers)
    return worker_of(config, Address("127.0.0.1", 2), 96)


def a_request(number: int = 0, max_tokens: int = 5, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    token_ids = TokenIds.of((1, 2, number))
    return Request(request_id=f"{number:032x}", token_ids=token_ids, sampling=sampling, **fields)  # type: ignore[arg-type]


@on_loop
async def test_an_answer_has_all_its_tokens_and_an_end() -> None:
    stub = Stub(WorkerRole.DECODE)
    stub.node.received(stub.peers[ROUTER.id], Dispatch(request=a_request(), gateway=GATEWAY.id))
    await stub.finish()
    events = stub.events()
    assert [event.index for event in events] == list(range(5))
    assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.LENGTH]
    assert all(event.token_id is not None and 10 <= event.token_id < 50 for event in events)


@on_loop
async def test_a_step_says_all_tokens_in_one_message() -> None:
    stub = Stub(WorkerRole.DECODE)
    for number in range(3):
        dispatch = Dispatch(request=a_request(number), gateway=GATEWAY.id)
        stub.node.received(stub.peers[ROUTER.id], dispatch)
    await stub.finish()
    batches = [letter.message for letter in stub.post.take() if isinstance(letter.message, Tokens)]
    assert [len(batch.events) for batch in batches] == [3] * 5


@on_loop
async def test_a_later_attempt_goes_on_with_the_same_tokens() -> None:
    stub = Stub(WorkerRole.DECODE)
    stub.node.received(stub.peers[ROUTER.id], Dispatch(request=a_request(), gateway=GATEWAY.id))
    await stub.finish()
    whole = stub.events()
    begun = tuple(event.token_id or 0 for event in whole[:2])
    rest = a_request(attempt=1, generated_token_ids=begun)
    stub.node.received(stub.peers[ROUTER.id], Dispatch(request=rest, gateway=GATEWAY.id))
    await stub.finish()
    assert [(e.index, e.token_id) for e in stub.events()] == [(e.index, e.token_id) for e in whole[2:]]


@pytest.mark.parametrize("max_tokens", [1, 4])
@on_loop
async def test_a_pair_of_stubs_shares_an_answer(max_tokens: int) -> None:
    prefill, decode = Stub(WorkerRole.PREFILL), Stub(WorkerRole.DECODE)
    members = Members(workers=tuple(each.hello.worker for each in (prefill, decode) if each.hello.worker))
    for stub in (prefill, decode):
        stub.node.received(stub.peers[ROUTER.id], members)
    assert decode.dialled[-1] == Address("127.0.0.1", 2)
    _, to_prefill = prefill.join(decode.hello), decode.join(prefill.hello)
    request = a_request(max_tokens=max_tokens)
    dispatch = Dispatch(request=request, gateway=GATEWAY.id, prefill=prefill.hello.id, transfer=bytes(16))
    decode.node.received(decode.peers[ROUTER.id], dispatch)
    order = Prefill(request=request, gateway=GATEWAY.id, decode=decode.hello.id, transfer=bytes(16))
    prefill.node.received(prefill.peers[ROUTER.id], order)
    letters = prefill.post.take()
    (first,) = [each.message for each in letters if isinstance(each.message, Prefilled)]
    assert Tokens(events=(first.event,)) in [each.message for each in letters]
    decode.node.received(to_prefill, first)
    await decode.finish()
    events = [first.event, *decode.events()]
    assert [event.index for event in events] == list(range(max_tokens))
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_stubs_report_reachable_peers_and_send_heartbeats() -> None:
    for role in WorkerRole:
        stub = Stub(role)
        other = a_stub(WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL)
        stub.join(Hello(process=Kind.WORKER, id=other.id, worker=other))
        stub.node.received(stub.peers[ROUTER.id], Members(workers=(other,)))
        said = [letter.message for letter in stub.post.take()]
        assert Reachable(workers=(other.id,)) in said
        assert any(isinstance(each, Heartbeat) for each in said)


@on_loop
async def test_a_cancelled_answer_ends() -> None:
    stub = Stub(WorkerRole.DECODE)
    request = a_request(max_tokens=10**9)
    stub.node.received(stub.peers[ROUTER.id], Dispatch(request=request, gateway=GATEWAY.id))
    await asyncio.sleep(0)
    stub.node.received(stub.peers[GATEWAY.id], Cancel(request_id=request.request_id, attempt=0))
    assert not stub.node.attempts
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(stub.events()) < 10


def test_message_for_another_process_is_refused() -> None:
    stub = Stub(WorkerRole.DECODE)
    with pytest.raises(WireError, match="nothing for a stub"):
        stub.node.received(stub.peers[ROUTER.id], StatusQuery())


def test_no_torch_is_imported() -> None:
    code = "import baton.bench.serve.stub, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
