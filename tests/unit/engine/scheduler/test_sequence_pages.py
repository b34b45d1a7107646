"""Pages of admitted sequences, brought together from the device, the host and fresh ones."""

from collections.abc import Iterable

from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.scheduler import SequencePages
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.pages import PageKeys
from baton.request import Request

PAGE_SIZE = 4


class Desk:
    def __init__(self, num_pages: int, num_host_pages: int) -> None:
        keys = PageKeys(model_fingerprint="m", dtype="float32", page_size=PAGE_SIZE)
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.host = HostTier(num_host_pages)
        self.cache = PrefixCache(self.pool, keys, self.host)
        self.pages = SequencePages(self.cache)

    def sequence(self, name: str, token_ids: Iterable[int]) -> Sequence:
        request = Request(request_id=name, token_ids=tuple(token_ids))
        sequence = Sequence.from_request(request, 0, max_model_len=1_000)
        self.cache.extend_keys(sequence, sequence.num_tokens // PAGE_SIZE)
        return sequence

    def computed(self, name: str, token_ids: Iterable[int]) -> Sequence:
        """A sequence whose tokens, all but the last, have just been computed."""
        sequence = self.sequence(name, token_ids)
        self.pages.grow(sequence, self.pool.pages_for(sequence.num_tokens - 1))
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.cache.register(sequence)
        return sequence

    def swap_out(self, sequence: Sequence) -> None:
        self.pages.swap_out(sequence)
        sequence.status = SequenceStatus.SWAPPED

    def admit(self, *sequences: Sequence) -> None:
        host_keys = [self.pages.claim(sequence) for sequence in sequences]
        for sequence, keys in zip(sequences, host_keys, strict=True):
            self.pages.restore(sequence, keys)
            sequence.status = SequenceStatus.RUNNING
        self.check()

    def check(self) -> None:
        self.pool.check_integrity()
        self.host.check_integrity()
        self.cache.check_integrity()


def test_hits_on_device_and_host_make_one_prefix() -> None:
    desk = Desk(8, 8)
    desk.pages.drop(desk.computed("a", range(17)))
    desk.cache.make_room(6)  # the last two of four pages go to the host
    desk.host.take_copies()
    sequence = desk.sequence("b", range(17))
    desk.admit(sequence)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens, sequence.num_known_pages) == (16, 16, 4)
    assert [device for device, _ in desk.host.take_copies()[1]] == sequence.page_table[2:]


def test_two_sequences_that_hit_the_same_host_page_fetch_it_once() -> None:
    desk = Desk(8, 8)
    desk.pages.drop(desk.computed("a", range(9)))
    desk.cache.make_room(8)
    desk.host.take_copies()
    first, second = desk.sequence("b", range(9)), desk.sequence("c", range(9))
    desk.admit(first, second)
    assert first.page_table == second.page_table and len(desk.host.take_copies()[1]) == 2
    assert desk.host.num_cached == 0


def test_two_swapped_sequences_share_again_what_they_shared() -> None:
    desk = Desk(8, 8)
    first = desk.computed("a", [*range(8), 50])
    second = desk.sequence("b", [*range(8), 60])
    desk.admit(second)
    desk.swap_out(first)
    desk.swap_out(second)
    desk.cache.make_room(8, keep=False)
    desk.host.take_copies()
    desk.admit(first, second)
    assert first.page_table == second.page_table
    assert len(desk.host.take_copies()[1]) == 2
    assert first.host_pages == second.host_pages == []
    desk.host.begin_step()
    assert desk.host.num_available == 8


def test_partly_filled_page_is_swapped_with_the_rest() -> None:
    desk = Desk(8, 8)
    sequence = desk.computed("a", range(7))
    desk.swap_out(sequence)
    assert len(sequence.host_pages) == 2 and sequence.page_table == []
    desk.admit(sequence)
    assert len(sequence.page_table) == 2 and sequence.num_computed_tokens == 6


def test_hits_after_a_preemption_do_not_count_as_cached_tokens() -> None:
    desk = Desk(8, 0)
    sequence = desk.computed("a", range(9))
    desk.pages.drop(sequence)
    sequence.num_preemptions = 1
    desk.admit(sequence)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (8, 0)


def test_dropping_a_table_changes_its_version() -> None:
    desk = Desk(8, 0)
    sequence = desk.computed("a", range(9))
    version = sequence.table_version
    desk.pages.drop(sequence)
    assert sequence.table_version > version
    desk.check()
