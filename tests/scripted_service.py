"""A Service that follows the script of a test and computes nothing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.errors import BatonError
from baton.gateway.streams.request_stream import RequestMarks, Sink
from baton.messages.operations import Decisions, Explain, FindRequests, FoundRequests, Status
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Worker
from baton.request import FinishReason, Request, TokenEvent
from tests.node_peers import a_worker

WORKER_ID = "d" * 32


def worker(*, max_model_len: int = 4096, page_size: int = 16) -> Worker:
    return a_worker(
        "decode-0",
        id=WORKER_ID,
        fingerprint="",
        page_size=page_size,
        max_num_seqs=32,
        max_model_len=max_model_len,
    )


class ScriptedService:
    """`play` is called with each opened request, and may call `service.sinks` then or later."""

    def __init__(self, play: Callable[["ScriptedService", Request], None] | None = None) -> None:
        self.play = play
        self.counters: Counter[str] = Counter()
        self.worker_us: Counter[str] = Counter()
        self.status: Status | None = None
        self.why_not_ready = ""
        self.has_room = True  # a worker takes what is opened
        self.workers: Sequence[Worker] = (worker(),)
        self.draining: Collection[str] = ()
        self.requests: list[Request] = []
        self.besides: list[str] = []
        self.sinks: dict[str, Sink] = {}  # of the requests that run
        self.cancelled: list[str] = []
        self.orders: list[Sleep | Wake] = []
        self.refusal: BatonError | None = None  # of the next request

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> RequestMarks:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.besides.append(sticky_worker)
        self.sinks[request.request_id] = sink
        if self.play is not None:
            self.play(self, request)
        return RequestMarks(request.arrival_s)

    def cancel(self, request_id: str) -> None:
        if self.sinks.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def decode_worker(self, request_id: str) -> str:
        return WORKER_ID if self.has_room and request_id in self.sinks else ""

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        return []

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        return []

    def send_order(self, order: Sleep | Wake) -> None:
        self.orders.append(order)

    def emit(self, request_id: str, events: Sequence[TokenEvent]) -> None:
        """Send events as a worker does; events of a cancelled request are dropped."""
        sink = self.sinks.get(request_id)
        if events[-1].finish_reason is not None:
            self.sinks.pop(request_id, None)
        if sink is not None:
            sink.tokens(events)

    def fail(self, request_id: str, error: BatonError) -> None:
        sink = self.sinks.pop(request_id, None)
        if sink is not None:
            sink.failed(error)


def events(
    request: Request,
    token_ids: Iterable[int],
    *,
    start: int = 0,
    end: FinishReason | None = FinishReason.LENGTH,
    num_cached_tokens: int = 0,
) -> list[TokenEvent]:
    """One for each token, the last with `end`."""
    listed = list(token_ids)
    return [
        TokenEvent(
            request.request_id,
            0,
            start + offset,
            token_id,
            end if offset == len(listed) - 1 else None,
            num_cached_tokens,
        )
        for offset, token_id in enumerate(listed)
    ]


def answer_at_once(token_ids: Sequence[int]) -> Callable[[ScriptedService, Request], None]:
    """Return a script that answers every request with these tokens while it is opened."""
    return lambda service, request: service.emit(request.request_id, events(request, token_ids))
