import pytest

from baton.engine.accounts import CREDIT_STEPS, MAX_AHEAD, MAX_WORK, Accounts
from baton.engine.sequence import Sequence
from baton.request import Request
from baton.tenancy import Standing
from tests.accounts import standing


def open_one(accounts: Accounts, name: str, with_standing: Standing | None = None) -> Sequence:
    request = Request(request_id=name, token_ids=(1, 2), tenant=name, standing=with_standing or Standing())
    sequence = Sequence.from_request(request, 0, max_model_len=10)
    sequence.account = accounts.open(name, request.standing)
    return sequence


def test_work_is_counted_for_its_weight() -> None:
    accounts = Accounts()
    light, heavy = open_one(accounts, "light").account, open_one(accounts, "heavy", standing(4.0)).account
    accounts.charge([(light, 8), (heavy, 8), (heavy, 8)])
    assert (light.work, heavy.work) == (8.0, 4.0)


def test_who_was_away_has_what_its_share_of_the_last_steps_would_have_been() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first"), open_one(accounts, "second")
    for _ in range(CREDIT_STEPS + 50):
        accounts.charge([(first.account, 10), (second.account, 7)])
    assert open_one(accounts, "third").account.work == 7.0 * 50


def test_one_that_waits_behind_others_does_not_hold_up_the_present() -> None:
    accounts = Accounts()
    first, _ = open_one(accounts, "first"), open_one(accounts, "of a lower class")
    for _ in range(CREDIT_STEPS + 50):
        accounts.charge([(first.account, 10)])
    assert open_one(accounts, "third").account.work == 10.0 * 50


def test_one_account_alone_moves_the_present() -> None:
    accounts = Accounts()
    open_one(accounts, "first")
    for _ in range(CREDIT_STEPS + 50):
        accounts.charge_only(10)
    assert open_one(accounts, "second").account.work == 10.0 * 50


def test_who_is_ahead_gains_nothing_by_leaving() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first"), open_one(accounts, "second")
    accounts.charge([(first.account, 100), (second.account, 70)])
    accounts.close(first)
    assert open_one(accounts, "first").account.work == 100.0
    accounts.close(second)
    assert open_one(accounts, "second").account.work == 70.0


def test_who_is_ahead_stays_so_when_all_have_left_for_a_moment() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first"), open_one(accounts, "second")
    accounts.charge([(first.account, 100)])
    for sequence in (first, second):
        accounts.close(sequence)
    assert not accounts.live
    assert [open_one(accounts, name).account.work for name in ("first", "second")] == [100.0, 0.0]


def test_work_is_counted_exactly_however_much_there_was() -> None:
    accounts = Accounts()
    first, second = open_one(accounts, "first", standing(1e-6)), open_one(accounts, "second")
    for _ in range(CREDIT_STEPS):
        accounts.charge([(first.account, 2**30)])
    lead = first.account.work - second.account.work
    accounts.charge([(first.account, 1)])
    for _ in range(CREDIT_STEPS):
        accounts.charge([(first.account, 1)])
    second.account.work = first.account.work
    accounts.charge([(second.account, 1)])
    assert second.account.work - first.account.work == 1.0 and lead > MAX_WORK
    assert open_one(accounts, "third").account.work < MAX_WORK


def test_the_latest_weight_holds() -> None:
    accounts = Accounts()
    account = open_one(accounts, "a", standing(2.0)).account
    assert open_one(accounts, "a", standing(5.0)).account is account
    assert account.weight == 5.0 == accounts.total_weight


def test_a_lesser_quota_holds_when_those_with_a_larger_one_have_ended() -> None:
    accounts = Accounts()
    free, wide, tight = (open_one(accounts, "a", standing(max_kv_pages=quota)) for quota in (None, 9, 4))
    account = free.account
    assert accounts.have_quotas and account.max_pages == float("inf")
    accounts.close(free)
    assert account.max_pages == 9
    accounts.close(wide)
    assert account.max_pages == 4
    accounts.close(tight)
    assert not accounts.live
    assert Accounts().have_quotas == accounts.have_quotas


def test_those_who_were_ahead_are_forgotten_at_some_number() -> None:
    accounts = Accounts()
    open_one(accounts, "stays")
    for number in range(MAX_AHEAD + 50):
        sequence = open_one(accounts, str(number))
        accounts.charge([(sequence.account, 10)])
        accounts.close(sequence)
    assert len(accounts._ahead) <= MAX_AHEAD
    assert open_one(accounts, str(MAX_AHEAD + 49)).account.work == 10.0


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_any_weight_of_the_contract_is_counted(weight: float) -> None:
    accounts = Accounts()
    account = open_one(accounts, "a", standing(weight)).account
    accounts.charge([(account, 2**20)])
    assert 0 < account.work < float("inf")
