"""Which way to take the pages of a running sequence: drop and recompute, or swap to host memory."""

from typing import NamedTuple

from baton.engine.plan import PreemptMode


class PreemptionRates(NamedTuple):
    """Measured on this machine by whoever runs the model."""

    recompute_s_per_token: float  # prefill time of one token
    swap_s_per_page: float  # one page, one way


def cheaper_mode(num_computed_tokens: int, num_pages: int, rates: PreemptionRates | None) -> PreemptMode:
    """The mode that costs fewer seconds until the sequence is back; recompute while nothing is measured.

    A swapped page crosses twice. Recompute needs no host memory and wins ties.
    """
    if rates is None:
        return PreemptMode.RECOMPUTE
    recompute_s = num_computed_tokens * rates.recompute_s_per_token
    swap_s = 2 * num_pages * rates.swap_s_per_page
    return PreemptMode.SWAP if swap_s < recompute_s else PreemptMode.RECOMPUTE
