import pytest

from baton.engine.cache.prefix_cache import HostTier
from baton.errors import IntegrityError


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_without_pages_nothing_is_kept() -> None:
    host = HostTier()
    host.store(key(1), 0)
    assert key(1) not in host
    assert host.take_copies() == ((), ())


def test_stored_page_is_copied_once_and_found_by_its_key() -> None:
    host = HostTier(2)
    host.store(key(1), device_page=7)
    to_host, to_device = host.take_copies()
    assert [device for device, _ in to_host] == [7] and to_device == ()
    assert host.take_copies() == ((), ())
    assert key(1) in host and host.num_available == 2


def test_oldest_cached_page_makes_room_and_its_pending_copy_is_void() -> None:
    host = HostTier(1)
    host.store(key(1), device_page=7)
    host.store(key(2), device_page=8)
    assert key(1) not in host and key(2) in host
    assert host.take_copies()[0] == ((8, 0),)


def test_pinned_page_is_not_dropped_and_leaves_when_fetched() -> None:
    host = HostTier(1)
    host.store(key(1), device_page=7)
    host.take_copies()
    host.pin(key(1))
    host.pin(key(1))
    host.store(key(2), device_page=8)
    assert key(1) in host and key(2) not in host
    host.fetch(key(1), device_page=3)
    assert key(1) not in host
    assert host.take_copies() == ((), ((3, 0),))


def test_page_read_by_a_batch_is_not_written_by_the_same_batch() -> None:
    host = HostTier(1)
    host.store(key(1), device_page=7)
    host.pin(key(1))
    host.fetch(key(1), device_page=3)
    assert host.num_available == 0
    host.begin_step()
    assert host.num_available == 1


def test_swapped_pages_return_to_their_owner() -> None:
    host = HostTier(3)
    host_pages = host.swap_out("a", [4, 5, 6])
    assert host.take_copies()[0] == tuple(zip([4, 5, 6], host_pages, strict=True))
    host.swap_in("a", [1, 2])  # the first page was still on the device
    assert host.take_copies()[1] == ((1, host_pages[1]), (2, host_pages[2]))
    host.begin_step()
    assert host.num_available == 3
    host.check_integrity()


def test_swap_pushes_out_cached_pages_but_not_other_swaps() -> None:
    host = HostTier(2)
    host.swap_out("a", [4])
    host.store(key(1), device_page=7)
    host.swap_out("b", [5])
    assert key(1) not in host
    with pytest.raises(IntegrityError, match="1 host pages asked for, 0 left"):
        host.swap_out("c", [6])


def test_owner_that_ends_while_swapped_frees_its_pages_and_copies() -> None:
    host = HostTier(2)
    host.swap_out("a", [4, 5])
    host.give_up("a")
    assert host.num_available == 2
    assert host.take_copies() == ((), ())


def test_dropped_key_frees_its_page_even_if_pinned() -> None:
    host = HostTier(2)
    host.store(key(1), 4)
    host.store(key(2), 5)
    host.pin(key(2))
    host.drop(key(1))
    host.drop(key(2))
    host.drop(key(3))
    assert host.num_available == 2 and host.take_copies() == ((), ())
    host.check_integrity()


def test_integrity_check_finds_a_lost_page() -> None:
    host = HostTier(2)
    host._free.pop()
    with pytest.raises(IntegrityError, match="2 host pages"):
        host.check_integrity()
