"""Pages on disk against a dictionary, over restarts, damage, kills and errors of the file system."""

import errno
import multiprocessing
import os
import random
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.cache.disk_tier import DiskStore, DiskTier, HostPages, Loaded, PageParts, open_store
from baton.engine.cache.prefix_cache import HostTier
from baton.errors import ConfigError

PAGE_BYTES: Final = 5000
FIRST_BYTES: Final = 2000  # of the first of two ranks
MAX_BYTES: Final = 4096 + 12 * (8192 + 56)  # twelve pages
KEYS: Final = [bytes([number]) * 16 for number in range(24)]


def page_of(key: bytes, version: int = 0) -> HostPages:
    return np.frombuffer(random.Random(f"{key.hex()} {version}").randbytes(PAGE_BYTES), np.uint8)


def parts_of(page: HostPages) -> PageParts:
    """The parts of two ranks."""
    return [page[:FIRST_BYTES], page[FIRST_BYTES:]]


def store_in(root: Path, identity: bytes = b"a model", max_bytes: int = MAX_BYTES) -> DiskStore:
    return open_store(root, identity, PAGE_BYTES, max_bytes)


def read(store: DiskStore, key: bytes) -> bytes | None:
    return read_all(store, [key])[key]


def read_all(store: DiskStore, keys: list[bytes]) -> dict[bytes, bytes | None]:
    pages = {key: np.empty(PAGE_BYTES, np.uint8) for key in keys}
    parts = {key: parts_of(page) for key, page in pages.items()}
    return {key: pages[key].tobytes() if is_valid else None for key, is_valid in store.read(parts)}


def files(root: Path) -> list[Path]:
    """The index and the pages of the only store."""
    return [next(root.glob(f"*/{name}.kv")) for name in ("index", "pages")]


class StoreAgainstDictionary(RuleBasedStateMachine):
    """A store may forget pages that were damaged, and nothing else; what it returns is what was put."""

    def __init__(self) -> None:
        super().__init__()
        self.root = TemporaryDirectory()
        self.store = store_in(Path(self.root.name))
        self.pages: dict[bytes, bytes] = {}  # the least recently used first
        self.is_damaged = False

    def teardown(self) -> None:
        self.store.close()
        self.root.cleanup()

    @rule(key=st.sampled_from(KEYS), version=st.integers(0, 2))
    def put(self, key: bytes, version: int) -> None:
        is_new = key not in self.store
        page = page_of(key, version)
        for dropped in self.store.put(key, parts_of(page)):
            assert dropped == next(iter(self.pages))
            del self.pages[dropped]
        if is_new:
            self.pages[key] = page.tobytes()

    @rule(key=st.sampled_from(KEYS))
    def read(self, key: bytes) -> None:
        found = read(self.store, key)
        if found is None and self.is_damaged:
            self.pages.pop(key, None)
        assert found == self.pages.get(key)

    @rule(chain=st.lists(st.sampled_from(KEYS), unique=True))
    def touch(self, chain: list[bytes]) -> None:
        assert self.store.touch(chain) == [key for key in chain if key not in self.pages]
        for key in reversed(chain):
            if key in self.pages:
                self.pages[key] = self.pages.pop(key)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = store_in(Path(self.root.name))
        if self.is_damaged:
            self.pages = {key: page for key, page in self.pages.items() if key in self.store}

    @precondition(lambda self: self.pages)
    @rule(place=st.integers(0, 2**20), bit=st.integers(0, 7), cuts=st.booleans(), data=st.data())
    def damage(self, place: int, bit: int, cuts: bool, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files(Path(self.root.name))))
        content = bytearray(path.read_bytes())
        if content:
            content[place % len(content)] ^= 1 << bit
            with path.open("r+b") as file:
                file.write(content)
                file.truncate(place % len(content) if cuts else len(content))
        self.is_damaged = True

    @invariant()
    def holds_the_same_pages(self) -> None:
        assert list(self.store) == [*self.pages]
        if not self.is_damaged:
            assert read_all(self.store, [*self.pages]) == self.pages
        assert sum(path.stat().st_size for path in files(Path(self.root.name))) <= MAX_BYTES


TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
TestStoreAgainstDictionary.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_pages_of_another_identity_or_size_are_not_accepted(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(KEYS[0], parts_of(page_of(KEYS[0])))
    store.close()
    (directory,) = tmp_path.iterdir()
    for identity, page_bytes in ((b"another", PAGE_BYTES), (b"a model", PAGE_BYTES - 1)):
        (tmp_path / f"copy-{page_bytes}-{identity.hex()}").mkdir()
        copied = tmp_path / f"copy-{page_bytes}-{identity.hex()}"
        for path in directory.glob("*.kv"):
            (copied / path.name).write_bytes(path.read_bytes())
        other = DiskStore(copied, identity, page_bytes, MAX_BYTES)
        assert KEYS[0] not in other
        other.close()


def test_files_are_the_owners_alone_and_two_processes_have_two_directories(tmp_path: Path) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    first.put(KEYS[0], parts_of(page_of(KEYS[0])))
    assert KEYS[0] not in second and len(list(tmp_path.iterdir())) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/*")} == {0o600}
    first.close()
    second.close()


def test_directory_that_cannot_be_used_and_too_small_a_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="kv_disk_path: .* cannot be used"):
        store_in(tmp_path / "a file")
    with pytest.raises(ConfigError, match="kv_disk_bytes: pages of 5,000 bytes need"):
        store_in(tmp_path, max_bytes=8192)


def test_adjacent_pages_are_read_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads, preadv = store_in(tmp_path), list[int](), os.preadv

    def count(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        num_read = preadv(fd, buffers, offset, flags)  # may raise: nothing is cached, memory is unaligned
        reads.append(sum(buffer.nbytes for buffer in buffers))
        return num_read

    for key in KEYS[:8]:
        store.put(key, parts_of(page_of(key)))
    monkeypatch.setattr(os, "preadv", count)
    asked = [KEYS[each] for each in (7, 0, 20, 5, 1, 3, 4)]
    found = read_all(store, asked)
    assert found == {key: None if key == KEYS[20] else page_of(key).tobytes() for key in asked}
    assert sorted(reads) == [PAGE_BYTES, 8192 + PAGE_BYTES, 2 * 8192 + PAGE_BYTES]
    store.close()


def test_failed_read_raises_once_no_other_read_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages may be used for something else from then on."""
    store, preadv = store_in(tmp_path), os.preadv
    slow_begins, fails, ended = threading.Event(), threading.Event(), list[int]()
    for key in KEYS[:8]:
        store.put(key, parts_of(page_of(key)))

    def fail_or_wait(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if sum(buffer.nbytes for buffer in buffers) == PAGE_BYTES:
            slow_begins.wait()
            fails.set()
            raise OSError(errno.EIO, "the disk is broken")
        slow_begins.set()
        fails.wait()
        threading.Event().wait(0.05)
        num_read = preadv(fd, buffers, offset, flags)
        ended.append(num_read)
        return num_read

    monkeypatch.setattr(os, "preadv", fail_or_wait)
    with pytest.raises(OSError, match="the disk is broken"):
        read_all(store, [KEYS[each] for each in (0, 1, 4)])
    assert ended == [8192 + PAGE_BYTES]
    store.close()


def test_thread_that_cannot_start_leaves_no_read_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, preadv, start = store_in(tmp_path), os.preadv, threading.Thread.start
    begun, num_under_way = threading.Event(), 0
    for key in KEYS[:8]:
        store.put(key, parts_of(page_of(key)))

    def slow(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        nonlocal num_under_way
        num_under_way += 1
        begun.set()
        threading.Event().wait(0.05)
        num_under_way -= 1
        return preadv(fd, buffers, offset, flags)

    def start_one(thread: threading.Thread) -> None:
        if begun.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)
        begun.wait()

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        read_all(store, KEYS[:8:2])  # a read each
    assert not num_under_way
    store.close()


def test_later_of_two_entries_with_one_key_counts(tmp_path: Path) -> None:
    """As after a loss of power, when the file system has not kept that an entry was emptied."""
    store, key = store_in(tmp_path), KEYS[0]
    store.put(key, parts_of(page_of(key)))
    index, pages = files(tmp_path)
    old_entry = index.read_bytes()[4096 : 4096 + 56]
    with pages.open("r+b") as file:
        file.write(b"damage")
    assert read(store, key) is None
    for each in KEYS[1], key:
        store.put(each, parts_of(page_of(each)))
    store.close()
    content = index.read_bytes()
    index.write_bytes(content[:4096] + old_entry + content[4096 + 56 :])
    store = store_in(tmp_path)
    assert read(store, key) == page_of(key).tobytes() and KEYS[1] not in store
    store.close()


@pytest.mark.parametrize("num_pages", [3, 20])
def test_store_of_another_size_has_the_pages_that_fit(tmp_path: Path, num_pages: int) -> None:
    store = store_in(tmp_path)
    for key in KEYS[:8]:
        store.put(key, parts_of(page_of(key)))
    store.close()
    store = store_in(tmp_path, max_bytes=4096 + num_pages * (8192 + 56))
    kept = KEYS[: min(8, num_pages)]
    assert read_all(store, KEYS[:8]) == {
        key: page_of(key).tobytes() if key in kept else None for key in KEYS[:8]
    }
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4096 + num_pages * (8192 + 56)
    store.close()


def _write_without_end(root: Path) -> None:
    store = store_in(root, max_bytes=2**22)
    while True:
        for key in (number.to_bytes(16, "little") for number in range(2000)):
            store.put(key, parts_of(page_of(key)))


def test_killed_writer_leaves_only_whole_pages(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write_without_end, args=(tmp_path,), daemon=True)
    writer.start()
    deadline = threading.Event()
    while not any(path.stat().st_size > 40 * PAGE_BYTES for path in tmp_path.glob("*/pages.kv")):
        assert writer.is_alive()
        deadline.wait(0.01)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    store = store_in(tmp_path, max_bytes=2**22)
    keys = list(store)
    assert keys and all(read(store, key) == page_of(key).tobytes() for key in keys)
    assert not store.num_damaged
    store.close()


# The tier.


class Host:
    """Host pages, all current until `taken` says otherwise."""

    def __init__(self, root: Path) -> None:
        self.pages = np.zeros((8, PAGE_BYTES), np.uint8)
        self.taken: set[int] = set()
        self.passed = 10**9
        self.store = store_in(root)
        ranks = [self.pages[:, :FIRST_BYTES], self.pages[:, FIRST_BYTES:]]
        self.tier = DiskTier(
            self.store, ranks, lambda mark: mark <= self.passed, lambda page, _: page not in self.taken
        )

    def wait(self, *, loads: int = 0, writes: int = 0) -> list[Loaded]:
        loaded: list[Loaded] = []
        pause = threading.Event()
        while len(loaded) < loads or len(self.tier.keys) < writes:
            loaded += [report for report in self.tier.take_reports() if isinstance(report, Loaded)]
            pause.wait(0.002)
        return loaded


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.tier.close()


def test_page_of_a_step_that_runs_is_not_written_at_the_end(host: Host, tmp_path: Path) -> None:
    host.tier.write(KEYS[1], 1, 0, host.passed + 1)
    host.tier.write(KEYS[2], 2, 0, 0)
    host.tier.load([(KEYS[3], 3)], host.passed + 1)
    host.tier.close()
    store = store_in(tmp_path)
    assert KEYS[1] not in store
    store.close()


def test_page_that_was_taken_is_not_written(host: Host) -> None:
    host.taken.add(1)
    host.tier.write(KEYS[1], 1, 0, 0)
    host.tier.write(KEYS[2], 2, 0, 0)
    host.wait(writes=1)
    assert host.tier.keys == {KEYS[2]}


def test_full_store_drops_the_end_of_the_chain_that_was_read_least_recently(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.cache.disk_tier._BATCH_BYTES", 2 * PAGE_BYTES)  # less than a chain
    for key in KEYS[:12]:
        host.store.put(key, parts_of(page_of(key)))
    for chain in KEYS[:6], KEYS[6:12]:
        host.tier.load(zip(chain, range(6), strict=True), 0)
        assert all(report.is_valid for report in host.wait(loads=6))
    host.tier.stop()
    dropped = [gone for key in KEYS[12:20] for gone in host.store.put(key, parts_of(page_of(key)))]
    assert dropped == [*reversed(KEYS[:6]), KEYS[11], KEYS[10]]


def test_loaded_pages_are_reported_before_their_order_of_use_is_written(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    touches, goes_on, touch = threading.Event(), threading.Event(), host.store.touch

    def touch_late(chain: Sequence[bytes]) -> list[bytes]:
        touches.set()
        goes_on.wait(60)
        return touch(chain)

    monkeypatch.setattr(host.store, "touch", touch_late)
    for key in KEYS[:3]:
        host.store.put(key, parts_of(page_of(key)))
    host.tier.load(zip(KEYS[:3], range(3), strict=True), 0)
    assert touches.wait(60)
    reports = host.tier.take_reports()
    goes_on.set()
    assert sorted(report.key for report in reports) == sorted(KEYS[:3])


def test_load_takes_no_room_from_the_start_of_its_own_chain(host: Host) -> None:
    for key in KEYS[:6]:
        host.store.put(key, parts_of(page_of(key)))
    ledger = HostTier(len(host.pages))
    host.tier.keys.update(host.store)
    ledger.disk, ledger.compute_page_s = host.tier, 1.0
    for key in (*KEYS[:3], *KEYS[12:17]):  # the last five are nowhere else
        ledger.store(key, 0)
    ledger.load(KEYS[:6], b"", 0)
    assert all(key in ledger for key in KEYS[:3]) and all(ledger.is_loading([key]) for key in KEYS[3:6])
    ledger.check_integrity()


def test_disk_that_reads_slower_than_pages_are_computed_is_passed_by_for_a_while(host: Host) -> None:
    host.tier.page_s = 0.01
    assert host.tier.pays(0.02) and host.tier.page_s == 0.01
    num_passed = 0
    while not host.tier.pays(0.005):
        num_passed += 1
    assert 2 < num_passed < 20


def test_error_of_the_file_system_turns_the_tier_off(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.pages[1] = page_of(KEYS[1])
    host.tier.write(KEYS[1], 1, 0, 0)
    host.wait(writes=1)
    full = os.open("/dev/full", os.O_RDWR)
    for file in (host.store._index, host.store._pages):
        os.dup2(full, file)
    os.close(full)
    host.tier.write(KEYS[2], 2, 0, 0)
    while not host.tier.num_failed:
        threading.Event().wait(0.002)
    host.tier.load([(KEYS[1], 5)], 0)
    assert host.wait(loads=1) == [Loaded(KEYS[1], False)]
    while host.tier.keys:
        host.tier.take_reports()
    assert host.tier.num_failed == 1 and "disk tier of KV pages is off" in caplog.text
