"""Fixtures and requests of both workers' tests; every pair must free all pages in the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from baton.engine.engine import Engine
from baton.kvtransfer.protocol.messages import Commit, Grant
from baton.messages.codec import AnyMessage
from baton.messages.control import Measured, Prefill, Prefilled, PullSource
from baton.messages.workers import PrefillTimes
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenEvent, TokenIds
from tests.tiny_models import VOCAB_SIZE, run_to_end, tiny_engine
from tests.worker_pair import ROUTER, WorkerHost, WorkerPair

MakePair: TypeAlias = Callable[..., WorkerPair]
PROMPT: Final = tuple((7 * i + i * i) % VOCAB_SIZE for i in range(41))
LONG_PROMPT: Final = tuple((3 * i + i * i) % VOCAB_SIZE for i in range(70))
SMALL_STEPS: Final[dict[str, Any]] = {"scheduler": {"max_num_batched_tokens": 8}}


@pytest.fixture(scope="session")
def alone(tiny_model: Path) -> Engine:
    """The engine that every pair must equal."""
    return tiny_engine(tiny_model, cache={"enable_prefix_caching": False})


@pytest.fixture
def make_pair(tiny_model: Path) -> Iterator[MakePair]:
    """Pairs of workers. Those that live in the end must hold nothing any more."""
    made: list[WorkerPair] = []

    def make(**settings: Any) -> WorkerPair:
        made.append(WorkerPair(tiny_model, **settings))
        return made[-1]

    yield make
    try:
        for pair in made:
            pair.hold()
            pair.release()
            pair.quiet_down()
    finally:
        for pair in made:
            pair.close()


def a_request(number: int = 0, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Request:
    """Seeded, eight tokens, unless said otherwise; what is no field of a request is one of its sampling."""
    of_request = {name: fields.pop(name) for name in list(fields) if name in Request.__struct_fields__}
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": number + 1, "ignore_eos": True, **fields}
    name = f"{number + 10:032x}"
    return Request(
        request_id=name, token_ids=TokenIds.of(prompt), sampling=SamplingParams(**sampling), **of_request
    )


class Said(NamedTuple):
    position: int
    token_id: int | None
    finish_reason: FinishReason | None
    logprobs: object
    prompt_logprobs: object

    @classmethod
    def of(cls, token: TokenEvent | StepOutput) -> "Said":
        return cls(token.index, token.token_id, token.finish_reason, token.logprobs, token.prompt_logprobs)


def said(tokens: list[TokenEvent]) -> list[Said]:
    return [Said.of(token) for token in tokens]


def answer_alone(engine: Engine, request: Request) -> list[Said]:
    engine.add(request)
    return [Said.of(output) for output in run_to_end(engine)]


def answer_of(pair: WorkerPair, request: Request) -> list[Said]:
    """Make turns until the dispatched request is answered; return its answer."""
    pair.turns_until(lambda: pair.is_answered(request))
    return said(pair.heard(request))


def answer_after_ticks(pair: WorkerPair, request: Request) -> list[Said]:
    """Return the answer as `answer_of` does; the prefill worker ticks before each turn."""
    pair.turns_until(lambda: pair.is_answered(request), ticks=pair.prefill)
    return said(pair.heard(request))


def prefills(pair: WorkerPair) -> list[PrefillTimes]:
    """Times of prompts that the router has been told."""
    told = [each for each in pair.said[ROUTER.id] if isinstance(each, Measured)]
    return [times for each in told for times in each.prefills]


def warm(pair: WorkerPair, holder: WorkerHost) -> PullSource:
    """Have one worker alone know LONG_PROMPT; return the source that the router would have learned."""
    is_local = holder is pair.decode
    pair.dispatch(a_request(90, LONG_PROMPT), is_local=is_local)
    pair.turns_until(lambda: pair.is_answered(a_request(90, LONG_PROMPT)))
    pair.quiet_down()
    if not is_local:
        pair.decode.engine.scheduler.cache.make_room(pair.decode.engine.pages.num_pages, keep=False)
    return known_at(holder, LONG_PROMPT)


def known_at(host: WorkerHost, prompt: tuple[int, ...]) -> PullSource:
    """The source that the router would have learned of this worker's pages."""
    claim = host.engine.claim_prefix(prompt, b"", "the router")
    host.engine.release(claim)
    return PullSource(host.id, claim.num_tokens)


def has_pulled(host: WorkerHost, **number: int) -> bool:
    """Return whether the worker has counted these pulls and no others."""
    counters = host.node.load().counters
    names = ("pulls", "pulls_failed", "pulls_not_begun")
    return {name: counters.get(name, 0) for name in names} == dict.fromkeys(names, 0) | number


def begun(answer: list[Said], num_tokens: int) -> tuple[int, ...]:
    """Its first tokens, as a later attempt names them."""
    return tuple(token.token_id for token in answer[:num_tokens] if token.token_id is not None)


# The stages of an attempt whose prompt is computed by the prefill worker, in order.
STAGES: Final = ("ordered", "computing", "ungranted", "computed", "pages-only", "token-only", "running")


def bring_to(pair: WorkerPair, request: Request, stage: str) -> None:
    """Dispatch it and stop the world where it is at that stage. The pair's steps must have few tokens."""
    held: dict[str, tuple[type[AnyMessage], ...]] = {
        "ordered": (Prefill,),
        "computed": (Prefilled,),
        "pages-only": (Prefilled,),
    }
    pair.hold(*held.get(stage, ()))
    if stage in ("computed", "token-only"):
        pair.decode.endpoint.holds = Commit
    if stage == "ungranted":  # the first token is there, and the grant has not arrived
        pair.prefill.endpoint.holds = Grant
    pair.dispatch(request)
    there: dict[str, Callable[[], bool]] = {
        "ordered": lambda: pair.holds(Prefill) and bool(pair.decode.endpoint.num_open),
        "computing": pair.prefill.engine.has_work,
        "ungranted": lambda: bool(pair.heard(request)) and pair.prefill.endpoint.is_holding,
        "computed": lambda: pair.holds(Prefilled) and pair.decode.endpoint.is_holding,
        "pages-only": lambda: pair.holds(Prefilled) and not pair.prefill.node.attempts,
        "token-only": lambda: bool(pair.heard(request)) and pair.decode.endpoint.is_holding,
        "running": lambda: len(pair.heard(request)) >= 3,
    }
    pair.turns_until(there[stage])
