"""An endpoint to which things happen at the moment that a test has chosen."""

from typing import Any

from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.messages import AnyMessage, Commit, Wrote
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.kvtransfer.ranks.messages import ShardEvent, ShardReached
from baton.kvtransfer.transports.pages import PageMemory
from baton.pages import PageLayout
from tests.layouts import a_layout


def layout(page_size: int = 16, head_dim: int = 32, num_ranks: int = 1, num_kv_heads: int = 2) -> PageLayout:
    return a_layout(
        tp_size=num_ranks, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16"
    )


class FaultyEndpoint(KvEndpoint):
    """Aborts a transfer when it comes to a point: "before Commit", "after Grant" and the like.

    One bit of each of the next `num_flips` pieces of shard 0 is flipped when the piece arrives.
    """

    abort_at = ""
    num_flips = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.transport_of: dict[int, str] = {}  # shard -> by which it left last
        super().__init__(*arguments, **options)

    def _received(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Wrote | Commit) and message.shard == 0 and self.num_flips:
            self._flip(message)
        transfer = getattr(message, "transfer", b"")
        self.come_to(f"before {type(message).__name__}", transfer)
        super()._received(link, message)
        self.come_to(f"after {type(message).__name__}", transfer)

    def _flip(self, wrote: Wrote | Commit) -> None:
        self.num_flips -= 1
        handoff, memory = self._transfers[wrote.transfer].handoff, PageMemory.of(self._here.rank.pool)
        page = handoff.pages[(wrote.stop - 1) // handoff._context.plan.destination.units_per_page]
        memory.view()[page * memory.page_bytes + 5] ^= 0x10

    def _on_shard_event(self, event: ShardEvent) -> None:
        if isinstance(event, ShardReached):
            self.transport_of[event.shard] = event.transport
        super()._on_shard_event(event)

    def is_streaming(self, transfer: bytes) -> bool:
        """Return True when every rank of this source has opened its transport, so that offers are pushed."""
        handoff = self._transfers[transfer].handoff
        return isinstance(handoff, SourceHandoff) and handoff.state is SourceState.STREAMING

    def link_of(self, transfer: bytes) -> Link:
        """Return the link that carries the messages of a transfer."""
        return self._transfers[transfer].link

    def come_to(self, point: str, transfer: bytes) -> None:
        if point == self.abort_at:
            self.abort(transfer, f"the test aborts {point}")
