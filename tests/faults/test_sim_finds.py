"""Each test breaks a rule of the production code, and a seed of the simulator must show it."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.decode_worker.attempt import DecodeAdmission
from baton.engine.scheduler.page_holds import ExternalPageHolds
from baton.gateway.streams.request_stream import RequestStream, WorkerConnections
from baton.kvtransfer.ranks import executor
from baton.kvtransfer.ranks.executor import ReceiveShard
from baton.kvtransfer.ranks.peer_transports import PeerTransports
from baton.prefill_worker.worker import PrefillJob
from baton.request import Request
from baton.router.in_flight import InFlight
from baton.sim.trouble import Trouble
from baton.sim.world import World

MAX_SEEDS = 150


def finding(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    broken: Callable[..., Any],
    trouble: Trouble = Trouble.ANY,
    first_seed: int = 0,
) -> str:
    """Return the message of the first seed that fails.

    first_seed: seeds before it show nothing today, and take a sixth of a second each.
    """
    monkeypatch.setattr(owner, name, broken)
    option = "" if trouble is Trouble.ANY else f" --trouble {trouble}"
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        try:
            World(seed, trouble=trouble).run()
        except AssertionError as error:
            assert error.__notes__ == [f"replay: baton sim --seed {seed}{option}"]
            return str(error)
    return f"nothing in {MAX_SEEDS} seeds"


def test_unverified_pages_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, executor, "differing_units", lambda expected, found: (), first_seed=45)
    assert "an undisturbed run says" in found


def test_pages_freed_under_their_writer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = ReceiveShard.close

    def confirmed(self: ReceiveShard, *, is_confirmed: bool) -> None:
        close(self, is_confirmed=True)

    found = finding(monkeypatch, ReceiveShard, "close", confirmed)
    assert "while a writer is in it" in found


def test_source_that_goes_on_writing_after_its_stop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, PeerTransports, "abort", lambda self, transfer: None)
    assert "is read unheld" in found or "while a writer is in it" in found


def test_pages_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_offer = PrefillJob.take_offer

    def reversed_offer(self: PrefillJob) -> tuple[tuple[int, ...], int] | None:
        offer = take_offer(self)
        return offer and (offer[0][::-1], offer[1])

    found = finding(monkeypatch, PrefillJob, "take_offer", reversed_offer)
    assert "an undisturbed run says" in found


@pytest.mark.parametrize(
    ("owner", "name", "broken", "expected"),
    [
        (ExternalPageHolds, "release_kept", lambda self, key: None, "keeps pages of"),
        (DecodeAdmission, "arrived", lambda self, attempt: None, "still counts pages of"),
        (InFlight, "ended", lambda self, key: None, "attempts in flight"),
    ],
)
def test_accounts_that_are_never_closed_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., None], expected: str
) -> None:
    assert expected in finding(monkeypatch, owner, name, broken)


def test_replays_with_another_seed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    request_of = RequestStream.request_of

    def other_seed(self: RequestStream, attempt: int) -> Request | None:
        request = request_of(self, attempt)
        if request is None:
            return None
        seed = (request.sampling.seed or 0) + attempt
        sampling = msgspec.structs.replace(request.sampling, seed=seed)
        return msgspec.structs.replace(request, sampling=sampling)

    assert "an undisturbed run says" in finding(monkeypatch, RequestStream, "request_of", other_seed)


def test_node_that_ends_is_found_where_each_of_its_workers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(
        monkeypatch,
        WorkerConnections,
        "lost_nodes",
        lambda self, worker: frozenset(),
        Trouble.LOST_NODE,
        first_seed=12,
    )
    assert "was given up after 1 deaths" in found
