"""Prefixes that a new engine finds on the disk of the one before."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

from baton.engine.cache.disk_tier import DiskStore
from baton.engine.engine import BAD_LOGITS, Engine
from baton.messages.workers import Tier
from baton.request import StepOutput
from tests.tiny_models import (
    VOCAB_SIZE,
    add,
    generate,
    run_to_end,
    tiny_engine,
    token_ids,
    write_config,
)

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

PAGE_BYTES: Final = 4 * 512
PROMPT: Final = [(5 * i + i * i) % VOCAB_SIZE for i in range(49)]
OTHERS: Final = [[(7 * i + i * i + n) % VOCAB_SIZE for i in range(80)] for n in range(6)]


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes about as fast as a busy machine reads."""
    monkeypatch.setattr("baton.engine.cache.disk_tier.DiskTier.pays", lambda *_: True)


TWO_STAGES: Final[dict[str, Any]] = {"pipeline_parallel_size": 2}


def engine_in(
    root: Path, *, num_host_pages: int = 24, ranks: Mapping[str, Any] = {}, **settings: Any
) -> Engine:
    """Return an engine with 24 pages."""
    part_bytes = PAGE_BYTES // prod(ranks.values())
    cache = {
        "kv_cache_memory_bytes": 24 * part_bytes,
        "host_cache_memory_bytes": num_host_pages * part_bytes,
        "kv_disk_path": str(root / "kv"),
        "kv_disk_bytes": 2**22,
    }
    return tiny_engine(root / "model", cache={**cache, **settings}, **ranks)


def num_cached(outputs: list[StepOutput]) -> int:
    return outputs[-1].num_cached_tokens


def computed_before(root: Path, ranks: Mapping[str, Any] = {}, **settings: Any) -> list[int | None]:
    """Return the tokens of PROMPT, of an engine that has ended and left the pages on the disk."""
    engine = engine_in(root, ranks=ranks, **settings)
    outputs = generate(engine, PROMPT)
    engine.close()
    assert num_cached(outputs) == 0
    return token_ids(outputs)


def read_of(engine: Engine) -> int:
    return engine.load().counters["disk_pages_read"]


def fail_a_step(engine: Engine) -> None:
    """Lose the requests of the engine in a step that raises TypeError."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(engine.runner, "execute", None)
        add(engine, "lost", OTHERS[-1])
        run_to_end(engine)
    engine.scheduler.check_integrity()


def test_engine_that_starts_again_continues_from_the_disk_with_the_same_tokens(tmp_path: Path) -> None:
    expected = computed_before(tmp_path)
    second = engine_in(tmp_path)
    told = second.take_page_changes().keys[Tier.DISK]
    assert set(told).issuperset(second.page_keys(PROMPT[:48], b"", 4))
    again = generate(second, PROMPT)
    assert token_ids(again) == expected
    assert num_cached(again) == 48 and read_of(second) == 12
    second.scheduler.check_integrity()
    second.close()


def test_disk_that_is_smaller_than_the_pool_keeps_the_starts_of_prompts(tmp_path: Path) -> None:
    num_bytes = 4096 + 8 * (4096 + 56)  # eight pages
    expected = computed_before(tmp_path, kv_disk_bytes=num_bytes)
    second = engine_in(tmp_path, kv_disk_bytes=num_bytes)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 32
    second.close()


@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 2},
        TWO_STAGES,
        {"tensor_parallel_size": 2, **TWO_STAGES},
    ],
    ids=str,
)
def test_replica_of_several_ranks_has_its_prefixes_again(ranks: Mapping[str, int], tmp_path: Path) -> None:
    expected = computed_before(tmp_path)
    first = engine_in(tmp_path, ranks=ranks)
    assert not num_cached(generate(first, PROMPT))  # pages of one rank are no pages of several
    first.close()
    second = engine_in(tmp_path, ranks=ranks)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 48 and read_of(second) == 12
    second.scheduler.cache.make_room(24)
    for prompt in OTHERS[:2]:
        generate(second, prompt)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again)
    second.scheduler.check_integrity()
    second.close()


def test_stages_of_unequal_size_keep_their_parts_of_a_page(tmp_path: Path) -> None:
    """At the end, and before requests, steps of copies alone go through all stages."""
    write_config(tmp_path / "model", num_hidden_layers=4)
    sizes: dict[str, Any] = dict.fromkeys(
        ("kv_cache_memory_bytes", "host_cache_memory_bytes"), 24 * 2 * PAGE_BYTES
    )
    expected, ranks = computed_before(tmp_path, **sizes), {"pipeline_parallel_size": 3}
    first = engine_in(tmp_path, ranks=ranks, **sizes)
    assert sorted(first.runner.layout.stage_layers) == [1, 1, 2] and not num_cached(generate(first, PROMPT))
    first.close()
    second = engine_in(tmp_path, ranks=ranks, **sizes)
    keys = second.page_keys(PROMPT[:48], b"", 4)
    is_coming = second.load_pages(keys)
    while is_coming is not None and is_coming():
        pass
    pages = second.pin(keys, "a peer")  # copies them from the host to the device
    assert pages is not None and read_of(second) == 12
    second.pages.release(pages, "a peer")
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 48
    second.scheduler.check_integrity()
    second.close()


def test_page_is_written_once_every_stage_has_copied_it_to_the_host(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    first = engine_in(tmp_path, ranks=TWO_STAGES)
    (stage,) = set(psutil.Process().children(recursive=True)) - set(before)
    expected = token_ids(generate(first, PROMPT))
    first.scheduler.cache.make_room(24)  # the next step copies all pages to the host
    add(first, "next", OTHERS[0])
    stage.suspend()
    assert first.step() == []
    first.take_page_changes()  # offers the pages to the disk tier
    threading.Event().wait(0.05)
    num_written = first.load().counters["disk_pages_written"]
    stage.resume()
    assert num_written == 0
    run_to_end(first)
    first.close()
    second = engine_in(tmp_path, ranks=TWO_STAGES)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 48
    second.close()


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, TWO_STAGES], ids=str)
def test_stopped_rank_delays_the_close_by_no_more_than_the_flush(
    ranks: Mapping[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.engine.FLUSH_S", 0.5)
    before = psutil.Process().children(recursive=True)
    engine = engine_in(tmp_path, ranks=ranks)
    (rank,) = set(psutil.Process().children(recursive=True)) - set(before)
    generate(engine, PROMPT)
    rank.suspend()
    began_s = time.monotonic()
    engine.close()
    assert 0.5 <= time.monotonic() - began_s < 8.0
    assert not rank.is_running()


def test_pages_of_another_layout_are_not_read(tmp_path: Path) -> None:
    """The parts of two stages are as large as those of two tensor-parallel ranks."""
    expected = computed_before(tmp_path, TWO_STAGES)
    split = engine_in(tmp_path, ranks={"tensor_parallel_size": 2})
    again = generate(split, PROMPT)
    assert token_ids(again) == expected and not num_cached(again)
    split.close()


def test_page_with_a_damaged_part_of_the_second_stage_is_computed_again(tmp_path: Path) -> None:
    expected = computed_before(tmp_path, TWO_STAGES)
    for path in (tmp_path / "kv").glob("*/pages.kv"):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 4096):
            content[at + PAGE_BYTES // 2] ^= 1
        path.write_bytes(content)
    second = engine_in(tmp_path, ranks=TWO_STAGES)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and not num_cached(again)
    assert second.load().counters["disk_pages_damaged"] == 12
    second.scheduler.check_integrity()
    second.close()


def test_page_that_ends_before_the_second_stage_is_computed_again(tmp_path: Path) -> None:
    expected = computed_before(tmp_path, TWO_STAGES)
    (path,) = (tmp_path / "kv").glob("*/pages.kv")
    num_later = (48 + len(expected)) // 4 - 12  # pages with tokens of the answer
    os.truncate(path, path.stat().st_size - num_later * 4096 - PAGE_BYTES // 2)
    second = engine_in(tmp_path, ranks=TWO_STAGES)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 44
    assert second.load().counters["disk_pages_damaged"] == 1
    second.scheduler.check_integrity()
    second.close()


def test_damaged_page_costs_a_recompute_and_no_token(tmp_path: Path) -> None:
    expected = computed_before(tmp_path)
    for path in (tmp_path / "kv").glob("*/pages.kv"):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 4096):
            content[at] ^= 1
        path.write_bytes(content)
    second = engine_in(tmp_path)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and not num_cached(again)
    assert second.load().counters["disk_pages_damaged"]
    second.scheduler.check_integrity()
    second.close()


@pytest.mark.parametrize("ranks", [{}, TWO_STAGES], ids=str)
def test_pages_that_left_the_host_come_back_from_the_disk(ranks: Mapping[str, int], tmp_path: Path) -> None:
    engine = engine_in(tmp_path, ranks=ranks)
    expected = token_ids(generate(engine, PROMPT))
    host, disk = engine.scheduler.cache.host, engine.scheduler.cache.host.disk
    assert disk is not None
    keys = engine.page_keys(PROMPT[:48], b"", 4)
    engine.scheduler.cache.make_room(24)  # the next step copies all pages to the host
    for prompt in OTHERS:
        generate(engine, prompt)
        while not disk.keys >= set(keys):  # all are in the host tier until the disk has them
            engine.take_page_changes()
    assert not any(key in host for key in keys)
    again = generate(engine, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 48
    engine.scheduler.check_integrity()
    engine.close()


def test_host_keeps_pages_that_are_nowhere_else_before_pages_with_a_copy_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_in(tmp_path)
    host, disk = engine.scheduler.cache.host, engine.scheduler.cache.host.disk
    assert disk is not None
    with monkeypatch.context() as patched:
        patched.setattr(disk, "write", lambda *_: None)
        generate(engine, OTHERS[0][:20])
        engine.scheduler.cache.make_room(24)
        generate(engine, PROMPT)
    nowhere_else = engine.page_keys(OTHERS[0][:20], b"", 4)
    assert all(key in host for key in nowhere_else)
    engine.scheduler.cache.make_room(24)
    generate(engine, OTHERS[1][:40])
    keys = engine.page_keys(PROMPT[:48], b"", 4)
    while not disk.keys >= set(keys):
        engine.take_page_changes()
    disk.page_s = 0.0
    engine.scheduler.cache.make_room(24)
    generate(engine, OTHERS[2][:40])
    assert all(key in host for key in nowhere_else) and not all(key in host for key in keys)
    engine.scheduler.check_integrity()
    engine.close()


def test_aborted_and_lost_sequences_leave_no_host_page_behind(tmp_path: Path) -> None:
    computed_before(tmp_path)
    second = engine_in(tmp_path)
    add(second, "gone", PROMPT)
    second.abort("gone")
    second.scheduler.check_integrity()
    add(second, "held", PROMPT)
    fail_a_step(second)
    again = generate(second, PROMPT)
    assert num_cached(again) == 48
    second.scheduler.check_integrity()
    second.close()


@pytest.mark.parametrize("is_idle", [True, False])
def test_pages_with_kv_that_is_no_number_leave_the_host_and_the_disk(tmp_path: Path, is_idle: bool) -> None:
    engine = engine_in(tmp_path, num_host_pages=64)
    expected = token_ids(generate(engine, PROMPT))
    keys = engine.page_keys(PROMPT[:4], b"", 4)
    pages = engine.pin(keys, "the fault")
    assert pages is not None
    with torch.inference_mode():
        engine.runner.pool.device[pages] = float("nan")
    engine.pages.release(pages, "the fault")
    engine.scheduler.cache.make_room(24)  # the next step copies all pages to the host
    host, disk = engine.scheduler.cache.host, engine.scheduler.cache.host.disk
    assert disk is not None
    generate(engine, OTHERS[0])
    while is_idle and not disk.keys >= set(keys):
        engine.take_page_changes()
    failed = generate(engine, PROMPT)
    assert (num_cached(failed), failed[-1].error) == (48, BAD_LOGITS)
    assert not host.known_keys() and not disk.keys
    engine.scheduler.check_integrity()
    again = generate(engine, PROMPT)
    assert token_ids(again) == expected and not num_cached(again)
    engine.close()
    second = engine_in(tmp_path, num_host_pages=64)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and num_cached(again) == 48
    second.close()


def test_disk_that_hangs_costs_a_recompute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed_before(tmp_path)
    goes_on, read = threading.Event(), DiskStore.read

    def hang(store: DiskStore, pages: Any) -> Iterator[tuple[bytes, bool]]:
        goes_on.wait(60)
        yield from read(store, pages)

    monkeypatch.setattr(DiskStore, "read", hang)
    monkeypatch.setattr("baton.engine.engine.MAX_LOAD_S", 0.05)
    monkeypatch.setattr("baton.engine.cache.disk_tier.STOP_S", 0.05)
    second = engine_in(tmp_path)
    again = generate(second, PROMPT)
    assert token_ids(again) == expected and not num_cached(again)
    second.scheduler.check_integrity()
    monkeypatch.setattr("baton.engine.engine.MAX_LOAD_S", 1000.0)
    second.scheduler.cache.make_room(24, keep=False)  # the device forgets, and the host has none
    again = generate(second, PROMPT)  # does not wait again
    assert token_ids(again) == expected and not num_cached(again)
    second.close()
    goes_on.set()


def test_pages_that_a_hung_disk_may_still_write_are_not_used_after_a_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed_before(tmp_path)
    without_disk = tiny_engine(tmp_path / "model")
    expected = token_ids(generate(without_disk, OTHERS[0]))
    without_disk.close()
    hangs, goes_on, has_read, preadv = threading.Event(), threading.Event(), threading.Event(), os.preadv

    def hang(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        hangs.set()
        goes_on.wait(60)
        num_read = preadv(fd, buffers, offset, flags)
        has_read.set()
        return num_read

    second = engine_in(tmp_path)
    monkeypatch.setattr(os, "preadv", hang)
    monkeypatch.setattr("baton.engine.cache.disk_tier.STOP_S", 0.05)
    add(second, "held", PROMPT)
    assert hangs.wait(60)
    for _ in range(2):
        fail_a_step(second)
    assert token_ids(generate(second, OTHERS[0])) == expected
    second.scheduler.cache.make_room(24)  # the next step copies the pages to the host, if they may go there
    generate(second, OTHERS[1][:20])
    goes_on.set()
    assert has_read.wait(60)
    assert token_ids(generate(second, OTHERS[0])) == expected
    second.scheduler.check_integrity()
    second.close()


def test_disk_that_cannot_be_opened_again_leaves_the_error_of_the_step_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = computed_before(tmp_path)
    second = engine_in(tmp_path)
    (tmp_path / "kv").rename(tmp_path / "moved")
    (tmp_path / "kv").touch()
    fail_a_step(second)
    assert "disk tier of KV pages is off" in caplog.text and second.scheduler.cache.host.disk is None
    assert token_ids(generate(second, PROMPT)) == expected
    second.close()


def test_peer_finds_the_pages_of_the_disk_on_the_host_after_they_were_loaded(tmp_path: Path) -> None:
    computed_before(tmp_path)
    second = engine_in(tmp_path)
    keys = second.page_keys(PROMPT[:48], b"", 4)
    assert second.pin(keys, "a peer") is None
    is_coming, pause = second.load_pages(keys), threading.Event()
    assert is_coming is not None
    while is_coming():
        pause.wait(0.001)
    assert second.load_pages(keys) is None
    pages = second.pin(keys, "a peer")
    assert pages is not None and len(set(pages)) == 12
    second.pages.release(pages, "a peer")
    second.scheduler.check_integrity()
    tier_ns = second.load().tier_token_ns
    assert 0 < tier_ns[Tier.HOST] < tier_ns[Tier.DISK]
    second.close()


def test_salts_do_not_share_pages_on_disk(tmp_path: Path) -> None:
    computed_before(tmp_path)
    second = engine_in(tmp_path)
    told = second.take_page_changes().keys[Tier.DISK]
    assert set(second.page_keys(PROMPT, b"another tenant", 4)).isdisjoint(told)
    second.close()


def test_pages_that_short_longrope_factors_rotated_are_unknown_to_an_engine_with_long_ones(
    tmp_path: Path,
) -> None:
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [16.0] * 8}
    keys = {"original_max_position_embeddings": 32, "rope_scaling": longrope}
    directory = write_config(tmp_path / "model", architectures=["Phi3ForCausalLM"], **keys)
    prompt, disk = PROMPT[:21], {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 2**22}
    cache = {"host_cache_memory_bytes": 2**16, **disk}
    without_disk = tiny_engine(directory)
    expected = token_ids(generate(without_disk, prompt))
    without_disk.close()
    short = tiny_engine(directory, cache=cache, max_model_len=32)
    assert token_ids(generate(short, prompt)) != expected
    short.close()
    for num_cached_tokens in (0, 20):
        long = tiny_engine(directory, cache=cache)
        outputs = generate(long, prompt)
        long.close()
        assert token_ids(outputs) == expected and num_cached(outputs) == num_cached_tokens
