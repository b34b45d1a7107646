"""Prefix-cache changes, read by a consumer that is compared with the cache."""

import random

import pytest

from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import NOWHERE, ChangedKeys, HostTier, PageChanges, PrefixCache
from baton.engine.scheduler.sequence import Sequence
from baton.pages import PageKeys
from baton.request import Request, SamplingParams

PAGE_SIZE = 4


class Reader:
    """Applies changes to its own maps."""

    def __init__(self) -> None:
        self.device: dict[bytes, tuple[int, int]] = {}
        self.host: dict[bytes, tuple[int, int]] = {}

    def read(self, changes: PageChanges) -> None:
        if changes.is_afresh:
            self.device.clear()
            self.host.clear()
        for tier, told in ((self.device, changes.device), (self.host, changes.host)):
            for key, page, generation in told:
                tier.pop(key, None)
                if page != NOWHERE:
                    tier[key] = page, generation

    def check(self, cache: PrefixCache) -> None:
        assert self.device == {
            key: (page, cache.pool.generation(page)) for key, page in cache._page_of.items()
        }
        assert self.host == {key: (cache.host.page_of(key), 0) for key in cache.host.known_keys()}


def make(num_pages: int = 8, num_host_pages: int = 0) -> PrefixCache:
    keys = PageKeys(model_fingerprint="m", dtype="float32", page_size=PAGE_SIZE)
    return PrefixCache(PagePool(num_pages, PAGE_SIZE), keys, HostTier(num_host_pages))


def compute(cache: PrefixCache, name: str, token_ids: list[int]) -> Sequence:
    request = Request(request_id=name, token_ids=tuple(token_ids), sampling=SamplingParams())
    sequence = Sequence.from_request(request, 0, max_model_len=1_000)
    num_pages = cache.pool.pages_for(len(token_ids))
    cache.make_room(num_pages)
    cache.host.take_copies()
    cache.host.begin_step()
    sequence.page_table += cache.pool.allocate(num_pages, sequence.key)
    sequence.num_computed_tokens = len(token_ids)
    cache.register(sequence)
    return sequence


def finish(cache: PrefixCache, sequence: Sequence) -> None:
    cache.pool.release(sequence.page_table, sequence.key)


def test_first_take_has_everything_and_later_ones_the_changes() -> None:
    cache = make()
    compute(cache, "a", list(range(8)))
    assert cache.take_changes().is_afresh
    compute(cache, "b", list(range(100, 108)))
    changes = cache.take_changes()
    assert not changes.is_afresh and len(changes.device) == 2
    assert cache.take_changes() == PageChanges(False, [], [])


def test_no_key_is_noted_before_the_first_take() -> None:
    cache = make()
    compute(cache, "a", list(range(8)))
    assert not len(cache.changed)


def test_everything_can_be_taken_again() -> None:
    cache, reader = make(), Reader()
    compute(cache, "a", list(range(8)))
    cache.take_changes()
    reader.read(cache.take_changes(is_afresh=True))
    reader.check(cache)
    assert len(reader.device) == 2


def test_page_that_came_and_went_is_nowhere() -> None:
    cache = make()
    cache.take_changes()
    finish(cache, compute(cache, "a", list(range(4))))
    cache.make_room(8)
    assert [change.page for change in cache.take_changes().device] == [NOWHERE]


def test_refilled_page_has_another_generation() -> None:
    cache, reader = make(num_pages=1), Reader()
    for _ in range(3):
        finish(cache, compute(cache, "a", list(range(4))))
        reader.read(cache.take_changes())
        reader.check(cache)
        cache.make_room(1)
    assert [generation for _, generation in reader.device.values()] == [3]


def test_cleared_cache_is_reported_afresh() -> None:
    cache, reader = make(), Reader()
    sequence = compute(cache, "a", list(range(8)))
    reader.read(cache.take_changes())
    cache.pool.lose([sequence.key])
    cache.clear()
    changes = cache.take_changes()
    reader.read(changes)
    assert changes.is_afresh and not reader.device


def test_too_many_changes_count_as_everything() -> None:
    keys = ChangedKeys(limit=3)
    assert keys.take() is None
    for number in range(3):
        keys.note(bytes([number]))
        keys.note(b"again")
    assert len(keys) == 0  # the fourth was one too many
    assert keys.take() is None and keys.take() == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_host_pages", [0, 5])
def test_reader_agrees_with_the_cache(seed: int, num_host_pages: int) -> None:
    source, cache, reader = random.Random(seed), make(12, num_host_pages), Reader()
    cache.changed._limit = 6  # so that it overflows now and then
    live: list[Sequence] = []
    for step in range(60):
        prompt = [source.randrange(3)] * 4 * source.randrange(1, 4) + [source.randrange(2)] * 3
        if cache.pool.num_available >= cache.pool.pages_for(len(prompt)):
            live.append(compute(cache, str(step), prompt))
        if live and source.random() < 0.7:
            finish(cache, live.pop(source.randrange(len(live))))
        if live and source.random() < 0.1:
            cache.forget(live[-1].page_table)
        if source.random() < 0.5:
            reader.read(cache.take_changes(is_afresh=source.random() < 0.1))
            reader.check(cache)
            cache.check_integrity()
