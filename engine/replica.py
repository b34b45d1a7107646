"""What the loops of workers ask of an engine; `Engine` documents it, and the simulator has one of its own."""

from collections.abc import Sequence as Ordered
from typing import Protocol

from baton.engine.layer_watch import LayerWatch
from baton.engine.leases import Owner
from baton.engine.page_events import PageChanges
from baton.engine.pages import PagePool
from baton.engine.sequence import FilledPages, Progress
from baton.engine.stats import EngineStats, StepFigures
from baton.request import Request, StepOutput


class Replica(Protocol):
    @property
    def pages(self) -> PagePool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_available_pages(self) -> int: ...

    def check(self, request: Request) -> None: ...

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[Progress, ...]: ...

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]: ...

    def has_work(self) -> bool: ...

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]: ...

    def claim_prefix(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages: ...

    def release(self, filled: FilledPages) -> None: ...

    def release_kept(self, request_id: str, choice: int = 0) -> None: ...

    def make_room(self, num_pages: int) -> bool: ...

    def take_page_changes(self, *, is_afresh: bool = False) -> PageChanges: ...

    def stats(self) -> EngineStats: ...

    def last_step(self) -> StepFigures | None: ...
