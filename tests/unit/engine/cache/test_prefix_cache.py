import random
from collections.abc import Iterable

import pytest

from baton.engine.cache import prefix_cache
from baton.engine.cache.page_pool import PagePool, PageState
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.scheduler.sequence import Sequence
from baton.errors import IntegrityError
from baton.messages.control import PageChanges
from baton.messages.workers import Tier
from baton.pages import PageKeys
from baton.request import Request, SamplingParams, TokenIds
from baton.tenants import with_public

PAGE_SIZE = 4


def make(num_pages: int = 8, num_host_pages: int = 0, enabled: bool = True) -> PrefixCache:
    keys = PageKeys(model_fingerprint="m", dtype="float32", page_size=PAGE_SIZE)
    return PrefixCache(PagePool(num_pages, PAGE_SIZE), keys if enabled else None, HostTier(num_host_pages))


def sequence_of(
    name: str, token_ids: Iterable[int], *, salt: bytes = b"", prompt_logprobs: int | None = None
) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request(request_id=name, token_ids=TokenIds.of(token_ids), cache_salt=salt, sampling=sampling)
    return Sequence.from_request(request, 0, max_model_len=1_000)


def compute(cache: PrefixCache, sequence: Sequence) -> None:
    """Give the sequence pages for all its tokens, as if they had just been computed."""
    missing = cache.pool.pages_for(sequence.num_tokens) - len(sequence.page_table)
    cache.make_room(missing)
    cache.host.begin_step()
    sequence.page_table += cache.pool.allocate(missing, sequence.key)
    sequence.num_computed_tokens = sequence.num_tokens
    cache.register(sequence)
    cache.check_integrity()


def computed(cache: PrefixCache, name: str, token_ids: Iterable[int]) -> Sequence:
    sequence = sequence_of(name, token_ids)
    compute(cache, sequence)
    return sequence


def finish(cache: PrefixCache, sequence: Sequence) -> None:
    cache.pool.release(sequence.page_table, sequence.key)


def matched(cache: PrefixCache, sequence: Sequence) -> int:
    cache.extend_keys(sequence, sequence.num_tokens // PAGE_SIZE)
    device_pages, host_keys = cache.match(sequence)
    return len(device_pages) + len(host_keys)


def test_disabled_cache_hashes_and_keeps_nothing() -> None:
    cache = make(enabled=False)
    sequence = sequence_of("a", range(9))
    compute(cache, sequence)
    finish(cache, sequence)
    assert sequence.page_keys == []
    assert cache.pool.num_free == 8


def test_eviction_takes_the_oldest_leaf_so_that_the_rest_stays_reachable() -> None:
    cache = make(num_pages=8)
    for name, token_ids in (("a", range(16)), ("b", [0, 1, 2, 3, 90, 91, 92, 93])):
        sequence = sequence_of(name, token_ids)
        cache.pool.share(cache.match(sequence)[0], sequence.key)
        compute(cache, sequence)
        finish(cache, sequence)
    sizes = []
    for num_free in range(3, 9):
        cache.make_room(num_free)
        cache.check_integrity()
        sizes.append(matched(cache, sequence_of("c", range(17))))
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 0


def test_making_room_that_is_not_there_is_a_bug() -> None:
    cache = make(num_pages=2)
    compute(cache, sequence_of("a", range(8)))
    with pytest.raises(IntegrityError, match="1 pages were promised, 0 are available"):
        cache.make_room(1)


def test_hold_that_ends_front_to_back_cannot_leave_a_chain_without_its_start() -> None:
    cache = make(num_pages=4)
    sequence = sequence_of("a", range(16))
    compute(cache, sequence)
    table = list(sequence.page_table)
    cache.pool.hold(table, "reader")
    finish(cache, sequence)
    cache.pool.release(table[:1], "reader")
    cache.make_room(1)
    cache.check_integrity()
    assert matched(cache, sequence_of("b", range(17))) == 0
    assert cache.num_cut_pages == 3
    cache.pool.release(table[1:], "reader")
    assert cache.pool.num_free == 4
    cache.pool.check_integrity()


def test_nothing_is_learned_below_a_cut_in_the_chain() -> None:
    cache = make(num_pages=4)
    first = sequence_of("a", range(4))
    compute(cache, first)
    sequence = sequence_of("b", range(8))
    sequence.page_table += first.page_table
    cache.pool.share(first.page_table, sequence.key)
    sequence.num_known_pages = 1
    cache.forget(first.page_table)
    compute(cache, sequence)
    assert matched(cache, sequence_of("c", range(9))) == 0


def test_forgotten_pages_and_later_pages_are_not_found() -> None:
    cache = make()
    first = sequence_of("a", range(8))
    compute(cache, first)
    longer = sequence_of("b", range(16))
    cache.pool.share(first.page_table, longer.key)
    longer.page_table += first.page_table
    compute(cache, longer)
    finish(cache, first)
    cache.forget(first.page_table[1:])
    cache.check_integrity()
    assert matched(cache, sequence_of("c", range(17))) == 1
    finish(cache, longer)
    assert (cache.pool.num_free, cache.pool.count(PageState.CACHED)) == (7, 1)


def test_chain_of_any_length_is_forgotten() -> None:
    cache = make(num_pages=5_000)
    sequence = sequence_of("a", range(20_000))
    compute(cache, sequence)
    cache.forget(sequence.page_table[:1])
    cache.check_integrity()
    assert cache.num_cut_pages == 4_999


def test_tenants_share_the_pages_of_a_public_prefix_and_no_others() -> None:
    cache = make()
    compute(cache, sequence_of("a", range(16), salt=with_public(b"one", 9)))
    assert matched(cache, sequence_of("b", range(16), salt=with_public(b"two", 9))) == 2
    assert matched(cache, sequence_of("c", range(16), salt=with_public(b"one", 9))) == 3
    assert matched(cache, sequence_of("d", range(16), salt=b"one")) == 0


def test_pages_of_one_tenant_are_one_group_whatever_their_salts_and_however_much_is_public() -> None:
    cache = make()
    for name, num_public in (("a", 4), ("b", 8), ("c", 0)):
        sequence = sequence_of(name, range(8), salt=with_public(name.encode(), num_public))
        sequence.scheduling_key = "one"
        compute(cache, sequence)
        finish(cache, sequence)
    assert cache.pool.cached.num_of(b"one") == cache.pool.count(PageState.CACHED) == 5


def test_dropped_host_page_leaves_no_copy() -> None:
    host = HostTier(3)
    host.store(b"key", 4)
    host.drop(b"key")
    assert host.take_copies() == ((), ()) and host.num_available == 3


# Changes, read by a consumer that is compared with the cache.


class Reader:
    """Applies changes to its own map."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, Tier | None] = {}

    def read(self, changes: PageChanges) -> None:
        if changes.is_snapshot:
            self.tiers.clear()
        for tier, keys in changes.keys.items():
            self.tiers |= dict.fromkeys(keys, tier)
        self.tiers = {key: tier for key, tier in self.tiers.items() if tier is not None}

    def check(self, cache: PrefixCache) -> None:
        whole = Reader()
        whole.read(cache.take_changes(is_snapshot=True))
        assert self.tiers == whole.tiers
        for key, tier in self.tiers.items():
            assert (tier is Tier.DEVICE) == (cache.page_of(key) is not None)
            assert (tier is Tier.HOST) == (key in cache.host)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_host_pages", [0, 5])
def test_reader_agrees_with_the_cache(
    seed: int, num_host_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache, reader = random.Random(seed), make(12, num_host_pages), Reader()
    monkeypatch.setattr(prefix_cache, "MAX_CHANGED_KEYS", 6)  # overflows now and then
    live: list[Sequence] = []
    for step in range(60):
        prompt = [source.randrange(3)] * 4 * source.randrange(1, 4) + [source.randrange(2)] * 3
        if cache.pool.num_available >= cache.pool.pages_for(len(prompt)):
            live.append(computed(cache, str(step), prompt))
        if live and source.random() < 0.7:
            finish(cache, live.pop(source.randrange(len(live))))
        if live and source.random() < 0.1:
            cache.forget(live[-1].page_table)
        if source.random() < 0.5:
            reader.read(cache.take_changes(is_snapshot=source.random() < 0.1))
            reader.check(cache)
            cache.check_integrity()
