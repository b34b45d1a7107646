"""Recent work of scheduling keys: what counts, for how long, and which keys are beyond their shares."""

from math import log2

import pytest

from baton.fair_queue import FORGET_S, HALF_LIFE_S, MAX_AWAY, NEWCOMER_PART, DecayedShares, Share

NUM_STEPS = 128  # in a half-life
STEP_S = HALF_LIFE_S / NUM_STEPS


def test_work_counts_half_after_a_half_life_with_users_and_without() -> None:
    shares = DecayedShares()
    stays, leaves, busy = (shares.join(key, 1.0) for key in ("stays", "leaves", "busy"))
    shares.charge([(stays, 1000), (leaves, 1000)], 0.0)
    shares.leave(leaves)
    for number in range(100):
        shares.charge([(busy, 1)], HALF_LIFE_S * (number + 1) / 100)
    assert stays.work == pytest.approx(500)
    assert shares.join("leaves", 1.0).work == pytest.approx(stays.work)


def test_newcomer_starts_with_a_part_of_all_work() -> None:
    shares = DecayedShares()
    assert shares.join("first", 1.0).work == 0.0
    shares.charge_only(10, 0.0)
    assert shares.join("second", 2.0).work == NEWCOMER_PART * 10 / 2


def test_returning_key_has_at_least_the_work_of_a_newcomer() -> None:
    shares = DecayedShares()
    stays, leaves = shares.join("stays", 1.0), shares.join("leaves", 1.0)
    shares.charge([(leaves, 10)], 0.0)
    shares.leave(leaves)
    for number in range(1, 31):
        shares.charge([(stays, 10)], number * FORGET_S / 20)
        if number in (10, 30):
            back, newcomer = shares.join("leaves", 1.0), shares.join(f"newcomer {number}", 1.0)
            assert back.work >= newcomer.work > 0
            shares.leave(back)
            shares.leave(newcomer)


def test_old_work_decays_while_nothing_is_computed() -> None:
    shares = DecayedShares()
    old, newcomer = shares.join("old", 1.0), shares.join("newcomer", 1.0)
    shares.charge([(old, 10_000)], 0.0)
    shares.charge([(newcomer, 100)], 20 * HALF_LIFE_S)
    assert old.work < newcomer.work and not shares.is_beyond_share(old)


def test_clock_that_goes_back_changes_no_work() -> None:
    shares = DecayedShares()
    share = shares.join("a", 1.0)
    for now_s in (100.0, 40.0, 100.0):
        shares.charge([(share, 10)], now_s)
    assert share.work == 30.0


def test_leaving_gains_nothing_even_when_all_keys_leave() -> None:
    shares = DecayedShares()
    first, second = shares.join("first", 1.0), shares.join("second", 1.0)
    shares.charge([(first, 100), (second, 70)], 0.0)
    shares.leave(first)
    shares.leave(second)
    assert not shares.active
    assert [shares.join(key, 1.0).work for key in ("first", "second")] == [100.0, 70.0]


def heavy_and_newcomers(num_newcomers: int) -> tuple[DecayedShares, Share, list[Share]]:
    """A key that has had all work, and keys that join then."""
    shares = DecayedShares()
    heavy = shares.join("heavy", 1.0)
    for number in range(20 * NUM_STEPS):
        shares.charge_only(256, number * STEP_S)
    return shares, heavy, [shares.join(str(number), 1.0) for number in range(num_newcomers)]


@pytest.mark.parametrize("num_newcomers", [1, 3, 10])
def test_key_with_all_work_waits_for_newcomers_within_the_bound(num_newcomers: int) -> None:
    shares, heavy, others = heavy_and_newcomers(num_newcomers)
    num_steps = 0
    while (least := min((*others, heavy), key=lambda share: share.work)) is not heavy:
        shares.charge([(least, 256)], (20 * NUM_STEPS + num_steps) * STEP_S)
        num_steps += 1
    bound = NUM_STEPS * log2(1 + num_newcomers)
    assert 0.8 * bound <= num_steps <= bound + num_newcomers + 1


def test_latest_weight_holds_and_keeps_the_undivided_work() -> None:
    shares = DecayedShares()
    stays, leaves = shares.join("stays", 1.0), shares.join("leaves", 1.0)
    shares.charge([(stays, 60), (leaves, 60)], 0.0)
    assert shares.join("stays", 4.0) is stays
    assert (stays.work, stays.weight, shares.total_weight) == (15.0, 4.0, 5.0)
    shares.leave(leaves)
    assert shares.join("leaves", 0.5).work == 120.0


def test_key_with_much_of_the_others_due_is_beyond_its_share() -> None:
    shares = DecayedShares()
    heavy, light = shares.join("heavy", 1.0), shares.join("light", 3.0)
    assert not shares.is_beyond_share(heavy)  # no key has work yet
    shares.charge([(heavy, 25), (light, 75)], 0.0)
    assert not shares.is_beyond_share(heavy) and not shares.is_beyond_share(light)
    shares.charge([(heavy, 20)], 0.0)
    assert shares.is_beyond_share(heavy) and not shares.is_beyond_share(light)


def test_only_key_is_never_beyond_its_share() -> None:
    shares = DecayedShares()
    only = shares.join("only", 1.0)
    shares.charge_only(100, 0.0)
    assert not shares.is_beyond_share(only)


def test_keys_that_left_count_until_they_are_forgotten() -> None:
    shares = DecayedShares()
    stays, leaves = shares.join("stays", 1.0), shares.join("leaves", 1e6)
    shares.charge([(stays, 60), (leaves, 1)], 0.0)
    shares.leave(leaves)
    assert shares.is_beyond_share(stays)
    for number in range(8):
        shares.charge_only(256, number * FORGET_S / 6)
    assert not shares.is_beyond_share(stays) and not shares.num_remembered


def test_number_of_remembered_keys_is_bounded() -> None:
    shares = DecayedShares()
    stays = shares.join("stays", 1.0)
    for number in range(MAX_AWAY + 50):
        leaves = shares.join(str(number), 1.0)
        shares.charge([(stays, 10), (leaves, 7)], 0.0)
        shares.leave(leaves)
    shares.charge([(stays, 10)], 0.0)
    assert shares.num_remembered <= MAX_AWAY
    work_of_newcomer = shares.join("never seen", 1.0).work
    assert shares.join("0", 1.0).work == work_of_newcomer  # the longest away is forgotten
