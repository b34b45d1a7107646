from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.engine import CacheConfig, EngineConfig, SchedulerConfig, engine_config
from baton.config.loader import BYTE_UNITS, parse_bytes
from baton.errors import ConfigError


def test_a_nested_mapping_becomes_structs() -> None:
    settings = {
        "model": "llama",
        "dtype": "bfloat16",
        "cache": {"page_size": 64, "kv_cache_memory_bytes": "1.5GiB"},
        "scheduler": {"max_queue_delay_ms": 5, "preferred_batch_sizes": [8, 16]},
    }
    assert engine_config(settings) == EngineConfig(
        model="llama",
        dtype="bfloat16",
        cache=CacheConfig(page_size=64, kv_cache_memory_bytes=3 * 2**29),
        scheduler=SchedulerConfig(max_queue_delay_ms=5.0, preferred_batch_sizes=(8, 16)),
    )


def test_a_part_may_be_its_struct_and_is_checked_all_the_same() -> None:
    parts = {"cache": CacheConfig(page_size=64), "scheduler": SchedulerConfig(max_num_seqs=8)}
    assert engine_config({"model": "m", **parts}) == EngineConfig(model="m", **parts)  # type: ignore[arg-type]
    untyped: Any = CacheConfig(enable_prefix_caching="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cache.enable_prefix_caching: expected bool, got 'no'"):
        engine_config({"model": "m", "cache": untyped})
    with pytest.raises(ConfigError, match="cache: expected a mapping, got SchedulerConfig"):
        engine_config({"model": "m", "cache": SchedulerConfig()})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": "x"}, "unknown configuration key 'modle'; did you mean 'model'?"),
        (
            {"cache": {"pagesize": 1}},
            "unknown configuration key 'cache.pagesize'; did you mean 'cache.page_size'?",
        ),
        (
            {"scheduler": {"zzz": 1}},
            "unknown configuration key 'scheduler.zzz'; known keys are scheduler.max_num",
        ),
        ({"page_size": 1}, "unknown configuration key 'page_size'; did you mean 'cache.page_size'?"),
        ({"cache.page_size": 1}, "unknown configuration key 'cache.page_size'"),
        ({}, "model: expected a value, got none"),
    ],
)
def test_unknown_and_absent_keys(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config(settings)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 3}, "model: expected str, got 3 (int)"),
        ({"model": ""}, "model: expected a directory, got an empty string"),
        (
            {"dtype": "fp8"},
            "dtype: expected one of 'auto', 'float32', 'bfloat16', 'float16', got 'fp8' (str)",
        ),
        ({"cache": 3}, "cache: expected a mapping, got 3 (int)"),
        ({"cache": {"page_size": "16"}}, "cache.page_size: expected int, at least 1, got '16' (str)"),
        ({"cache": {"page_size": True}}, "cache.page_size: expected int, at least 1, got True (bool)"),
        ({"cache": {"page_size": 24}}, "cache.page_size: expected a power of two, got 24"),
        (
            {"cache": {"kv_cache_memory_bytes": "0B"}},
            "cache.kv_cache_memory_bytes: expected int, at least 1 | None, got 0 (int)",
        ),
        (
            {"cache": {"gpu_memory_utilization": float("nan")}},
            "cache.gpu_memory_utilization: expected float, more than 0, at most 1, got nan (float)",
        ),
        ({"max_model_len": 1}, "max_model_len: expected int, at least 2 | None, got 1 (int)"),
        (
            {"scheduler": {"max_num_seqs": 65537}},
            "scheduler.max_num_seqs: expected int, at least 1, at most 65536, got 65537 (int)",
        ),
        (
            {"scheduler": {"max_num_seqs": 8, "preferred_batch_sizes": [16]}},
            "scheduler.preferred_batch_sizes: expected at most 8 (max_num_seqs), got 16",
        ),
    ],
)
def test_wrong_values_are_answered_with_key_and_expectation(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config({"model": "x"} | settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 2**32), ("512 MiB", 2**29), ("1.5GB", 1_500_000_000), ("4096", 4096), ("0B", 0)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 gib", "-1GiB", "1e3", "4GiB extra", "1..5GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size such as"):
        parse_bytes(text)


def test_a_bad_size_names_its_key() -> None:
    with pytest.raises(ConfigError, match="^cache.host_cache_memory_bytes: expected a size"):
        engine_config({"model": "x", "cache": {"host_cache_memory_bytes": "much"}})


@given(count=st.integers(0, 2**60), unit=st.sampled_from(sorted(BYTE_UNITS)))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * BYTE_UNITS[unit]
