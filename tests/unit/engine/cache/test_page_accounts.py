import pytest

from baton.engine.cache.page_pool import PagePool
from baton.errors import IntegrityError


@pytest.fixture
def pool() -> PagePool:
    pool = PagePool(8, 4)
    for owner in ("a1", "a2"):
        pool.accounts.book(owner, "a")
    pool.accounts.book("b1", "b")
    return pool


def test_a_page_counts_once_for_an_account_and_once_for_each(pool: PagePool) -> None:
    pages = pool.allocate(3, "a1")
    pool.share(pages[:2], "a2")
    pool.share(pages[:1], "b1")
    assert dict(pool.accounts.num_pages) == {"a": 3, "b": 1}
    pool.release(pages, "a1")
    assert dict(pool.accounts.num_pages) == {"a": 2, "b": 1}
    pool.release(pages[:2], "a2")
    assert dict(pool.accounts.num_pages) == {"b": 1}
    pool.check_integrity()


def test_owners_that_are_not_booked_count_for_nobody(pool: PagePool) -> None:
    pages = pool.allocate(2, "somebody")
    assert not pool.accounts.num_pages
    pool.hand_over(pages, "somebody", "a1")
    assert pool.accounts.num_pages["a"] == 2
    pool.hand_over(pages, "a1", "nobody")
    assert not pool.accounts.num_pages
    pool.check_integrity()


def test_handing_over_within_an_account_changes_nothing(pool: PagePool) -> None:
    pages = pool.allocate(2, "a1")
    pool.hand_over(pages, "a1", "a2")
    assert pool.accounts.num_pages["a"] == 2
    pool.accounts.close("a1")
    pool.accounts.close("a2")
    assert pool.accounts.num_open == 2  # a2 has pages still, b1 has not ended
    pool.release(pages, "a2")
    assert pool.accounts.num_open == 1 and not pool.accounts.num_pages


def test_leases_are_on_nobodys_account_until_they_are_adopted(pool: PagePool) -> None:
    pages = pool.reserve(2, "lease", 1.0)
    pool.accounts.expect("a", 2)
    assert not pool.accounts.num_pages and pool.accounts.held("a") == 2
    pool.adopt(pages, "lease", "a1")
    pool.accounts.expect("a", -2)
    assert pool.accounts.num_pages["a"] == 2 == pool.accounts.held("a")
    pool.check_integrity()


def test_lost_owners_have_nothing_and_the_others_what_they_had(pool: PagePool) -> None:
    pages = pool.allocate(3, "a1")
    pool.share(pages[:1], "b1")
    pool.lose(["a1"])
    assert dict(pool.accounts.num_pages) == {"b": 1}
    pool.check_integrity()
    pool.release(pages[:1], "b1")
    pool.accounts.close("b1")
    assert pool.accounts.num_open == 1  # a2


def test_booking_twice_is_once_and_never_on_two_accounts(pool: PagePool) -> None:
    pool.accounts.book("a1", "a")
    with pytest.raises(ValueError, match="on the account 'a' already, not 'b'"):
        pool.accounts.book("a1", "b")


def test_a_miscount_is_found(pool: PagePool) -> None:
    pool.allocate(1, "a1")
    pool.accounts.num_pages["a"] += 1
    with pytest.raises(IntegrityError, match="accounts hold"):
        pool.check_integrity()
