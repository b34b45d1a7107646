from math import log2

import pytest

from baton.engine.scheduler.accounts import FORGET_S, HALF_LIFE_S, MAX_AWAY, PART, Account, Accounts
from baton.engine.scheduler.sequence import Sequence
from baton.request import Request
from baton.tenants import SchedulingKey
from tests.accounts import scheduling_key

NUM_STEPS = 128  # in a half-life
STEP_S = HALF_LIFE_S / NUM_STEPS


def open_one(accounts: Accounts, name: str, with_standing: SchedulingKey | None = None) -> Sequence:
    request = Request(
        request_id=name, token_ids=(1, 2), tenant=name, scheduling_key=with_standing or SchedulingKey()
    )
    sequence = Sequence.from_request(request, 0, max_model_len=10)
    sequence.account = accounts.open(name, request.scheduling_key)
    return sequence


def test_work_is_counted_for_its_weight() -> None:
    accounts = Accounts()
    light, heavy = (
        open_one(accounts, "light").account,
        open_one(accounts, "heavy", scheduling_key(4.0)).account,
    )
    accounts.charge([(light, 8), (heavy, 8), (heavy, 8)], 0.0)
    assert (light.work, heavy.work) == (8.0, 4.0)


def test_work_counts_half_as_much_after_a_while() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first"), open_one(accounts, "second")
    accounts.charge([(first.account, 1000)], 0.0)
    for number in range(100):
        accounts.charge([(second.account, 1)], HALF_LIFE_S * (number + 1) / 100)
    assert first.account.work == pytest.approx(500)


def test_work_fades_alike_with_sequences_and_without() -> None:
    accounts = Accounts()
    stays, leaves = open_one(accounts, "stays"), open_one(accounts, "leaves")
    accounts.charge([(stays.account, 100), (leaves.account, 100)], 0.0)
    accounts.close(leaves)
    for number in range(70):
        accounts.charge_only(0, number * HALF_LIFE_S / 30)
    assert open_one(accounts, "leaves").account.work == pytest.approx(stays.account.work)


def test_a_newcomer_has_had_a_small_part() -> None:
    accounts = Accounts()
    assert open_one(accounts, "first").account.work == 0.0
    accounts.charge_only(10, 0.0)
    assert open_one(accounts, "second", scheduling_key(2.0)).account.work == PART * 10 / 2


def test_nobody_who_comes_back_has_had_less_than_a_newcomer() -> None:
    accounts = Accounts()
    stays, leaves = open_one(accounts, "stays"), open_one(accounts, "leaves")
    accounts.charge([(leaves.account, 10)], 0.0)
    accounts.close(leaves)
    for number in range(1, 31):
        accounts.charge([(stays.account, 10)], number * FORGET_S / 20)
        if number not in (10, 30):
            continue
        back = open_one(accounts, "leaves")
        newcomer = open_one(accounts, f"newcomer {number}")
        assert back.account.work >= newcomer.account.work > 0
        for sequence in (back, newcomer):
            accounts.close(sequence)


def test_what_was_had_long_ago_counts_no_more_though_nothing_was_computed_since() -> None:
    accounts = Accounts()
    had, newcomer = open_one(accounts, "had").account, open_one(accounts, "newcomer").account
    accounts.charge([(had, 10_000)], 0.0)
    accounts.charge([(newcomer, 100)], 20 * HALF_LIFE_S)
    assert had.work < newcomer.work and not accounts.is_beyond_share(had)


def test_a_clock_that_goes_back_takes_nothing_and_gives_nothing() -> None:
    accounts = Accounts()
    account = open_one(accounts, "a").account
    for now_s in (100.0, 40.0, 100.0):
        accounts.charge([(account, 10)], now_s)
    assert account.work == 30.0


def test_nobody_gains_by_leaving_even_when_all_leave() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first"), open_one(accounts, "second")
    accounts.charge([(first.account, 100), (second.account, 70)], 0.0)
    for sequence in (first, second):
        accounts.close(sequence)
    assert not accounts.live
    assert [open_one(accounts, name).account.work for name in ("first", "second")] == [100.0, 70.0]


def heavy_and_newcomers(num_newcomers: int) -> tuple[Accounts, Account, list[Account]]:
    """One that has had everything, and others that come then."""
    accounts = Accounts()
    heavy = open_one(accounts, "heavy").account
    for number in range(20 * NUM_STEPS):
        accounts.charge_only(256, number * STEP_S)
    return accounts, heavy, [open_one(accounts, str(number)).account for number in range(num_newcomers)]


@pytest.mark.parametrize("num_newcomers", [1, 3, 10])
def test_one_that_has_had_all_waits_for_newcomers_no_longer_than_is_said(num_newcomers: int) -> None:
    """Whoever has had least is computed, as engine/scheduler/policies.py has it."""
    accounts, heavy, others = heavy_and_newcomers(num_newcomers)
    num_steps = 0
    while (least := min((*others, heavy), key=lambda account: account.work)) is not heavy:
        accounts.charge([(least, 256)], (20 * NUM_STEPS + num_steps) * STEP_S)
        num_steps += 1
    bound = NUM_STEPS * log2(1 + num_newcomers)
    assert 0.8 * bound <= num_steps <= bound + num_newcomers + 1


def test_one_that_has_had_all_comes_next_however_many_others_come() -> None:
    accounts, heavy, _ = heavy_and_newcomers(0)
    for number in range(6 * NUM_STEPS + 2):
        newcomer = open_one(accounts, str(number))
        if heavy.work <= newcomer.account.work:
            return
        accounts.charge([(newcomer.account, 256)], (20 * NUM_STEPS + number) * STEP_S)
        accounts.close(newcomer)
    raise AssertionError("it starves")


def test_tokens_are_the_same_when_the_weight_changes() -> None:
    accounts = Accounts()
    stays, leaves = open_one(accounts, "stays"), open_one(accounts, "leaves")
    accounts.charge([(stays.account, 60), (leaves.account, 60)], 0.0)
    assert open_one(accounts, "stays", scheduling_key(4.0)).account.work == 15.0
    accounts.close(leaves)
    assert open_one(accounts, "leaves", scheduling_key(0.5)).account.work == 120.0


def test_nothing_is_left_of_what_is_cleared() -> None:
    accounts = Accounts()
    accounts.charge([(open_one(accounts, "stays").account, 10)], 0.0)
    accounts.close(open_one(accounts, "leaves"))
    accounts.clear()
    only = open_one(accounts, "stays").account
    assert only.work == 0.0 and not accounts.is_beyond_share(only)


def test_who_has_had_much_of_what_others_were_due_is_beyond_its_share() -> None:
    accounts = Accounts()
    heavy, light = (
        open_one(accounts, "heavy").account,
        open_one(accounts, "light", scheduling_key(3.0)).account,
    )
    assert not accounts.is_beyond_share(heavy)  # nobody has had anything
    accounts.charge([(heavy, 25), (light, 75)], 0.0)
    assert not accounts.is_beyond_share(heavy) and not accounts.is_beyond_share(light)
    accounts.charge([(heavy, 20)], 0.0)
    assert accounts.is_beyond_share(heavy) and not accounts.is_beyond_share(light)


def test_the_only_account_is_never_beyond_its_share() -> None:
    accounts = Accounts()
    only = open_one(accounts, "only").account
    accounts.charge_only(100, 0.0)
    assert not accounts.is_beyond_share(only)


def test_a_share_is_among_those_that_are_remembered() -> None:
    accounts = Accounts()
    stays, leaves = open_one(accounts, "stays"), open_one(accounts, "leaves", scheduling_key(1e6))
    accounts.charge([(stays.account, 60), (leaves.account, 1)], 0.0)
    accounts.close(leaves)
    assert accounts.is_beyond_share(stays.account)
    for number in range(8):
        accounts.charge_only(256, number * FORGET_S / 6)
    assert not accounts.is_beyond_share(stays.account) and not accounts._away
    assert accounts._away_weight == 0.0


def test_the_latest_weight_holds() -> None:
    accounts = Accounts()
    account = open_one(accounts, "a", scheduling_key(2.0)).account
    assert open_one(accounts, "a", scheduling_key(5.0)).account is account
    assert account.weight == 5.0 == accounts.total_weight


def test_a_lesser_quota_holds_when_those_with_a_larger_one_have_ended() -> None:
    accounts = Accounts()
    free, wide, tight = (
        open_one(accounts, "a", scheduling_key(max_kv_pages=quota)) for quota in (None, 9, 4)
    )
    account = free.account
    assert accounts.have_quotas and account.max_pages == float("inf")
    accounts.close(free)
    assert account.max_pages == 9
    accounts.close(wide)
    assert account.max_pages == 4
    accounts.close(tight)
    assert not accounts.live
    assert Accounts().have_quotas == accounts.have_quotas


def test_who_is_away_longest_is_forgotten_at_some_number() -> None:
    accounts = Accounts()
    open_one(accounts, "stays")
    for number in range(MAX_AWAY + 50):
        accounts.close(open_one(accounts, str(number)))
        accounts.charge([(accounts.live["stays"], 10)], 0.0)
    assert len(accounts._away) <= MAX_AWAY and accounts._away_weight == len(accounts._away)
    assert str(MAX_AWAY + 49) in accounts._away and "0" not in accounts._away


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_any_weight_of_the_contract_is_counted(weight: float) -> None:
    accounts = Accounts()
    account = open_one(accounts, "a", scheduling_key(weight)).account
    accounts.charge([(account, 2**20)], 0.0)
    assert 0 < account.work < float("inf")
