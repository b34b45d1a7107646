"""Pages of prompts whose last chunk is being computed leave while it is: one group of layers after the other.

So what is still to be sent when the first token is there is about one group's share of the last chunk. All
earlier chunks leave whole, while the next is computed.
"""

from collections.abc import Callable, Sequence
from typing import Final

from baton.engine.plan import ScheduledChunk
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.layout import PageLayout
from baton.prefill_worker.departure import Departure, Offer

MAX_GROUPS: Final = 4
MIN_RUN_BYTES: Final = 256 << 10  # of a page's share of one group: shorter runs cost more than they hide


def num_layer_groups(layout: PageLayout) -> int:
    """In how many groups pages of this layout should leave."""
    return max(1, min(MAX_GROUPS, layout.num_layers, layout.page_bytes // MIN_RUN_BYTES))


class LastChunks:
    """A LayerWatch of the engine's steps."""

    def __init__(
        self, endpoint: PageEndpoint, num_groups: int, departure_of: Callable[[str], Departure | None]
    ) -> None:
        """departure_of: by its name in the engine; None for what is none."""
        self._endpoint = endpoint
        self._num_groups = num_groups
        self._departure_of = departure_of
        self._offers: list[tuple[Departure, Offer]] = []
        self._group = 0  # the next to be told of

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        self._offers.clear()
        self._group = 0
        for chunk in chunks:
            departure = self._departure_of(chunk.sequence.request_id) if chunk.samples else None
            offer = departure.take_offer(is_last=True) if departure is not None else None
            if departure is not None and offer is not None:
                self._offers.append((departure, offer))
        return self._num_groups if self._offers else 0

    def layers_written(self, first: int, stop: int) -> None:
        for departure, offer in self._offers:
            pages = () if self._group else offer.pages
            self._endpoint.offer(departure.transfer, pages, offer.num_units, group=self._group)
        self._group += 1
