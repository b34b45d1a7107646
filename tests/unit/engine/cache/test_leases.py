import pytest

from baton.engine.cache.page_pool import LeaseTable


def test_second_grant_grows_the_lease_under_one_deadline() -> None:
    table = LeaseTable()
    table.grant([1], "a", 5.0)
    table.grant([2], "a", 7.0)
    assert table.expired(6.0) == []
    assert table.expired(7.0) == [("a", [1, 2])]


def test_page_is_free_of_leases_when_the_latest_deadline_has_come() -> None:
    table = LeaseTable()
    table.grant([1], "a", 5.0)
    table.grant([1], "b", 9.0)
    assert table.deadline_s(1) == 9.0
    assert table.owners(1) == {"a", "b"}


def test_lease_ends_with_its_last_page() -> None:
    table = LeaseTable()
    table.grant([1, 2], "a", 5.0)
    table.drop(1, "a")
    assert table.holds("a", 2) and not table.holds("a", 1)
    table.drop(2, "a")
    assert table.by_page == {}
    with pytest.raises(KeyError):
        table.extend("a", 9.0)
