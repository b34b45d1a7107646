"""One part of an arriving transfer: whether its source may still write, and what became of its digests."""

from baton.kvtransfer.ledger import Owner
from baton.kvtransfer.messages import DIGEST_BYTES, Commit, Wrote


class LandingPart:
    def __init__(self, number: int, transfer: bytes) -> None:
        self.writer: Owner = ("writer", transfer, number)  # in the ledger
        self.is_stopped = True  # its writer holds no page
        self.is_committed = False
        self.digests = b""
        self.corrupt: tuple[int, ...] | None = None  # units; None: not compared yet
        self.was_corrupt = False
        self._num_announced = 0  # units that its source has said to be written: each is read to be hashed

    def may_say(self, message: Wrote | Commit, num_units: int) -> bool:
        """A part that has committed is silent, unless its units came damaged.

        Each unit is announced once, and once more if it came damaged.
        """
        if self.is_committed:
            return False
        if isinstance(message, Wrote):
            num_announced = self._num_announced + message.stop - message.first
            return message.stop <= num_units and num_announced <= num_units * (1 + self.was_corrupt)
        return len(message.digests) == num_units * DIGEST_BYTES

    def announce(self, message: Wrote) -> None:
        self._num_announced += message.stop - message.first

    def commit(self, digests: bytes) -> None:
        self.is_committed, self.digests = True, digests

    def open_again(self) -> tuple[int, ...]:
        """Its damaged units, which are to be written once more."""
        units, self.corrupt = self.corrupt or (), None
        self.is_committed, self.is_stopped, self.was_corrupt = False, False, True
        return units
