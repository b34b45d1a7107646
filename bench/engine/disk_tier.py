"""The disk tier of KV pages: its read rate beside the file system's, and a prefix after a restart.

    OMP_NUM_THREADS=2 baton bench disk_tier [--rounds 5] [--folder FOLDER]

The tier reads pages of models of 56 M and of 8 G parameters, in turns with plain reads of a file of as many
bytes; the system's cache of the files is dropped before each. Then an engine computes a prompt and closes;
the next one starts, finds the pages on disk, and answers a question about them. The same engines recompute
prompts of as many tokens.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Final, NamedTuple

import numpy as np
import torch

from baton.bench.engine.replica import LLAMA_3M, greedy, load_replica, random_tokens
from baton.bench.report import Report, Row, at_least, at_most, option, suite
from baton.engine.cache.disk_tier import DiskTier, HostPages, Loaded, open_store
from baton.engine.engine import Engine
from baton.kernels.native import huge_zeros

PAGE_BYTES: Final = {"128 KiB": 2**17, "2 MiB": 2**21}  # of 16 tokens: 56 M parameters, 8 G parameters
READ_BYTES: Final = 2**29
PIECE_BYTES: Final = 4 * 2**20  # of a plain read
LEAST_SHARE: Final = 0.8
MOST_TTFT_SHARE: Final = 0.3
SHAPE: Final = replace(LLAMA_3M, max_positions=8192)
PREFIX_TOKENS: Final = 4096
QUESTION_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
POLL_S: Final = 0.0002


def drop_cached(folder: Path) -> None:
    """Have the system forget the contents of the files that it keeps in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def plain_rate(path: Path, memory: HostPages) -> float:
    """Return the bytes a second at which one thread reads a file from its start to its end."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    flat, num_read = memory.reshape(-1), 0
    began_s = perf_counter()
    while got := os.preadv(fd, [flat[num_read : num_read + PIECE_BYTES].data], num_read):
        num_read += got
    lasted_s = perf_counter() - began_s
    os.close(fd)
    return num_read / lasted_s


@contextmanager
def open_tier(folder: Path, host: HostPages) -> Iterator[DiskTier]:
    """Open the tier in the folder, over host pages that no step uses."""
    store = open_store(folder, b"bench", host.shape[1], 2 * READ_BYTES)
    tier = DiskTier(store, [host], lambda _: True, lambda *_: True)
    try:
        yield tier
    finally:
        tier.close()


def key_of(page: int) -> bytes:
    """Return the key of a page."""
    return page.to_bytes(16, "little")


def tier_rate(folder: Path, host: HostPages) -> float:
    """Return the bytes a second at which a tier that has just started reads all its pages."""
    with open_tier(folder, host) as tier:
        drop_cached(folder)
        began_s, num_loaded = perf_counter(), 0
        tier.load(((key_of(page), page) for page in range(len(host))), 0)
        while num_loaded < len(host):
            loaded = [report for report in tier.take_reports() if isinstance(report, Loaded)]
            assert all(report.is_valid for report in loaded), "a page was damaged"
            num_loaded += len(loaded)
            sleep(POLL_S)
        return host.nbytes / (perf_counter() - began_s)


def read_rows(name: str, folder: Path, num_rounds: int, report: Report) -> list[Row]:
    """Read the same bytes by the tier and plainly, in turns."""
    content = np.frombuffer(np.random.default_rng(1).bytes(READ_BYTES), np.uint8)
    # As the host pages of an engine. Direct reads into huge pages need an eighth of the orders to the disk.
    host = huge_zeros((READ_BYTES // PAGE_BYTES[name], PAGE_BYTES[name]), torch.uint8).numpy()
    host[:] = content.reshape(host.shape)
    with open_tier(folder / "tier", host) as tier:
        tier.stop()
        tier.put(((key_of(page), page) for page in range(len(host))), float("inf"))
    (folder / "plain").write_bytes(content.data)

    def checked(read: Callable[[], float]) -> float:
        host.fill(0)
        drop_cached(folder)
        rate = read()
        assert (host.reshape(-1) == content).all(), "other bytes came"
        return rate / 1e9

    reads: dict[str, Callable[[], float]] = {
        "plain": partial(plain_rate, folder / "plain", host),
        "tier": partial(tier_rate, folder / "tier", host),
    }
    subjects = {kind: partial(checked, read) for kind, read in reads.items()}
    rates = report.in_rounds(subjects, num_rounds, f"pages of {name}, ")
    plain, tier_s = (median(rates[kind]) for kind in reads)
    return [
        Row(f"pages of {name}: a plain file", plain, "GB/s", note="read in order, pieces of 4 MiB"),
        Row(f"pages of {name}: the tier", tier_s, "GB/s", note="read, checked, in host memory"),
        at_least(f"pages of {name}: the tier / a plain file", tier_s / plain, "x", LEAST_SHARE),
    ]


class Answer(NamedTuple):
    """The answer to one prompt on an idle engine."""

    ttft_s: float
    token_ids: tuple[int | None, ...]
    num_cached_tokens: int


def ask(engine: Engine, prompt: list[int]) -> Answer:
    """Have an idle engine answer a prompt."""
    began_s, ttft_s, outputs = perf_counter(), 0.0, []
    engine.add(greedy(prompt, ANSWER_TOKENS))
    while engine.has_work():
        outputs += engine.step()
        ttft_s = ttft_s or (perf_counter() - began_s if outputs else 0.0)
    return Answer(ttft_s, tuple(each.token_id for each in outputs), outputs[-1].num_cached_tokens)


def load_engine(folder: Path) -> Engine:
    """Load an engine with a disk tier in the folder."""
    cache = {
        "kv_cache_memory_bytes": 2**28,
        "host_cache_memory_bytes": 2**28,
        "kv_disk_path": str(folder),
        "kv_disk_bytes": 2**30,
    }
    return load_replica(SHAPE, {"device": "cpu", "cache": cache})


def restart_rows(folder: Path, num_rounds: int, report: Report) -> list[Row]:
    """Ask about a prefix that is on disk alone, and about one that is nowhere, after each start."""
    tokens = partial(random_tokens, SHAPE, Random(2))
    found, computed, num_different = list[Answer](), list[Answer](), 0
    engine = load_engine(folder)
    for number in range(num_rounds):
        report.tell(f"a restart, round {number + 1} of {num_rounds}")
        prefix, question = tokens(PREFIX_TOKENS), tokens(QUESTION_TOKENS)
        ask(engine, tokens(QUESTION_TOKENS))  # the first step of an engine is slow
        computed.append(ask(engine, prefix + question))
        engine.close()
        drop_cached(folder)
        engine = load_engine(folder)
        ask(engine, tokens(QUESTION_TOKENS))
        found.append(ask(engine, prefix + question))
        num_different += found[-1].token_ids != computed[-1].token_ids
    engine.close()
    with_s, without_s = (median(each.ttft_s for each in answers) for answers in (found, computed))
    num_found = min(each.num_cached_tokens for each in found)
    return [
        Row("restart: TTFT p50 from disk", 1e3 * with_s, "ms", note=f"{PREFIX_TOKENS} tokens and a question"),
        Row("restart: TTFT p50 recomputed", 1e3 * without_s, "ms"),
        at_most("restart: from disk / recomputed", with_s / without_s, "x", MOST_TTFT_SHARE),
        at_least("restart: tokens from disk, least", num_found, "tokens", PREFIX_TOKENS),
        at_most("restart: answers that differ", num_different, "", 0),
    ]


@suite(
    "disk_tier",
    "The disk tier of KV pages",
    option("--rounds", 5),
    option("--folder", tempfile.gettempdir(), "on the file system to measure"),
)
def measure(options: Namespace, report: Report) -> None:
    """Read pages, then start engines again. OSError: the folder cannot be used."""
    for name in PAGE_BYTES:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report.rows += read_rows(name, Path(folder), options.rounds, report)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report.rows += restart_rows(Path(folder), options.rounds, report)
