"""The sink of one request in tests."""

from collections.abc import Callable, Sequence

from baton.errors import BatonError
from baton.request import FinishReason, TokenEvent


class Answer:
    """Keeps the tokens or the error of one request, and takes nothing after its end."""

    def __init__(self, on_event: Callable[[TokenEvent], None] = lambda event: None) -> None:
        self.events: list[TokenEvent] = []
        self.error: BatonError | None = None
        self.on_event = on_event  # called after each event

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or self.finish is not None

    @property
    def token_ids(self) -> list[int | None]:
        """The tokens so far. Raises the error of the request."""
        if self.error is not None:
            raise self.error
        return [event.token_id for event in self.events]

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            assert not self.has_ended
            self.events.append(event)
            self.on_event(event)

    def failed(self, error: BatonError) -> None:
        assert not self.has_ended
        self.error = error
