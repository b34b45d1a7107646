import pytest
import torch

from baton.config.engine import CacheConfig
from baton.engine.runner import model_runner
from baton.engine.runner.model_runner import DEFAULT_CPU_BYTES, check_fits, count_host_pages, count_pages
from baton.errors import ConfigError
from tests.layouts import a_layout

CPU = torch.device("cpu")
LAYOUT = a_layout()


def test_pages_fill_the_memory_given_and_not_a_byte_more() -> None:
    for num_bytes, num_pages in ((10 * LAYOUT.page_bytes, 10), (10 * LAYOUT.page_bytes - 1, 9), (1, 0)):
        cache = CacheConfig(kv_cache_memory_bytes=num_bytes)
        assert count_pages(cache, LAYOUT, CPU) == num_pages


def test_default_pool_takes_a_bounded_part_of_free_memory() -> None:
    num_pages = count_pages(CacheConfig(), LAYOUT, CPU)
    assert 0 < num_pages <= DEFAULT_CPU_BYTES // LAYOUT.page_bytes


def test_default_host_tier_takes_a_small_part_of_free_memory_and_no_more_pages_than_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib, cache = 2**30, CacheConfig()
    for free_gib, expected_bytes in ((32, 2 * gib), (1024, 8 * gib), (0, 0)):
        monkeypatch.setattr(model_runner, "_available_bytes", lambda: free_gib * gib)  # noqa: B023
        assert count_host_pages(cache, LAYOUT, 2**40) == expected_bytes // LAYOUT.page_bytes
    monkeypatch.setattr(model_runner, "_available_bytes", lambda: 32 * gib)
    assert count_host_pages(cache, LAYOUT, 10) == 10
    given = CacheConfig(host_cache_memory_bytes=20 * LAYOUT.page_bytes)
    assert count_host_pages(given, LAYOUT, 10) == 20
    assert count_host_pages(CacheConfig(host_cache_memory_bytes=0), LAYOUT, 10) == 0


def test_one_sequence_of_the_longest_length_must_fit() -> None:
    check_fits(CacheConfig(), 3, LAYOUT, 48)
    with pytest.raises(ConfigError) as caught:
        check_fits(CacheConfig(), 3, LAYOUT, 49)
    message = str(caught.value)
    assert "holds 48 tokens" in message and "max_model_len 49" in message
    assert "cache.kv_cache_memory_bytes" in message
    assert f"{4 * LAYOUT.page_bytes:,} bytes" in message and f"{3 * LAYOUT.page_bytes:,}" in message


@pytest.mark.parametrize(
    ("free_gib", "expected_gib"),
    [
        (80, 40 - 4),  # alone: its share, less what it holds and what a step needs
        (50, 40 - 4),  # another process holds its own share already
        (20, 20 - 1),  # another process took more: the rest, less the memory of a later step
        (0, 0),
    ],
)
def test_gpu_pool_size_counts_this_process_and_free_memory(
    free_gib: int, expected_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * gib)  # in the largest step
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * gib)
    monkeypatch.setattr(model_runner, "CUDA_CONTEXT_BYTES", gib)
    cache = CacheConfig(gpu_memory_utilization=0.5)
    assert count_pages(cache, LAYOUT, torch.device("cuda")) == expected_gib * gib // LAYOUT.page_bytes
