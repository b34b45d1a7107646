"""Pages whose keys are their numbers and generations, for transfers that no engine is behind."""

from collections.abc import Sequence
from typing import Final

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.protocol.handoff import HandoffContext, Owner, Timing
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.messages import Route
from baton.messages.bounds import KEY_BYTES
from tests.layouts import a_layout

TIMING: Final = Timing(lease_s=30.0, heartbeat_s=5.0)
# The peer of transfers whose bytes no transport moves.
PEER_RANK: Final = PeerRank(
    host="127.0.0.1",
    layout=a_layout(page_size=1, num_layers=1, num_kv_heads=1, head_dim=1),
    rank=0,
    listeners=RankListenerAddresses(incarnation=bytes(16), host="h", device="cpu"),
)


def handoff_context(
    ledger: PagePool, clock: ManualClock, ranks: Sequence[int] = (0,), num_layer_groups: int = 1
) -> HandoffContext:
    """ranks: of ours that carry out the shards, whose groups of layers follow one another."""
    layout = PEER_RANK.layout
    routes = [Route(rank, PEER_RANK, (0, 1), shard % num_layer_groups) for shard, rank in enumerate(ranks)]
    return HandoffContext(ledger, clock, TIMING, plan_transfer(layout, layout, 0, 0), routes, 1, bytes(32))


def key_of(page: int, generation: int = 1) -> bytes:
    """Return the key of a page that was allocated so often; its later contents have other keys."""
    return generation.to_bytes(KEY_BYTES // 2, "big") + page.to_bytes(KEY_BYTES // 2, "big")


class NumberedPages:
    """A `Pin` that finds a ledger's known pages by the keys of `key_of`."""

    def __init__(self, ledger: PagePool) -> None:
        self._ledger = ledger

    def __call__(self, keys: Sequence[bytes], borrower: Owner) -> Sequence[int] | None:
        pages = [int.from_bytes(key[KEY_BYTES // 2 :], "big") for key in keys]
        is_here = all(map(self._has, pages, keys))
        if not is_here or len(set(pages)) != len(pages):
            return None
        self._ledger.share(pages, borrower)
        return pages

    def _has(self, page: int, key: bytes) -> bool:
        ledger = self._ledger
        is_known = page < ledger.num_pages and ledger.is_known(page)
        return is_known and key == key_of(page, ledger.generation(page))
