"""What an endpoint tells its owner of a transfer that has ended."""

from typing import NamedTuple

from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.timeline import TransferTimes


class Ended(NamedTuple):
    """The one end of a transfer on this side."""

    transfer: bytes
    outcome: Outcome
    reason: str
    pages: tuple[int, ...]  # ADOPTED: the adopter's own from now on
    times: TransferTimes | None  # at the source
