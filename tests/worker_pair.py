"""A prefill and a decode worker with real engines and real transfers; the test is their router and gateway.

All run on the test's thread. Messages wait in one post until a turn carries them, in order: a test can hold
some of them back, lose a process, or say anything as the router or the gateway.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from baton.clock import SystemClock
from baton.decode_worker.worker import DecodeWorker
from baton.engine.cache.page_pool import PageState
from baton.engine.engine import load_engine
from baton.errors import TransferFailed
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.protocol.handoff import Timing
from baton.kvtransfer.protocol.messages import AnyMessage as TransferMessage
from baton.kvtransfer.transports.pages import SharedPool
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Dispatch,
    Hello,
    Members,
    Prefill,
    PullSource,
    Reachable,
    Tokens,
)
from baton.messages.workers import Address, Worker, WorkerRole
from baton.prefill_worker.worker import PrefillWorker
from baton.request import Request, TokenEvent
from baton.rpc.peers import PeerRegistry
from tests.endpoint_host import FaultyEndpoint
from tests.fakes import Letter, Post, PostedPeer
from tests.tiny_models import tiny_config
from tests.transfer_ends import RING

TIMEOUT_S: Final = 15.0
ROUTER: Final = Hello(process=Kind.ROUTER, id="1" * 32)
GATEWAY: Final = Hello(process=Kind.GATEWAY, id="2" * 32)
PREFILL: Final = "3" * 32
DECODE: Final = "4" * 32
_ROUTER_ADDRESS: Final = Address("127.0.0.1", 1)
_TOKEN_BYTES: Final = 512  # KV of one token of the tiny model


class HoldingEndpoint(FaultyEndpoint):
    """Hears no messages of the kind `holds` before `release`."""

    holds: type[TransferMessage] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._held: list[tuple[Link, TransferMessage]] = []
        super().__init__(*arguments, **named)

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def release(self) -> None:
        self.holds, held = None, self._held
        self._held = []
        for link, message in held:
            self._received(link, message)

    def _received(self, link: Link, message: TransferMessage) -> None:
        if self.holds is not None and isinstance(message, self.holds):
            self._held.append((link, message))
        else:
            super()._received(link, message)


class WorkerHost:
    """One worker with all that is its own; `node` follows."""

    node: PrefillWorker | DecodeWorker

    def __init__(self, role: WorkerRole, directory: Path, transport: str, settings: dict[str, Any]) -> None:
        self._shared = SharedPool()
        self.engine = load_engine(tiny_config(directory, **settings), zeros_on_cpu=self._shared.zeros)
        pool, ledger = self.engine.runner.pool.device, self.engine.pages
        endpoint_settings = EndpointSettings(
            keys=RING,
            fingerprint=self.engine.fingerprint,
            layout=self.engine.runner.layout,
            transport=transport,
            timing=Timing(lease_s=3.0, heartbeat_s=0.5),
        )
        self.endpoint = HoldingEndpoint(endpoint_settings, pool, ledger, shared=self._shared)
        self.endpoint.pin, self.endpoint.fetch = self.engine.pin, self.engine.load_pages
        worker = Worker(
            id=PREFILL if role is WorkerRole.PREFILL else DECODE,
            name=f"{role.value}-0",
            role=role,
            model="tiny",
            fingerprint=self.engine.fingerprint,
            address=Address("127.0.0.1", 2),
            kv_address=Address(*self.endpoint.address),
            page_size=ledger.page_size,
            num_pages=ledger.num_pages,
            max_num_seqs=8,
            max_num_batched_tokens=self.engine.runner.config.scheduler.max_num_batched_tokens,
            max_model_len=self.engine.max_model_len,
        )
        self.worker = worker
        self.hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
        self.dialled: list[Address] = []
        self.peers: dict[str, PostedPeer] = {}

    @property
    def id(self) -> str:
        return self.hello.id

    def peer_registry(self, *wanted: WorkerRole) -> PeerRegistry:
        return PeerRegistry(self.hello, [_ROUTER_ADDRESS], self.dialled.append, wanted)

    def connect(self, address: Address, answer: Callable[[Link | None], None]) -> None:
        try:
            link = self.endpoint.link((address.host, address.port))
        except TransferFailed:
            answer(None)
        else:
            answer(link)

    def held(self) -> dict[str, int]:
        """What it holds for anybody, once its ledger has been found sound."""
        pages = self.engine.pages
        pages.check_integrity()
        states = (PageState.ACTIVE, PageState.LEASED, PageState.QUARANTINED)
        held = {state.name: pages.count(state) for state in states}
        held["bookings"] = pages.accounts.num_open
        held |= {"transfers": self.endpoint.num_open, "attempts": len(self.node.attempts)}
        return {name: count for name, count in held.items() if count}

    def close(self) -> None:
        self.endpoint.close()
        self.engine.close()
        self._shared.close()


class WorkerPair:
    def __init__(
        self,
        directory: Path,
        *,
        page_sizes: tuple[int, int] = (4, 4),
        num_pages: tuple[int, int] = (96, 96),
        transport: str = "auto",
        num_host_pages: int = 0,
        decode_disk: Path | None = None,
        kv_transfer_dtype: str = "auto",
        **settings: Any,
    ) -> None:
        """The pairs of numbers are of the prefill and of the decode worker. decode_disk: of its disk tier."""
        self.post = Post()
        self.said: dict[str, list[AnyMessage]] = {ROUTER.id: [], GATEWAY.id: []}
        caches = [
            {"cache": _cache(size, count, num_host_pages) | {"kv_transfer_dtype": kv_transfer_dtype}}
            for size, count in zip(page_sizes, num_pages, strict=True)
        ]
        if decode_disk is not None:
            caches[1]["cache"] |= {"kv_disk_path": str(decode_disk), "kv_disk_bytes": 2**22}
        self.prefill = self._prefill_host(directory, transport, settings | caches[0])
        self.decode = WorkerHost(WorkerRole.DECODE, directory, transport, settings | caches[1])
        peer_registry = self.decode.peer_registry(WorkerRole.PREFILL)
        self.decode_worker = self.decode.node = DecodeWorker(
            self.decode.engine,
            self.decode.endpoint,
            peer_registry,
            SystemClock(),
            KvLinks(self.decode.connect),
        )
        self._alive = [self.prefill, self.decode]
        for host in self._alive:
            self.join(host, ROUTER)
            self.join(host, GATEWAY)
        self.list_members(self.prefill, self.decode)
        self.join(self.prefill, self.decode.hello)
        self.join(self.decode, self.prefill.hello)
        self.turns_until(lambda: self._reports() >= {(DECODE,), (PREFILL,)})

    def _prefill_host(self, directory: Path, transport: str, settings: dict[str, Any]) -> WorkerHost:
        host = WorkerHost(WorkerRole.PREFILL, directory, transport, settings)
        peer_registry = host.peer_registry()
        host.node = PrefillWorker(
            host.engine,
            host.endpoint,
            peer_registry,
            SystemClock(),
            KvLinks(host.connect),
        )
        return host

    def _reports(self) -> set[tuple[str, ...]]:
        return {each.workers for each in self.said[ROUTER.id] if isinstance(each, Reachable)}

    def join(self, host: WorkerHost, hello: Hello) -> None:
        """The host has a connection to that process."""
        host.peers[hello.id] = PostedPeer(host.id, hello, self.post)
        host.node.joined(host.peers[hello.id])

    def leave(self, host: WorkerHost, hello: Hello) -> None:
        host.node.left(host.peers.pop(hello.id))

    def list_members(self, *hosts: WorkerHost) -> None:
        for host in self._alive:
            self.tell(host, ROUTER, Members(workers=tuple(each.worker for each in hosts)))

    def lose_prefill_worker(self, *, is_heard: bool = True) -> None:
        """Its process ends; the decode worker hears of it by its control connection, or not yet."""
        self._alive.remove(self.prefill)
        self.post.lose(PREFILL)
        self.prefill.endpoint.close()
        if is_heard:
            self.leave(self.decode, self.prefill.hello)

    def lose_gateway(self) -> None:
        self.post.lose(GATEWAY.id)
        for host in self._alive:
            self.leave(host, GATEWAY)

    def tell(self, host: WorkerHost, hello: Hello, message: AnyMessage) -> None:
        host.node.received(host.peers[hello.id], message)

    def dispatch(self, request: Request, *, is_local: bool = False, source: PullSource | None = None) -> None:
        """Order the attempt as the router does: Dispatch arrives at once, Prefill by the post.

        source: of a prefix that the worker that computes the prompt pulls.
        """
        if is_local:
            dispatch = Dispatch(request=request, gateway=GATEWAY.id, source=source)
            self.tell(self.decode, ROUTER, dispatch)
            return
        transfer = secrets.token_bytes(16)
        prefill = msgspec.structs.replace(prefill_of(request, transfer), source=source)
        self.post.put(ROUTER.id, PREFILL, prefill)
        dispatch = Dispatch(request=request, gateway=GATEWAY.id, prefill=PREFILL, transfer=transfer)
        self.tell(self.decode, ROUTER, dispatch)

    def cancel(self, request: Request) -> None:
        cancel = Cancel(request_id=request.request_id, attempt=request.attempt)
        self.tell(self.decode, GATEWAY, cancel)

    def hold(self, *kinds: type[AnyMessage]) -> None:
        """Carry no messages of these kinds; none given: carry all again."""
        self.post.holds = lambda letter: isinstance(letter.message, kinds)

    def release(self) -> None:
        """Deliver the messages of transfers that the endpoints held back."""
        for host in self._alive:
            host.endpoint.release()

    def turn(self) -> None:
        for host in self._alive:
            host.node.step()
        for letter in self.post.take():
            self._carry(letter)

    def _carry(self, letter: Letter) -> None:
        if letter.receiver in self.said:
            self.said[letter.receiver].append(letter.message)
            return
        host = self.prefill if letter.receiver == PREFILL else self.decode
        if host in self._alive and letter.sender in host.peers:
            host.node.received(host.peers[letter.sender], letter.message)

    def turns_until(self, is_so: Callable[[], bool], *, ticks: WorkerHost | None = None) -> None:
        """Make turns until it is so. ticks: a worker that ticks before each turn. Raises TimeoutError."""
        until_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            if time.monotonic() > until_s:
                held = {host.hello.worker.name: host.held() for host in self._alive if host.hello.worker}
                raise TimeoutError(f"it did not come to that: {held}")
            if ticks is not None:
                ticks.node.tick()
            self.turn()
            if not any(host.engine.has_work() for host in self._alive):
                for host in self._alive:
                    host.endpoint.wait(0.001)

    def holds(self, kind: type[AnyMessage]) -> bool:
        """True when such a message is held back."""
        return any(isinstance(letter.message, kind) for letter in self.post.held())

    def heard(self, request: Request) -> list[TokenEvent]:
        """What the gateway has of this attempt, by index."""
        batches = [each.events for each in self.said[GATEWAY.id] if isinstance(each, Tokens)]
        name = (request.request_id, request.attempt)
        events = [each for batch in batches for each in batch if (each.request_id, each.attempt) == name]
        return sorted(events, key=lambda event: event.index)

    def failures(self) -> list[AttemptFailed]:
        return [each for each in self.said[GATEWAY.id] if isinstance(each, AttemptFailed)]

    def failure(self) -> AttemptFailed:
        """Make turns until the gateway has been told of a failure; return it. There is one alone."""
        self.turns_until(lambda: bool(self.failures()))
        (failed,) = self.failures()
        return failed

    def is_answered(self, request: Request) -> bool:
        events = self.heard(request)
        return any(event.finish_reason for event in events) and len(events) == events[-1].index + 1 - len(
            request.generated_token_ids
        )

    def answer(self, *requests: Request) -> list[list[TokenEvent]]:
        """Dispatch them all and wait for their ends."""
        for request in requests:
            self.dispatch(request)
        self.turns_until(lambda: all(self.is_answered(request) for request in requests))
        return [self.heard(request) for request in requests]

    def quiet_down(self) -> None:
        """Until nobody holds anything: TimeoutError if something is never given back."""
        self.turns_until(lambda: not any(host.held() for host in self._alive))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def prefill_of(request: Request, transfer: bytes) -> Prefill:
    """Return the router's order to the pair's prefill worker."""
    return Prefill(request=request, gateway=GATEWAY.id, decode=DECODE, transfer=transfer)


def _cache(page_size: int, num_pages: int, num_host_pages: int) -> dict[str, Any]:
    page_bytes = page_size * _TOKEN_BYTES
    return {
        "page_size": page_size,
        "kv_cache_memory_bytes": num_pages * page_bytes,
        "host_cache_memory_bytes": num_host_pages * page_bytes,
    }
