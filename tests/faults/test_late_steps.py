"""Steps that write their pages late: after the page was offered, or after it was let go and granted again."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from tests.endpoint_host import NUM_PAGES, EndpointHost, ask
from tests.rank_process import fill
from tests.waiting import wait_for

NUM_UNITS = 8
MARKS = itertools.count(1)
LONG_S = 0.3  # a transfer takes some milliseconds


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def source(request: pytest.FixtureRequest) -> Iterator[EndpointHost]:
    host = EndpointHost(num_ranks=request.param)
    host.fill(1)
    yield host
    host.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def destination(request: pytest.FixtureRequest) -> Iterator[EndpointHost]:
    host = EndpointHost(num_ranks=request.param)
    host.fill(3)
    yield host
    host.close()


def launch(host: EndpointHost) -> int:
    """Launch a step that writes all pages; its mark."""
    mark = next(MARKS)
    host._call(lambda: setattr(host.steps, "launched", mark))
    return mark


def compute_late(host: EndpointHost, rank: int, mark: int, seed: int) -> None:
    """The rank's device comes to the end of the step."""
    if rank:
        host.others[rank - 1].fill(seed)
        host.others[rank - 1].pass_mark(mark)
    else:
        host._call(lambda: fill(host.pool, host.endpoint.settings.layout, 0, seed))
        host.steps.passed = mark


@pytest.mark.parametrize("latest", [0, -1], ids=["rank-0-last", "rank-0-first"])
def test_no_page_leaves_before_every_rank_has_written_it(
    source: EndpointHost, destination: EndpointHost, latest: int
) -> None:
    mark = launch(source)
    ranks = range(1 + len(source.others))
    late = ranks[latest]
    for rank in ranks:
        if rank != late:
            compute_late(source, rank, mark, seed=2)
    num_ended = len(destination.ended())
    transfer = source.begin(destination, NUM_UNITS, NUM_UNITS)
    pages = source._prompts[bytes.fromhex(transfer)][0]
    time.sleep(LONG_S)
    assert len(destination.ended()) == num_ended
    compute_late(source, late, mark, seed=2)
    assert source.outcome(transfer) == "handed_over"
    written = source._call(lambda: source._digest(pages))
    wait_for(lambda: len(destination.ended()) == num_ended + 1)
    assert destination.ended()[-1] == ("adopted", "", written)


@pytest.mark.parametrize("latest", [0, -1], ids=["rank-0-last", "rank-0-first"])
def test_no_page_is_granted_while_a_step_may_still_write_it(
    source: EndpointHost, destination: EndpointHost, latest: int
) -> None:
    pages = destination._call(lambda: destination.ledger.allocate(NUM_PAGES, "a sequence"))
    mark = launch(destination)
    destination._call(lambda: destination.ledger.release(pages, "a sequence"))
    ranks = range(1 + len(destination.others))
    late = ranks[latest]
    for rank in ranks:
        if rank != late:
            compute_late(destination, rank, mark, seed=4)
    num_ended = len(destination.ended())
    asked = ask(source, destination, NUM_UNITS)
    wait_for(lambda: destination.counts()["LEASED"] > 0)
    time.sleep(LONG_S)
    assert asked not in source.granted
    compute_late(destination, late, mark, seed=4)
    transfer = source.begin_granted(asked, NUM_UNITS, NUM_UNITS // 2)
    pages = source._prompts[asked][0]
    source.go_on(transfer)
    assert source.outcome(transfer) == "handed_over"
    sent = source._call(lambda: source._digest(pages))
    wait_for(lambda: len(destination.ended()) == num_ended + 1)
    assert destination.ended()[-1] == ("adopted", "", sent)


def test_pages_that_no_step_has_touched_are_granted_under_a_running_step(
    make_host: Callable[..., EndpointHost],
) -> None:
    source, destination = make_host(), make_host()
    launch(destination)
    assert source.send(destination, NUM_UNITS) == "handed_over"


def test_an_abort_ends_a_transfer_that_waits_for_a_step_once_the_step_has_passed(
    source: EndpointHost, destination: EndpointHost
) -> None:
    mark = launch(source)
    transfer = source.begin(destination, NUM_UNITS, NUM_UNITS)
    source._call(lambda: source.endpoint.abort(bytes.fromhex(transfer), "the test aborts"))
    for rank in range(1 + len(source.others)):
        compute_late(source, rank, mark, seed=2)
    assert source.outcome(transfer) == "cancelled"
    wait_for(lambda: source.counts()["FREE"] == NUM_PAGES and not source.counts()["open"])
    wait_for(lambda: destination.counts()["FREE"] == NUM_PAGES and not destination.counts()["open"])
