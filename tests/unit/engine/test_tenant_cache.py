"""A tenant's part of the prefix cache while other tenants fill it, on the device and on the host."""

import pytest

from baton.engine.cache.page_pool import PageState
from baton.request import SamplingParams
from tests.accounts import AccountHarness, scheduling_key

HOT = [9, 8, 7, 6, 5, 4, 3, 2] * 3  # six pages


class Cached:
    def __init__(self, num_host_pages: int = 0) -> None:
        self.harness = AccountHarness.of(32, num_host_pages=num_host_pages)
        self.num_asked = 0

    def ask(self, tenant: str, prompt: list[int], weight: float = 1.0, salt: str = "") -> int:
        """Answered at once; the tokens of the prompt that were found. salt: of the request itself."""
        self.num_asked += 1
        (sequence,) = self.harness.add(
            f"r{self.num_asked}",
            prompt,
            SamplingParams(max_tokens=2),
            tenant=tenant,
            cache_salt=f"{tenant}{salt}".encode(),
            scheduling_key=scheduling_key(weight=weight),
        )
        self.harness.run()
        return sequence.num_cached_tokens

    def flood(self, tenant: str, num_prompts: int = 40, *, has_salts: bool = False) -> None:
        """has_salts: each request has a salt of its own."""
        for number in range(num_prompts):
            self.ask(tenant, [self.num_asked, number, *range(14)], salt=str(number) if has_salts else "")


@pytest.mark.parametrize("has_salts", [False, True])
@pytest.mark.parametrize("num_host_pages", [0, 12])
def test_flood_leaves_the_quiet_tenants_hot_prefix_in_place(num_host_pages: int, has_salts: bool) -> None:
    cached = Cached(num_host_pages)
    assert cached.ask("quiet", HOT) == 0
    cached.flood("noisy", has_salts=has_salts)
    assert cached.harness.pool.count(PageState.CACHED) > 24
    assert cached.ask("quiet", HOT) == 20  # all whole pages but the last token's


def test_flood_of_ones_own_pushes_out_the_oldest() -> None:
    cached = Cached()
    cached.ask("quiet", HOT)
    cached.flood("quiet")
    assert cached.ask("quiet", HOT) == 0


def test_salts_of_one_tenant_share_its_part_and_no_page() -> None:
    cached = Cached()
    cached.ask("quiet", HOT, salt="a")
    assert cached.ask("quiet", HOT, salt="b") == 0
    assert cached.ask("quiet", HOT, salt="a") == 20
    cached.flood("quiet", has_salts=True)
    assert cached.ask("quiet", HOT, salt="a") == 0


def test_single_tenant_has_the_whole_cache() -> None:
    cached = Cached()
    prompts = [[number] * 20 for number in range(6)]  # 30 pages
    for prompt in prompts:
        cached.ask("a", prompt)
    assert [cached.ask("a", prompt) for prompt in prompts] == [16] * 6


def test_beyond_its_share_a_quiet_tenant_loses_the_leaves_first() -> None:
    cached = Cached()
    long = [number % 7 for number in range(100)]  # 25 pages: its share beside one other is 16
    cached.ask("quiet", long)
    cached.flood("noisy")
    kept = cached.ask("quiet", long)
    assert 40 <= kept <= 72 and not kept % 4
    assert cached.harness.cache.num_cut_pages == 0


def test_more_weight_keeps_more() -> None:
    kept = []
    for weight in (1.0, 3.0):
        cached = Cached()
        cached.ask("quiet", [number % 7 for number in range(100)], weight)
        cached.flood("noisy")
        kept.append(cached.ask("quiet", [number % 7 for number in range(100)], weight))
    assert kept[1] >= kept[0] + 16
