"""Keeps KV pages in files, so that prefixes outlive host memory and the process.

The life of a page on disk:

1. A page that comes to the host tier is written later, by the thread of the disk tier. A page that leaves
   host memory before its turn is not written.
2. Pages on disk that continue a request's prefix are read back to the host tier while the request waits.
   They are read in the order of the file, with several reads at once; adjacent pages are one read. The step
   loop only gives orders and takes reports: it never waits for a disk.
3. A full store drops the page that was used least recently.
4. A process that starts claims the first free directory of its model, reads the index there, and has the
   pages again.

A file may be torn or damaged: a record with a wrong checksum is forgotten, and its page is computed again.
The checksum of a page is XXH3-128, which keeps up with a disk on one core; a damaged page passes once in
2^128. A checksum does not prove who wrote a page: no other user can write the files. An error of the file
system turns the tier off.
docs/decisions/0040 says why one thread keeps the pages of all ranks of a replica.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.errors import ConfigError

logger = logging.getLogger(__name__)

# The memory of one rank, [num_host_pages, page_bytes]: the bytes of a page are those of all ranks together.
HostPages: TypeAlias = NDArray[np.uint8]
PageParts: TypeAlias = Sequence[NDArray[np.uint8]]  # one page, the part of each rank

_BLOCK: Final = 4096  # data starts at multiples
_VERSION: Final = b"baton-kv-3"
_HEAD: Final = Struct("<10sxxxxxxQ32s")  # version, bytes of a page, checksum of both with the identity
_ENTRY: Final = Struct("<16s16sQ16s")  # key, checksum of the page, serial, checksum of the entry
_READ_BYTES: Final = 4 * 2**20  # of one read, at most
_READS_AT_ONCE: Final = 2  # the disk reads for one thread while the other thread checks
_BATCH_BYTES: Final = 64 * 2**20  # of the pages that are read together, sorted by their places
_POLL_S: Final = 0.001
STOP_S: Final = 5.0  # for the read or write that the thread is at
MAX_QUEUED_WRITES: Final = 4096  # later pages are not written
FIRST_BYTES_PER_S: Final = 1e9  # assumed speed of a disk before its reads have been measured
RECOVERY: Final = 0.9  # the measured time shrinks by it when a request computes pages instead of reading them
NEWEST_SHARE: Final = 0.25  # weight of the latest batch in the measured time
_MOST_BUFFERS: Final = 1024  # Linux takes no more in one read


class _Stored(NamedTuple):
    """A page of the file."""

    slot: int
    checksum: bytes
    key: bytes


class DiskStore:
    """Pages of equal size in the slots of a file, at most `max_bytes` with its index. Not thread-safe.

    A page has one part for each rank of a replica; a stored page has the parts of all ranks.
    The index has a head and an entry for each slot. A page is written in three steps: the entry of its slot
    is emptied, the page is written, the new entry is written. Entries have serials in the order of their
    use: the page with the least serial is dropped first, and of two entries with one key, which a loss of
    power can leave, the later one counts. Every checksum covers `identity` and the key, or the slot, so that
    no page of another model is accepted. Methods raise OSError as the file system does.
    """

    def __init__(self, directory: Path, identity: bytes, page_bytes: int, max_bytes: int) -> None:
        """identity: names model, element type and layout. ConfigError when max_bytes holds no page."""
        self.page_bytes = page_bytes
        self.num_damaged = 0  # pages that did not have the contents that were written
        self._identity = blake2b(identity, digest_size=32).digest()
        self._seed = int.from_bytes(self._identity[:8], "little")
        self._stride = -(-page_bytes // _BLOCK) * _BLOCK
        # A read puts the bytes between two pages here; aligned, as direct reads need it.
        self._gap = np.frombuffer(mmap(-1, _BLOCK), np.uint8)[: self._stride - page_bytes]
        self._can_be_direct = True  # until the system refuses
        slot_bytes = self._stride + _ENTRY.size
        self.num_places = (max_bytes - _BLOCK) // slot_bytes
        if self.num_places < 1:
            raise ConfigError(
                f"cache.kv_disk_bytes: pages of {page_bytes:,} bytes need {_BLOCK + slot_bytes:,}, "
                f"got {max_bytes:,}"
            )
        self._directory = directory
        # key -> (slot, checksum of the page), the least recently used first
        self._slots: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._free: list[int] = []
        self._files: list[int] = []
        try:
            fcntl.flock(self._open("lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._index, self._pages = self._open("index.kv"), self._open("pages.kv")
            self._direct_pages = self._open_direct()
            self._next_serial = self._read_index()
        except BaseException:
            self.close()
            raise

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[bytes]:
        """The keys of all pages that are here, the least recently used first."""
        return iter(self._slots)

    def put(self, key: bytes, page: PageParts) -> list[bytes]:
        """Write a page unless its key is here; return the keys that were dropped for it."""
        if key in self._slots:
            return []
        dropped: list[bytes] = []
        if not self._free:
            oldest, (slot, _) = self._slots.popitem(last=False)
            dropped.append(oldest)
            self._free.append(slot)
        slot, checksum = self._free.pop(), self._checksum(key, page)
        self._empty_entry(slot)
        _write(self._pages, [part.data for part in page], slot * self._stride)
        self._write_entry(key, slot, checksum)
        self._slots[key] = slot, checksum
        return dropped

    def touch(self, chain: Sequence[bytes]) -> list[bytes]:
        """Let these pages be dropped after all others, the last one first, also by the next process.

        Return the keys that are not here. chain: in its order, so that its start outlives its end.
        """
        for key in reversed(chain):
            if key in self._slots:
                self._slots.move_to_end(key)
                self._write_entry(key, *self._slots[key])
        return [key for key in chain if key not in self._slots]

    def read(self, pages: Mapping[bytes, PageParts]) -> Iterator[tuple[bytes, bool]]:
        """Read pages about in the order of the file; yield each key once its page was read, and True.

        False, with anything in the page, if the page on disk is absent or damaged; a damaged page is
        forgotten.
        Several reads are under way at once, because a disk that waits for the next order is idle. None is
        under way once the iterator has ended, been closed or raised an error: the pages may be used again.
        """
        runs = self._runs(pages)
        yield from ((key, False) for key in pages if key not in self._slots)
        waiting = deque(runs)
        results: SimpleQueue[dict[bytes, bool] | Exception] = SimpleQueue()

        def read_runs() -> None:
            with suppress(IndexError):  # no run is waiting
                while run := waiting.popleft():
                    try:
                        results.put(self._read_run(run, pages))
                    except Exception as error:
                        results.put(error)

        threads: list[threading.Thread] = []
        try:
            for _ in range(min(len(runs), _READS_AT_ONCE)):
                thread = threading.Thread(target=read_runs, daemon=True)
                thread.start()
                threads.append(thread)
            for _ in runs:
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                for key, is_valid in result.items():
                    if not is_valid:
                        self._forget(key)
                    yield key, is_valid
        finally:
            waiting.clear()
            for thread in threads:
                thread.join()

    def _runs(self, pages: Mapping[bytes, PageParts]) -> list[list[_Stored]]:
        """Return the pages that are here, in the order of the file; each list is one read."""
        num_buffers = 1 + max(map(len, pages.values()), default=0)  # of a page, with the gap behind it
        most = max(1, min(_READ_BYTES // self._stride, _MOST_BUFFERS // num_buffers))
        runs: list[list[_Stored]] = []
        last = -2
        for stored in sorted(_Stored(*self._slots[key], key) for key in pages if key in self._slots):
            if stored.slot == last + 1 and len(runs[-1]) < most:
                runs[-1].append(stored)
            else:
                runs.append([stored])
            last = stored.slot
        return runs

    def _read_run(self, run: Sequence[_Stored], pages: Mapping[bytes, PageParts]) -> dict[bytes, bool]:
        """Read adjacent pages with one call, and return whether each has its contents. Changes nothing."""
        buffers: list[memoryview] = []
        for stored in run:
            if buffers and len(self._gap):
                buffers.append(self._gap.data)
            buffers += [part.data for part in pages[stored.key]]
        num_read = self._read_buffers(buffers, run[0].slot * self._stride)
        num_whole = (num_read + len(self._gap)) // self._stride  # no gap follows the last page
        return {
            key: number < num_whole and self._checksum(key, pages[key]) == checksum
            for number, (_, checksum, key) in enumerate(run)
        }

    def _read_buffers(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read past the system's cache of files where that is possible.

        The disk then writes straight to the host pages. A copy out of the cache would take about as long as
        the disk, on a processor that the steps need. Direct reads need aligned memory and a file system that
        supports them.
        """
        if self._can_be_direct and self._direct_pages >= 0:
            try:
                return os.preadv(self._direct_pages, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._can_be_direct = False
        return os.preadv(self._pages, buffers, offset)

    def forget_all(self) -> list[bytes]:
        """Remove every page, also for the next process; return their keys."""
        keys = list(self._slots)
        os.ftruncate(self._index, _BLOCK)
        os.ftruncate(self._pages, 0)
        self._slots.clear()
        self._free = list(range(self.num_places - 1, -1, -1))
        return keys

    def _forget(self, key: bytes) -> None:
        """Remove a damaged page, also for the next process."""
        self.num_damaged += 1
        slot, _ = self._slots.pop(key)
        self._empty_entry(slot)
        self._free.append(slot)

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._slots.clear()
        while self._files:
            os.close(self._files.pop())

    def _hash(self, kind: bytes, about: bytes) -> bytes:
        return blake2b(about, digest_size=32, key=self._identity, person=b"baton-" + kind).digest()

    def _checksum(self, key: bytes, page: PageParts) -> bytes:
        found = xxhash.xxh3_128(key, self._seed)
        for part in page:
            found.update(part.data)
        return found.digest()

    def _check(self, slot: int, entry: bytes) -> bytes:
        return self._hash(b"entry", slot.to_bytes(8, "little") + entry)[:16]

    def _write_entry(self, key: bytes, slot: int, checksum: bytes) -> None:
        entry = _ENTRY.pack(key, checksum, self._next_serial, bytes(16))[:-16]
        _write(self._index, [entry + self._check(slot, entry)], _BLOCK + slot * _ENTRY.size)
        self._next_serial += 1

    def _empty_entry(self, slot: int) -> None:
        _write(self._index, [bytes(_ENTRY.size)], _BLOCK + slot * _ENTRY.size)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._files.append(os.open(self._directory / name, flags, 0o600))
        return self._files[-1]

    def _open_direct(self) -> int:
        """Open the pages once more, to be read past the system's cache of files; -1: that is not possible."""
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._files.append(os.open(self._directory / "pages.kv", flags))
        except OSError:
            return -1
        return self._files[-1]

    def _read_index(self) -> int:
        """Learn the pages that are here, and return the next serial. The store is emptied if its head names
        pages of another model, version or size.
        """
        about = _VERSION + self.page_bytes.to_bytes(8, "little")
        head = _HEAD.pack(_VERSION, self.page_bytes, self._hash(b"head", about))
        if os.pread(self._index, _HEAD.size, 0) != head:
            self.forget_all()
            _write(self._index, [head], 0)
            return 0
        # What lies beyond was written with a larger `max_bytes`.
        for file, most in (
            (self._index, _BLOCK + self.num_places * _ENTRY.size),
            (self._pages, self.num_places * self._stride),
        ):
            if os.fstat(file).st_size > most:
                os.ftruncate(file, most)
        index = os.pread(self._index, self.num_places * _ENTRY.size, _BLOCK)
        found = []
        for slot, (key, checksum, serial, check) in enumerate(
            _ENTRY.iter_unpack(index[: len(index) // _ENTRY.size * _ENTRY.size])
        ):
            if check == self._check(slot, index[slot * _ENTRY.size : (slot + 1) * _ENTRY.size - 16]):
                found.append((serial, key, slot, checksum))
        found.sort()
        for _, key, slot, checksum in found:
            self._slots.pop(key, None)  # also as the least recently used
            self._slots[key] = slot, checksum
        taken = {slot for slot, _ in self._slots.values()}
        self._free = [slot for slot in range(self.num_places - 1, -1, -1) if slot not in taken]
        return found[-1][0] + 1 if found else 0


def _write(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    if os.pwritev(fd, buffers, offset) != sum(map(len, buffers)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_store(root: Path, identity: bytes, page_bytes: int, max_bytes: int) -> DiskStore:
    """Open the first directory below `root` of these pages that no other process has.

    A process that starts again gets the directory that it had, or one of a worker with the same model.
    ConfigError when the directory cannot be used.
    """
    name = blake2b(_VERSION + identity, digest_size=8).hexdigest()
    try:
        for number in count():
            directory = root / f"{name}-{number}"
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                return DiskStore(directory, identity, page_bytes, max_bytes)
            except BlockingIOError:  # another process has the lock
                continue
    except OSError as error:
        raise ConfigError(f"cache.kv_disk_path: {root} cannot be used: {error}") from error
    raise AssertionError("count() does not end")


class Written(NamedTuple):
    """A key's page is on disk from now on, or is not there any more."""

    key: bytes
    is_on_disk: bool


class Loaded(NamedTuple):
    """A load that has ended. is_valid: the host page has the contents of the key."""

    key: bytes
    is_valid: bool


class DiskTier:
    """The disk below a host tier: a ledger for the thread of the steps, and a thread that reads and writes.

    `keys` changes in `take_reports` alone, so the ledger is a little behind the files.
    """

    def __init__(
        self,
        store: DiskStore,
        host_pages: Sequence[HostPages],
        has_passed: Callable[[int], bool],
        is_current: Callable[[int, int], bool],
    ) -> None:
        """host_pages: of each rank. has_passed: see `StepMarks`; of steps that all ranks have ended.

        is_current(page, generation): True when the host page still has the contents of that generation.
        """
        self.num_places = store.num_places
        self.keys = set(store)
        self.num_read = 0
        self.num_written = 0
        self.num_failed = 0  # errors of the file system; the first one turns the tier off
        self.page_s = store.page_bytes / FIRST_BYTES_PER_S  # to read a page
        self.is_stalled = False  # a load took too long, and no order has ended since
        self._store = store
        self._host_pages = host_pages
        self._has_passed, self._is_current = has_passed, is_current
        self._buffer = [np.empty(pages.shape[1], np.uint8) for pages in host_pages]
        self._loads: deque[tuple[bytes, int, int]] = deque()  # key, host page, mark
        self._chains: deque[list[bytes]] = deque()  # ordered, and not touched yet
        self._batch: dict[bytes, PageParts] = {}  # the loads that are being read
        self._writes: deque[tuple[bytes, int, int, int]] = deque()  # key, host page, generation, mark
        self._reports: deque[Written | Loaded] = deque()
        self._must_forget = False  # the thread empties the store before it carries out another order
        self._wakes = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """The counters of a worker's load; `disk_errors` above 0 says that the tier is off."""
        return {
            "disk_pages_read": self.num_read,
            "disk_pages_written": self.num_written,
            "disk_pages_damaged": self._store.num_damaged,
            "disk_errors": self.num_failed,
        }

    def pays(self, compute_page_s: float) -> bool:
        """Return whether a page is read faster than it is computed.

        Each False lowers the measured time a little, so that a disk that was slow is tried again.
        """
        if self.page_s <= compute_page_s:
            return True
        self.page_s *= RECOVERY
        return False

    def load(self, chain: Iterable[tuple[bytes, int]], mark: int) -> None:
        """Read the pages of a chain, in its order, into host pages, which are free once `mark` has passed.

        A Loaded report follows for each page. chain: (key, host page).
        """
        loads = [(key, host_page, mark) for key, host_page in chain]
        self._chains.append([key for key, _, _ in loads])
        self._loads.extend(loads)
        self._wakes.set()

    def write(self, key: bytes, host_page: int, generation: int, mark: int) -> None:
        """Write a host page that has its contents once `mark` has passed, unless it is taken before."""
        if key not in self.keys and not self.num_failed and len(self._writes) < MAX_QUEUED_WRITES:
            self._writes.append((key, host_page, generation, mark))
            self._wakes.set()

    def take_reports(self) -> list[Written | Loaded]:
        """Return the events since the last call, and bring `keys` up to date."""
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        self.is_stalled = self.is_stalled and not reports
        for report in reports:
            if isinstance(report, Loaded) or self._must_forget:
                continue
            if report.is_on_disk:
                self.keys.add(report.key)
            else:
                self.keys.discard(report.key)
        return reports

    def forget_all(self) -> None:
        """Forget every page: `keys` is empty at once, and the files are before the next order."""
        self._must_forget = True
        self.keys.clear()
        self._wakes.set()

    def put(self, pages: Iterable[tuple[bytes, int]], until_s: float) -> None:
        """Write host pages in the calling thread, after `stop`, until time.monotonic() is until_s."""
        try:
            for key, host_page in pages:
                if self.num_failed or time.monotonic() > until_s:
                    return
                self._store.put(key, self._parts(host_page))
        except OSError as error:
            self._fail(error)

    def touch(self, chain: Sequence[bytes]) -> list[bytes]:
        """As `DiskStore.touch`, in the calling thread, after `stop`; returns no key after an error."""
        try:
            return [] if self.num_failed else self._store.touch(chain)
        except OSError as error:
            self._fail(error)
            return []

    def stop(self) -> bool:
        """End the thread; the orders that it has not begun are lost.

        Return False for a disk that hangs: it may still write to the host pages of loads that have not ended.
        """
        self._closing.set()
        self._wakes.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            logger.error("the disk of the KV pages hangs: it has not ended a read or a write in %g s", STOP_S)
            return False
        if self._must_forget:
            self._forget_all()
        return True

    def close(self) -> None:
        """End the thread and close the files, unless the disk hangs. Idempotent."""
        if self.stop():
            self._store.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakes.wait()
            self._wakes.clear()
            try:
                self._work()
            except Exception as error:  # a request must not wait for a thread that has ended
                self._fail(error)
                self._end_loads()

    def _work(self) -> None:
        """Carry out the orders, loads first."""
        while (self._loads or self._writes or self._must_forget) and not self._closing.is_set():
            if self._must_forget:
                self._forget_all()
            elif self.num_failed:
                self._end_loads()
                self._writes.clear()
            elif self._loads:
                self._load_all()
            else:
                self._write_one(*self._writes.popleft())

    def _forget_all(self) -> None:
        try:
            self._reports.extend(Written(key, False) for key in self._store.forget_all())
        except OSError as error:
            self._fail(error)
        self._must_forget = False

    def _load_all(self) -> None:
        while self._loads and not self._closing.is_set():
            if not self._wait(self._loads[0][2]):
                return
            began_s, batch = time.monotonic(), self._take_batch()
            for key, is_valid in self._store.read(batch):
                if self._closing.is_set():
                    return
                del self._batch[key]
                self.num_read += is_valid
                if not is_valid:
                    self._reports.append(Written(key, False))
                self._reports.append(Loaded(key, is_valid))
            self.page_s += NEWEST_SHARE * ((time.monotonic() - began_s) / len(batch) - self.page_s)
            # Requests wait for the pages, not for this. Whole chains: a chain may take several batches.
            while self._chains:
                self._store.touch(self._chains.popleft())

    def _parts(self, host_page: int) -> PageParts:
        return [pages[host_page] for pages in self._host_pages]

    def _take_batch(self) -> Mapping[bytes, PageParts]:
        """Move the first loads with marks that have passed to `_batch`, and return them."""
        most = max(1, _BATCH_BYTES // self._store.page_bytes)
        while self._loads and len(self._batch) < most and self._has_passed(self._loads[0][2]):
            key, host_page, _ = self._loads.popleft()
            self._batch[key] = self._parts(host_page)
        return dict(self._batch)

    def _write_one(self, key: bytes, host_page: int, generation: int, mark: int) -> None:
        if key in self._store:
            return
        if not self._wait(mark):
            return
        for copied, part in zip(self._buffer, self._parts(host_page), strict=True):
            np.copyto(copied, part)
        if not self._is_current(host_page, generation):
            return  # the page was taken for other contents, perhaps during the copy
        for dropped in self._store.put(key, self._buffer):
            self._reports.append(Written(dropped, False))
        self.num_written += 1
        self._reports.append(Written(key, True))

    def _wait(self, mark: int) -> bool:
        """Wait until the mark has passed; return False when the tier is closing before."""
        while not self._has_passed(mark):
            if self._closing.is_set():
                return False
            time.sleep(_POLL_S)
        return True

    def _end_loads(self) -> None:
        ended = [*self._batch, *(self._loads.popleft()[0] for _ in range(len(self._loads)))]
        self._batch.clear()
        self._chains.clear()
        self._reports.extend(Loaded(key, False) for key in ended)

    def _fail(self, error: Exception) -> None:
        """Turn the tier off: nothing is on disk from now on."""
        self.num_failed += 1
        logger.error("the disk tier of KV pages is off until the worker starts again: %s", error)
        self._reports.extend(Written(key, False) for key in self._store)
