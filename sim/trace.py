"""The trace of a simulation: one line for each message, fault and death."""

from collections.abc import Callable
from typing import Final

from baton.errors import WireError
from baton.messages import control, operations
from baton.messages.codec import AnyMessage
from baton.request import TokenEvent
from baton.sim.process import Events

SHOWN: Final = 8  # characters of an id
HIDDEN: Final = (control.Alive, control.Heartbeat, operations.Status, operations.StatusQuery)


class Recorder:
    """Writes the trace, and keeps the dropped peers."""

    def __init__(self, events: Events, write: Callable[[str], None] | None = None) -> None:
        """write: takes the lines; None: only drops are kept."""
        self.names: dict[str, str] = {}  # id of a process -> its name
        self.drops: list[tuple[str, WireError]] = []  # name of the dropping process, reason
        self._events = events
        self._write = write

    def say(self, text: str) -> None:
        """Write one line, with the time."""
        if self._write is not None:
            self._write(f"{self._events.now_s:8.4f}  {text}")

    def message(self, sender: str, receiver: str, message: AnyMessage) -> None:
        """Record a message that is heard. sender: the id of a process; receiver: the name of one."""
        if self._write is not None and not isinstance(message, HIDDEN):
            kind = type(message).__name__
            self.say(f"{self._name(sender):>10} -> {receiver:<10} {kind:<13} {self._text(message)}")

    def dropped(self, host: str, error: WireError) -> None:
        """Record a dropped peer: honest processes drop each other rarely."""
        self.drops.append((host, error))
        self.say(f"{host} drops a peer, {error.reason}: {error}")

    def _name(self, id_: str) -> str:
        return self.names.get(id_, id_[:SHOWN])

    def _text(self, message: AnyMessage) -> str:
        match message:
            case control.Members(workers=workers, is_complete=is_complete):
                names = " ".join(worker.name for worker in workers)
                return names if is_complete else f"{names} and perhaps others"
            case control.Reachable(workers=workers):
                return " ".join(map(self._name, workers))
            case control.Submit(request=request, sticky_worker=sticky_worker, avoid=avoid):
                wishes = [f"beside {self._name(sticky_worker)}"] * bool(sticky_worker)
                wishes += [f"not {self._name(worker)}" for worker in avoid]
                key = _key(request.request_id, request.attempt)
                return f"{key} {len(request.token_ids)}+{len(request.generated_token_ids)} {' '.join(wishes)}"
            case control.Routed(decode=decode, prefill=prefill, reason=reason):
                where = f"{self._name(prefill) or '-'} {self._name(decode)}"
                return f"{_key(message.request_id, message.attempt)} {where}: {reason}"
            case control.Dispatch(request=request) | control.Prefill(request=request):
                return _key(request.request_id, request.attempt)
            case control.Tokens(events=events):
                return ", ".join(map(_token, events))
            case control.Prefilled(event=event):
                return _token(event)
            case control.Started(attempts=attempts) | control.Ended(attempts=attempts):
                return " ".join(_key(*attempt) for attempt in attempts)
            case control.Rejected() | control.PrefillFailed() | control.AttemptFailed():
                return f"{_key(message.request_id, message.attempt)} {message.reason}"
        request_id = getattr(message, "request_id", "")
        return _key(request_id, getattr(message, "attempt", 0)) if request_id else ""


def _key(request_id: str, attempt: int) -> str:
    return f"{request_id[:SHOWN]}.{attempt}"


def _token(event: TokenEvent) -> str:
    end = f" {event.finish_reason}" if event.finish_reason else ""
    return f"{_key(event.request_id, event.attempt)}[{event.index}]={event.token_id}{end}"
