"""What the loops of workers ask of an endpoint; `KvEndpoint` documents it, the simulator has its own."""

from collections.abc import Sequence
from typing import Protocol

from baton.kvtransfer.ended import Ended
from baton.kvtransfer.ledger import Owner
from baton.kvtransfer.link import Link


class PageEndpoint(Protocol):
    @property
    def num_open(self) -> int: ...

    def counts(self) -> dict[str, int]:
        """What went wrong or well since the start, by name."""

    def start(
        self,
        link: Link,
        num_units: int,
        *,
        deadline_s: float,
        transfer: bytes | None = None,
        num_layer_groups: int = 1,
    ) -> bytes: ...

    def offer(
        self, transfer: bytes, pages: Sequence[int], num_units: int, *, group: int | None = None
    ) -> None: ...

    def pull(
        self,
        link: Link,
        wanted: Sequence[tuple[int, int]],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes: ...

    def abort(self, transfer: bytes, reason: str) -> None: ...

    def take_granted(self) -> list[bytes]:
        """Transfers that have been granted pages since the last call."""

    def poll(self) -> list[Ended]: ...
