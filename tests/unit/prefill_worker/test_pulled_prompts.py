"""Prefixes that are fetched from another worker: the tokens are the same with them and without.

The decode worker is the holder here: to pages it is one worker like another.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from baton.engine.cache.disk_tier import DiskStore
from baton.engine.engine import Engine
from baton.kvtransfer.protocol.messages import Commit, PullRequest
from baton.kvtransfer.protocol.source import pin_nothing
from baton.messages.control import Members, PullSource
from baton.messages.workers import WorkerRole
from tests.tiny_models import generate, tiny_engine
from tests.worker_pair import DECODE, ROUTER, WorkerHost, WorkerPair
from tests.worker_pair_cases import (
    LONG_PROMPT,
    MakePair,
    a_request,
    answer_alone,
    answer_of,
    has_pulled,
    said,
    warm,
)

PAGE_SIZES: Final = [(4, 4), (16, 4), (4, 16)]


@pytest.mark.parametrize("page_sizes", PAGE_SIZES)
@pytest.mark.parametrize("num_more", [1, 9])
def test_pulled_prefix_is_not_computed_and_changes_no_token(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int], num_more: int
) -> None:
    pair = make_pair(page_sizes=page_sizes)
    source = warm(pair, pair.decode)
    request = a_request(1, LONG_PROMPT + tuple(range(num_more)), logprobs=2)
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: pair.is_answered(request))
    events = pair.heard(request)
    assert said(events) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls=1) and events[0].num_cached_tokens == source.num_tokens >= 64


def test_only_missing_pages_are_pulled(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    pair.answer(a_request(2, LONG_PROMPT[:41]))  # both know forty tokens now
    pair.decode.endpoint.holds = PullRequest
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: pair.decode.endpoint.is_holding)
    ((_, pull),) = pair.decode.endpoint._held
    assert isinstance(pull, PullRequest) and pull.num_units == (68 - 40) // 4
    pair.decode.endpoint.release()
    assert answer_of(pair, request) == answer_alone(alone, request)


def _reuse_all(pair: WorkerPair, source: PullSource) -> PullSource:
    """Its pages are taken by another prompt, and the router has not heard of it."""
    pair.decode.engine.scheduler.cache.make_room(96, keep=False)
    pair.dispatch(a_request(91, LONG_PROMPT[::-1]), is_local=True)
    pair.turns_until(lambda: pair.is_answered(a_request(91, LONG_PROMPT[::-1])))
    return source


def _unlink(pair: WorkerPair, source: PullSource) -> PullSource:
    return PullSource("9" * 32, source.num_tokens)


def _move(pair: WorkerPair, source: PullSource) -> PullSource:
    """Its pages are computed again, to other pages, and the router has not heard of it."""
    pair.decode.engine.scheduler.cache.make_room(96, keep=False)
    pair.dispatch(a_request(91, (7, 8, 9)), is_local=True)
    pair.dispatch(a_request(92, LONG_PROMPT), is_local=True)
    pair.turns_until(lambda: pair.is_answered(a_request(92, LONG_PROMPT)))
    return source


def _lengthen(pair: WorkerPair, source: PullSource) -> PullSource:
    """It names more tokens than the prompt has."""
    return PullSource(DECODE, 10_000)


def _cut(pair: WorkerPair, source: PullSource) -> PullSource:
    """It names less than a page."""
    return PullSource(DECODE, 3)


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (_reuse_all, {"pulls_failed": 1}),
        (_move, {"pulls": 1}),
        (_unlink, {"pulls_not_begun": 1}),
        (_lengthen, {"pulls": 1}),
        (_cut, {"pulls_not_begun": 1}),
    ],
)
def test_a_hint_that_is_wrong_costs_nothing_but_time(
    make_pair: MakePair,
    alone: Engine,
    spoil: Callable[[WorkerPair, PullSource], PullSource],
    number: dict[str, int],
) -> None:
    pair = make_pair()
    source = spoil(pair, warm(pair, pair.decode))
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, **number)


def on_host(pair: WorkerPair, source: PullSource) -> PullSource:
    """Other prompts push some of its pages to the host."""
    for number in (91, 92):
        other = a_request(number, LONG_PROMPT[number - 90 :] + LONG_PROMPT[: number - 90])
        pair.dispatch(other, is_local=True)
        pair.turns_until(lambda other=other: pair.is_answered(other))  # type: ignore[misc]
    pair.quiet_down()
    cache = pair.decode.engine.scheduler.cache
    places = [cache.page_of(key) for key in pair.decode.engine.page_keys(LONG_PROMPT, b"", 4)]
    assert None in places and any(page is not None for page in places)
    return source


def test_pages_that_the_holder_keeps_on_its_host_are_pulled_too(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair(num_pages=(96, 54), num_host_pages=96)
    source = on_host(pair, warm(pair, pair.decode))
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: pair.is_answered(request))
    events = pair.heard(request)
    assert said(events) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls=1) and events[0].num_cached_tokens == 68


@pytest.fixture
def disk(tiny_model: Path, tmp_path: Path) -> Path:
    """The directory in which an engine has left the pages of the prompt."""
    cache = {"host_cache_memory_bytes": 96 * 2048, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**22}
    engine = tiny_engine(tiny_model, cache=cache)
    generate(engine, list(LONG_PROMPT))
    engine.close()
    return tmp_path


ON_DISK: Final = PullSource(DECODE, 68)


def test_pages_that_the_holder_has_on_disk_alone_are_pulled_too(
    make_pair: MakePair, alone: Engine, disk: Path
) -> None:
    pair = make_pair(num_host_pages=96, decode_disk=disk)
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=ON_DISK)
    pair.turns_until(lambda: pair.is_answered(request))
    events = pair.heard(request)
    assert said(events) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls=1) and events[0].num_cached_tokens == 68


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_pull_does_not_wait_for_a_disk_that_hangs(
    make_pair: MakePair, alone: Engine, disk: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    goes_on, read = threading.Event(), DiskStore.read

    def hang(store: DiskStore, pages: Any) -> Iterator[tuple[bytes, bool]]:
        goes_on.wait(60)
        yield from read(store, pages)

    monkeypatch.setattr(DiskStore, "read", hang)
    monkeypatch.setattr("baton.kvtransfer.protocol.source.MAX_FETCH_S", 60.0 if is_cancelled else 0.05)
    pair = make_pair(num_host_pages=96, decode_disk=disk)
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=ON_DISK)
    pair.turns_until(lambda: bool(pair.decode.endpoint.num_open))
    if is_cancelled:
        pair.cancel(request)
        pair.quiet_down()
        assert not pair.heard(request)
    else:
        assert answer_of(pair, request) == answer_alone(alone, request)
        assert has_pulled(pair.prefill, pulls_failed=1)
    goes_on.set()


def test_a_holder_that_cannot_bring_them_from_its_host_says_so(
    make_pair: MakePair, alone: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    pair.decode.endpoint.pin = pin_nothing
    request = a_request(1, LONG_PROMPT)
    caplog.set_level("INFO")
    pair.dispatch(request, source=source)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls_failed=1) and "no room to copy it from the host" in caplog.text


def test_without_room_for_the_pages_all_is_computed(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair(num_pages=(26, 96))
    source = warm(pair, pair.decode)
    ledger = pair.prefill.engine.pages
    taken = ledger.reserve(12, "somebody")
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: has_pulled(pair.prefill, pulls_not_begun=1))
    ledger.release(taken, "somebody")
    assert answer_of(pair, request) == answer_alone(alone, request)


def test_prompt_logprobs_need_all_of_the_prompt(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    request = a_request(1, LONG_PROMPT, prompt_logprobs=1)
    pair.dispatch(request, source=source)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls_not_begun=1)


@pytest.mark.parametrize("holds", [PullRequest, None])
def test_a_cancel_in_the_middle_gives_all_back(make_pair: MakePair, holds: type[PullRequest] | None) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    if holds is not None:
        pair.decode.endpoint.holds = holds
    else:
        pair.prefill.endpoint.holds = Commit
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: pair.decode.endpoint.is_holding or pair.prefill.endpoint.is_holding)
    pair.cancel(request)
    pair.decode.endpoint.release()
    pair.prefill.endpoint.release()
    pair.quiet_down()
    assert not pair.heard(request)


def test_a_cancel_when_the_pages_have_just_come_gives_them_back(make_pair: MakePair) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    ledger = pair.prefill.engine.pages
    owners: list[int] = []
    while not owners:  # until they are adopted, which the worker has not polled
        pair.turn()
        pair.prefill.endpoint.wait(0.001)
        owners = [page for page in range(96) if ledger.owners(page)]
    pair.cancel(request)
    pair.quiet_down()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_holder_that_dies_is_not_waited_for(
    make_pair: MakePair, alone: Engine, tiny_model: Path, transport: str
) -> None:
    pair = make_pair(transport=transport)
    holder = WorkerHost(WorkerRole.PREFILL, tiny_model, transport, {"cache": {"page_size": 4}})
    worker = msgspec.structs.replace(holder.worker, id="5" * 32, name="prefill-1")
    members = Members(workers=(pair.prefill.worker, pair.decode.worker, worker))
    pair.tell(pair.prefill, ROUTER, members)
    holder.endpoint.holds = PullRequest
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=PullSource(worker.id, 68))

    def is_asked() -> bool:
        holder.endpoint.poll()
        return holder.endpoint.is_holding

    pair.turns_until(is_asked)
    holder.close()
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls_failed=1)


def test_a_pull_that_takes_too_long_is_given_up(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    pair.decode.endpoint.holds = PullRequest
    request = a_request(1, LONG_PROMPT)
    pair.dispatch(request, source=source)
    assert answer_of(pair, request) == answer_alone(alone, request)
    assert has_pulled(pair.prefill, pulls_failed=1)


def test_a_holder_that_is_not_listed_is_not_asked(make_pair: MakePair) -> None:
    pair = make_pair()
    source = warm(pair, pair.decode)
    pair.decode.endpoint.holds = PullRequest
    request = a_request(1, LONG_PROMPT)
    pair.tell(pair.prefill, ROUTER, Members(workers=(pair.prefill.worker,)))
    pair.dispatch(request, source=source)
    pair.turns_until(lambda: pair.is_answered(request))
    assert not pair.decode.endpoint.is_holding
