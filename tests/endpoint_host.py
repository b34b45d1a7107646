"""A whole endpoint with its ledger and its loop, in the test's process or in one of its own.

`send` and `begin` have the destination grant pages, as the router does in a cluster.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import TransferFailed
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import GrantedTransfer, Timing, TransferEnded
from baton.kvtransfer.ranks.ranks import RankAgents
from baton.kvtransfer.transports.pages import SharedPool
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing
from tests.faulty_endpoint import FaultyEndpoint, layout
from tests.numbered_pages import NumberedPages, key_of
from tests.rank_process import LateSteps, RankProcess, fill, shape_of
from tests.remote import Remote
from tests.transfer_ends import KEY
from tests.waiting import wait_for

__all__ = ["DEADLINE_S", "KEY", "NUM_PAGES", "EndpointHost", "FaultyEndpoint", "HostProcess", "ask", "layout"]

NUM_PAGES: Final = 64
DEADLINE_S: Final = 20.0
GRANT_S: Final = 5.0


class EndpointHost:
    """An endpoint, its ledger and a loop. Only the loop's thread touches both; methods make calls there."""

    def __init__(
        self,
        page_size: int = 16,
        num_pages: int = NUM_PAGES,
        *,
        head_dim: int = 32,
        is_shared: bool = True,
        transport: str = "auto",
        fingerprint: str = "model",
        key: str = KEY.hex(),
        device: str = "cpu",
        num_ranks: int = 1,
        num_kv_heads: int = 2,
        num_layer_groups: int = 1,
        has_digests: bool = True,
    ) -> None:
        """num_ranks: ranks other than rank 0 are processes. is_shared: rank 0's pool is in shared memory.

        num_layer_groups: `send` offers the second half of its pages in so many groups of layers.
        """
        self._num_layer_groups = num_layer_groups
        cut = layout(page_size, head_dim, num_ranks, num_kv_heads)
        agents = RankAgents(num_ranks) if num_ranks > 1 else None
        self.others = [
            RankProcess(agents.sidecar, cut, rank, num_pages) for rank in range(1, num_ranks) if agents
        ]
        self._shared = SharedPool() if is_shared and device == "cpu" else None
        zeros = partial(torch.zeros, device=device) if self._shared is None else self._shared.zeros
        self.pool = zeros(shape_of(cut, num_pages), dtype=torch.bfloat16)
        self.steps = LateSteps()
        self.ledger = PagePool(num_pages, page_size, self.steps)
        settings = EndpointSettings(
            keys=KeyRing.of(bytes.fromhex(key), Kind.WORKER),
            fingerprint=fingerprint,
            layout=cut,
            transport=transport,
            timing=Timing(lease_s=3.0, heartbeat_s=0.5),
            has_digests=has_digests,
        )
        self.endpoint = FaultyEndpoint(
            settings,
            self.pool,
            self.ledger,
            shared=self._shared,
            agents=agents,
            steps=self.steps,
        )
        self.endpoint.pin = NumberedPages(self.ledger)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended: dict[bytes, TransferEnded] = {}
        self._digests: dict[bytes, str] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._prompts: dict[bytes, tuple[list[int], list[int], int]] = {}  # pages, not offered, units
        self.granted: dict[bytes, GrantedTransfer] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def address(self) -> tuple[str, int]:
        return self.endpoint.address

    def fill(self, seed: int) -> None:
        """Fill the pool with random contents, by which its pages are told apart."""
        self._call(lambda: fill(self.pool, self.endpoint.settings.layout, 0, seed))
        for other in self.others:
            other.fill(seed)

    def abort_at(self, point: str) -> None:
        self._call(lambda: setattr(self.endpoint, "abort_at", point))

    def flip_bits(self, num_flips: int) -> None:
        self._call(lambda: setattr(self.endpoint, "num_flips", num_flips))

    def known_pages(self, num_pages: int) -> tuple[list[str], str]:
        """Return the keys of pages that others may pull, in hexadecimal digits, and their tokens' digest."""

        def know() -> tuple[list[str], str]:
            pages = self.ledger.allocate(num_pages, "prefix")
            for page in pages:
                self.ledger.mark_known(page)
            wanted = [key_of(page, self.ledger.generation(page)).hex() for page in pages]
            self.ledger.release(pages, "prefix")
            return wanted, self._digest(pages)

        known: tuple[list[str], str] = self._call(know)
        return known

    def pull(self, address: Sequence[Any], wanted: Sequence[str], num_units: int) -> str:
        """Pull pages from the host at `address`; return the outcome here. wanted: see `known_pages`."""

        def start() -> bytes:
            link = self._link((address[0], address[1]))
            keys = list(map(bytes.fromhex, wanted))
            return self.endpoint.pull(link, keys, num_units, "sequence", deadline_s=10)

        transfer = self._call(start)
        return self.outcome(transfer.hex())

    def send(
        self,
        destination: "EndpointHost | HostProcess",
        num_units: int,
        *,
        abort_at: str = "",
        delay_s: float = 0.0,
    ) -> str:
        """Send pages in two offers; return the outcome here. `sent` is the digest of their contents."""
        self.abort_at(abort_at)
        transfer = ask(self, destination, num_units, num_layer_groups=self._num_layer_groups)
        return self.send_granted(transfer, num_units, abort_at, delay_s)

    def send_granted(self, transfer: bytes, num_units: int, abort_at: str = "", delay_s: float = 0.0) -> str:
        """Send as `send` does, once the grant that was asked for has come."""
        if not self._is_granted(transfer):
            return "failed"
        self._call(lambda: self._start(transfer, num_units))
        if abort_at == "later":
            time.sleep(delay_s)
            self._call(lambda: self.endpoint.abort(transfer, "the test aborts later"))
        return self.outcome(transfer.hex())

    def begin(
        self,
        destination: "EndpointHost | HostProcess",
        num_units: int,
        num_offered: int = 0,
        *,
        deadline_s: float = 10,
    ) -> str:
        """Start a transfer and offer whole pages with so many units; return its id."""
        groups = {"num_layer_groups": self._num_layer_groups}
        transfer = ask(self, destination, num_units, deadline_s=deadline_s, **groups)
        return self.begin_granted(transfer, num_units, num_offered)

    def begin_granted(self, transfer: bytes, num_units: int, num_offered: int = 0) -> str:
        """Begin as `begin` does, once the grant that was asked for has come."""
        if not self._is_granted(transfer):
            raise TransferFailed("the destination grants nothing")

        def begin() -> None:
            units_per_page = self._units_per_page(transfer)
            pages = self.ledger.allocate(-(-num_units // units_per_page), "prompt")
            num_pages = num_offered // units_per_page
            self._prompts[transfer] = pages, pages[num_pages:], num_units
            self.endpoint.offer(transfer, pages[:num_pages], num_offered)

        self._call(begin)
        return transfer.hex()

    def is_streaming(self, transfer: str) -> bool:
        """Return True when what is offered for the transfer is pushed at once."""
        return bool(self._call(lambda: self.endpoint.is_streaming(bytes.fromhex(transfer))))

    def go_on(self, transfer: str) -> None:
        """Offer the rest of the transfer."""
        key = bytes.fromhex(transfer)
        _, rest, num_units = self._prompts[key]
        self._call(lambda: self.endpoint.offer(key, rest, num_units))

    def forget_known(self) -> None:
        """Forget all known pages, so that no peer can pull them."""

        def forget() -> None:
            while (page := self.ledger.cached.next_out()) is not None:
                self.ledger.forget(page)

        self._call(forget)

    def grant(
        self, source: Sequence[Any], transfer: str, num_units: int, deadline_s: float = 10, **options: Any
    ) -> None:
        """Grant pages to the host at `source`, as a destination; errors are those of the endpoint."""

        def grant() -> None:
            link = self._link((source[0], source[1]))
            name = bytes.fromhex(transfer)
            self.endpoint.grant(link, name, num_units, "sequence", deadline_s=deadline_s, **options)
            self.endpoint.come_to("after grant", name)

        self._call(grant)

    def _is_granted(self, transfer: bytes) -> bool:
        """Wait for the grant; return whether it has come in time."""
        with suppress(TimeoutError):
            wait_for(lambda: transfer in self.granted or transfer in self._ended, GRANT_S)
            return True
        return False

    def _start(self, transfer: bytes, num_units: int) -> None:
        endpoint, ledger = self.endpoint, self.ledger
        if transfer in self._ended:
            return
        num_groups = self._num_layer_groups
        units_per_page = self._units_per_page(transfer)
        pages = ledger.allocate(-(-num_units // units_per_page), ("prompt", transfer))
        self.sent = self._digest(pages)
        endpoint.come_to("start", transfer)
        half = len(pages) // 2
        endpoint.offer(transfer, pages[:half], half * units_per_page)
        endpoint.come_to("half", transfer)
        for group in range(num_groups):
            endpoint.offer(transfer, () if group else pages[half:], num_units, group=group)
        endpoint.come_to("all", transfer)
        ledger.release(pages, ("prompt", transfer))

    def _units_per_page(self, transfer: bytes) -> int:
        """Return how many units of a granted transfer one page here holds."""
        return self.endpoint.settings.layout.page_size // self.granted[transfer].unit_tokens

    def _link(self, address: tuple[str, int]) -> Link:
        if address not in self._links or self._links[address].is_lost:
            self._links[address] = self.endpoint.link(address)
        return self._links[address]

    def outcome(self, transfer: str) -> str:
        """Wait for the end of a transfer on this side; return its outcome."""
        key = bytes.fromhex(transfer)
        wait_for(lambda: key in self._ended, DEADLINE_S)
        return self._ended[key].outcome.value

    def ended(self) -> list[tuple[str, str, str]]:
        """Return (outcome, reason, digest of the adopted pages) of every transfer so far."""
        return [
            (end.outcome.value, end.reason, self._digests.get(end.transfer, ""))
            for end in self._call(lambda: list(self._ended.values()))
        ]

    def counts(self) -> dict[str, int]:
        """Return the numbers of pages by state, of open transfers, and of peers that were dropped."""

        def count() -> dict[str, int]:
            self.ledger.check_integrity()
            counts = {state.name: self.ledger.count(state) for state in PageState}
            return counts | {"open": self.endpoint.num_open, **self.endpoint.dropped.counts()}

        counted: dict[str, int] = self._call(count)
        return counted

    def transports(self) -> dict[str, int]:
        """Return the number of times that each transport was opened."""
        counts = self.endpoint.counts()
        return {name.removeprefix("opened_"): n for name, n in counts.items() if name.startswith("opened_")}

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self.endpoint.close()
        for other in self.others:
            other.end_input()
        for other in self.others:
            other.close()
        if self._shared is not None:
            self._shared.close()

    def _run(self) -> None:
        while not self._is_closed:
            self.endpoint.wait(0.001)
            for end in self.endpoint.poll():
                self._keep(end)
            self.granted.update((each.transfer, each) for each in self.endpoint.take_granted())
            try:
                while True:
                    self._calls.get_nowait()()
            except Empty:
                continue

    def _keep(self, end: TransferEnded) -> None:
        if end.outcome.value == "adopted":
            self._digests[end.transfer] = self._digest(end.pages)
            self.ledger.release(end.pages, "sequence")
        if end.transfer in self._prompts:
            self.ledger.release(self._prompts.pop(end.transfer)[0], "prompt")
        self._ended[end.transfer] = end

    def _digest(self, pages: Sequence[int]) -> str:
        """Return the digest of the tokens in their order and all heads, for any cut into pages and ranks."""
        heads = [self.pool[list(pages)].cpu(), *(other.pages(pages) for other in self.others)]
        chosen = torch.cat(heads, dim=3).permute(1, 2, 3, 0, 4, 5).contiguous().view(torch.uint8)
        return hashlib.blake2b(chosen.numpy().data, digest_size=16).hexdigest()

    def _call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        return future.result(DEADLINE_S)


class HostProcess(Remote):
    """A host in a process of its own."""

    def __init__(self, **settings: object) -> None:
        super().__init__(EndpointHost, **settings)


def ask(
    source: EndpointHost | HostProcess,
    destination: EndpointHost | HostProcess,
    num_units: int,
    **options: Any,
) -> bytes:
    """Have the destination grant pages to the source; return the transfer's id. options: of `grant`."""
    transfer = secrets.token_bytes(16)
    destination.grant(source.address(), transfer.hex(), num_units, **options)
    return transfer
