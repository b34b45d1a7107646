"""Batching policies: the queue window, the order among scheduling keys, and batches by request."""

from typing import Any

import pytest

from baton.engine.scheduler.policies import QueueWindow, in_turn
from baton.engine.scheduler.sequence import Sequence
from baton.fair_queue import Share
from baton.request import Request, SamplingParams, TokenIds
from tests.accounts import AccountHarness, scheduling_key
from tests.scheduling import Harness


def waiting(*enqueued_s: float) -> list[Sequence]:
    sequences = []
    for number, now_s in enumerate(enqueued_s):
        request = Request(request_id=str(number), token_ids=TokenIds.of((1, 2)))
        sequences.append(Sequence.from_request(request, 0, max_model_len=100))
        sequences[-1].enqueued_s = now_s
    return sequences


def released(window: QueueWindow, sequences: list[Sequence], now_s: float, num_seats: int = 8) -> int:
    return len(list(window.release(sequences, num_seats, now_s)[0]))


def test_new_sequences_are_held_until_the_oldest_has_waited() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(1.0, 1.3)
    none, wait_s = window.release(sequences, 8, now_s=1.2)
    assert not list(none) and wait_s == pytest.approx(0.3)
    assert released(window, sequences, now_s=1.5) == 2


@pytest.mark.parametrize(("num_waiting", "expected"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_largest_preferred_size_that_waits_is_released_at_once(num_waiting: int, expected: int) -> None:
    assert released(QueueWindow(0.5, (4, 2)), waiting(*[0.0] * num_waiting), now_s=0.1) == expected


def test_sequence_that_ran_before_is_not_held() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(0.0, 0.0)
    sequences[1].num_preemptions = 1
    assert list(window.release(sequences, 8, now_s=0.1)[0]) == [sequences[1]]


def test_shorter_delay_of_a_sequence_opens_the_window_and_a_longer_one_does_not_extend_it() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(0.0, 0.1)
    sequences[1].max_queue_delay_s = 0.15
    assert window.release(sequences, 8, now_s=0.2)[1] == pytest.approx(0.05)
    assert released(window, sequences, now_s=0.25) == 2
    sequences[1].max_queue_delay_s = 9.0
    assert window.release(sequences, 8, now_s=0.2)[1] == pytest.approx(0.3)


def lane(share: Share, num_tokens: list[int], rank: int = 0) -> list[Sequence]:
    sequences = []
    for number, num in enumerate(num_tokens):
        request = Request(request_id=f"{share.key}{number}", token_ids=TokenIds.of((1,) * num))
        sequence = Sequence.from_request(request, 0, max_model_len=1000)
        sequence.share = share
        sequence.rank = (rank, 0, float(number), float(ord(share.key)), 0)
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        # The key with the least work comes next.
        ([lane(Share("a"), [30, 30]), lane(Share("b"), [10] * 4)], "a0 b0 b1 b2 a1 b3"),
        # Recent work counts.
        ([lane(Share("a", work=25.0), [10, 10]), lane(Share("b"), [10] * 4)], "b0 b1 b2 a0 b3 a1"),
        # A weight multiplies turns.
        (
            [lane(Share("h", weight=3.0), [10] * 6), lane(Share("l"), [10] * 2)],
            "h0 l0 h1 h2 l1 h3 h4 h5",
        ),
        # A better class comes first.
        ([lane(Share("l"), [10] * 2, rank=1), lane(Share("h", work=1e6), [10] * 2)], "h0 h1 l0 l1"),
    ],
)
def test_order_follows_class_then_work_for_the_weight(lanes: list[list[Sequence]], expected: str) -> None:
    given = in_turn([iter(each) for each in lanes], lambda sequence: sequence.num_tokens)
    assert " ".join(sequence.request_id for sequence in given) == expected


def test_sequence_without_tokens_costs_no_work() -> None:
    lanes = [iter(lane(Share(name), [10, 10])) for name in "ab"]
    given = " ".join(sequence.request_id for sequence in in_turn(lanes, lambda sequence: 0))
    assert given == "a0 b0 a1 b1"


def test_prompts_of_two_keys_share_the_steps_by_weight() -> None:
    """Both keys have more than fits; the noisy one came first, with more prompts of a better priority."""
    harness = AccountHarness.of(4000, max_num_batched_tokens=100)
    for number in range(200):
        prompt = [number, *range(39)]
        harness.add(f"n{number}", prompt, SamplingParams(max_tokens=1), tenant="noisy", cache_salt=b"n")
    for number in range(60):
        harness.add(
            f"q{number}",
            [number, *range(39)],
            SamplingParams(max_tokens=1),
            tenant="quiet",
            scheduling_key=scheduling_key(weight=3.0),
            priority=5,
        )
    computed = {"noisy": 0, "quiet": 0}
    while any(sequence.scheduling_key == "quiet" for sequence in harness.live.values()):
        _, batch, _ = harness.step()
        for chunk in batch.chunks:
            computed[chunk.sequence.scheduling_key] += chunk.num_tokens
    assert computed["quiet"] == 60 * 40
    assert abs(computed["quiet"] / sum(computed.values()) - 0.75) < 0.0375  # 5 % of its share


def make_by_request(policy: str, num_pages: int = 200, **config: Any) -> Harness:
    return Harness.of(num_pages, policy=policy, max_num_seqs=3, max_num_batched_tokens=60, **config)


def add(harness: Harness, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
    token_ids = [(ord(name) + position) % 50 for position in range(num_prompt_tokens)]
    harness.add(name, token_ids, SamplingParams(max_tokens=max_tokens))


def test_static_batch_pads_prompts_to_the_longest() -> None:
    harness = make_by_request("static")
    for name, num_tokens in (("a", 3), ("b", 20), ("c", 5)):
        add(harness, name, num_tokens, 2)
    plan, batch, _ = harness.step()
    assert dict(plan.scheduled) == {("a", 0): 3, ("b", 0): 20, ("c", 0): 5}
    assert batch.num_padded_tokens == 3 * 20 - 28
    harness.run()


def test_static_batch_cuts_long_prompts_into_equal_columns() -> None:
    harness = make_by_request("static")
    for name, num_tokens in (("a", 30), ("b", 50), ("c", 5)):
        add(harness, name, num_tokens, 3)
    steps = [harness.step() for _ in range(4)]
    assert [list(plan.scheduled.values()) for plan, _, _ in steps] == [[20, 20, 5], [10, 20], [10], [1, 1, 1]]
    assert [batch.num_padded_tokens for _, batch, _ in steps] == [15, 30, 20, 0]
    harness.run()


def test_dynamic_batch_gathers_in_its_window_and_pads_nothing() -> None:
    harness = make_by_request("dynamic", max_queue_delay_ms=100.0)
    add(harness, "a", 4, 4)
    plan, _, _ = harness.step()
    assert not plan.scheduled and plan.wait_s == pytest.approx(0.1)
    harness.clock.advance(0.05)
    add(harness, "b", 10, 2)
    harness.clock.advance(0.05)
    plan, _, _ = harness.step()
    assert set(plan.admitted) == {("a", 0), ("b", 0)} and plan.num_padded_tokens == 0
    harness.run()


def test_no_sequence_joins_a_running_dynamic_batch() -> None:
    harness = make_by_request("dynamic")
    add(harness, "a", 4, 4)
    harness.step()
    add(harness, "b", 4, 1)
    plans = [harness.step()[0] for _ in range(4)]
    assert [[key[0] for key in plan.scheduled] for plan in plans] == [["a"], ["a"], ["a"], ["b"]]


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_batch_takes_only_members_with_room_for_their_longest_answers(policy: str) -> None:
    harness = make_by_request(policy, num_pages=10)
    for name in "abc":
        add(harness, name, 4, 12)  # 4 pages each in the end
    plan, _, _ = harness.step()
    assert [key[0] for key in plan.admitted] == ["a"]
    harness.run()
    assert all(sequence.num_preemptions == 0 for sequence in harness.finished)
