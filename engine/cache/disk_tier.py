"""Keeps KV pages in files, so that prefixes outlive host memory and the process.

The life of a page on disk:

1. A page that has come to the host tier is written behind, by the thread of the tier. A page that leaves
   host memory before its turn is not written.
2. Pages on disk that continue a request's prefix are read back to the host tier while it waits, in the
   order of the files, with several reads at once; pages that were written one after another are one read.
   The step loop only gives orders and takes reports: it never waits for a disk.
3. A full store drops the segment that was used least recently, as a whole.
4. A process that starts claims the first free directory of its model, reads the index of every segment
   there, and has the pages again.

A file may be torn or damaged: a record with a wrong checksum is forgotten, and its page is computed again.
The checksum of a page is XXH3-128, which keeps up with a disk on one core; a damaged page passes once in
2^128. It proves no author: the files are their owner's alone. An error of the file system turns the tier off.
docs/decisions/0040 says why one thread keeps the pages of all ranks of a replica.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
_SEGMENT_BYTES: Final = 64 * 2**20  # of an ordinary segment
_LEAST_SEGMENTS: Final = 4
_VERSION: Final = b"baton-kv-2"
_HEAD: Final = Struct("<10sxxxxxxQ32s")  # version, serial, checksum of both with the identity of the pages
_ENTRY: Final = Struct("<16s16s16s")  # key, checksum of the page, checksum of the entry
_READ_BYTES: Final = 4 * 2**20  # of one read, at most
_READS_AT_ONCE: Final = 2  # the disk reads while the other thread checks
_BATCH_BYTES: Final = 64 * 2**20  # of pages that are put in the order of the files
_POLL_S: Final = 0.001
STOP_S: Final = 5.0  # for the order that the thread is at
MAX_QUEUED_WRITES: Final = 4096  # later pages are not written
FIRST_BYTES_PER_S: Final = 1e9  # that a disk is assumed to read before it has been measured
RECOVERY: Final = 0.9  # factor of the measured time, each time that a request computes its pages instead
NEWEST_SHARE: Final = 0.25  # weight of the latest batch in the measured time
_MOST_BUFFERS: Final = 1024  # that Linux takes in one read


@dataclass(slots=True, eq=False)
class _Segment:
    """One open file. Slots [0, num_written) have records."""

    place: int  # which of the store's files
    serial: int  # grows from segment to segment
    fd: int
    direct_fd: int  # the same file, read past the system's cache of files; -1: that is not possible
    used: int  # the latest use; grows
    num_written: int = 0
    keys: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # key -> (slot, checksum of the page)

    def close(self) -> None:
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)


class DiskStore:
    """Pages of equal size in a directory of segment files, at most `max_bytes` in all. Not thread-safe.

    A page has one part for each rank of a replica, so a page that is here is here for every rank.
    A segment has a head, an index entry for each slot, and the pages. A record is written page first, then
    entry. Every checksum covers `identity`, the key and the place of the record, so that no record of other
    pages is accepted. Methods raise OSError as the file system does.
    """

    def __init__(self, directory: Path, identity: bytes, page_bytes: int, max_bytes: int) -> None:
        """identity: names model, element type and layout. ConfigError when max_bytes holds too few pages."""
        self.page_bytes = page_bytes
        self.num_damaged = 0  # records that did not have the contents that were written
        self._identity = blake2b(identity, digest_size=32).digest()
        self._seed = int.from_bytes(self._identity[:8], "little")
        self._stride = -(-page_bytes // _BLOCK) * _BLOCK
        # Takes what lies between two pages; at an address that direct reads take.
        self._gap = np.frombuffer(mmap(-1, _BLOCK), np.uint8)[: self._stride - page_bytes]
        self._can_be_direct = True  # until the system refuses
        segment_bytes = min(_SEGMENT_BYTES, max_bytes // _LEAST_SEGMENTS)
        self.num_slots = (segment_bytes - 2 * _BLOCK) // (self._stride + _ENTRY.size)
        if self.num_slots < 1:
            least = _LEAST_SEGMENTS * (self._stride + _ENTRY.size + 2 * _BLOCK)
            raise ConfigError(
                f"cache.kv_disk_bytes: pages of {page_bytes:,} bytes need {least:,}, got {max_bytes:,}"
            )
        self._data = _BLOCK + -(-self.num_slots * _ENTRY.size // _BLOCK) * _BLOCK  # where the pages start
        self.num_segments = max_bytes // (self._data + self.num_slots * self._stride)
        self._directory = directory
        self._segments: dict[int, _Segment] = {}  # place -> segment
        self._lost: set[int] = set()  # places of files that cannot be used
        self._where: dict[bytes, _Segment] = {}
        self._active: _Segment | None = None  # gets the next page
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for segment in sorted(self._found(), key=lambda each: each.serial):
                self._segments[segment.place] = self._active = segment
                self._where.update(dict.fromkeys(segment.keys, segment))
        except BaseException:
            self.close()
            raise
        self._serials = count(0 if self._active is None else self._active.serial + 1)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def places(self) -> Iterator[tuple[bytes, int]]:
        """Every key with its place: a number below `num_places` that no other key has now."""
        return ((key, self.place_of(key)) for key in self._where)

    @property
    def num_places(self) -> int:
        return self.num_segments * self.num_slots

    def place_of(self, key: bytes) -> int:
        """The place of a key that is here."""
        segment = self._where[key]
        return segment.place * self.num_slots + segment.keys[key][0]

    def put(self, key: bytes, page: PageParts) -> list[bytes]:
        """Append a page unless its key is here; return the keys that were dropped for it."""
        if key in self._where:
            return []
        dropped: list[bytes] = []
        segment = self._active
        if segment is None or segment.num_written == self.num_slots:
            dropped = self._drop_oldest()
            segment = self._active = self._create()
        slot = segment.num_written
        segment.num_written += 1  # also after an error: the slot may be torn
        checksum = self._checksum(key, page)
        _write(segment.fd, [part.data for part in page], self._data + slot * self._stride)
        entry = key + checksum
        check = self._hash(b"entry", _place(segment.serial, slot) + entry)[:16]
        _write(segment.fd, [entry + check], _BLOCK + slot * _ENTRY.size)
        segment.keys[key] = slot, checksum
        segment.used = next(self._serials)
        self._where[key] = segment
        return dropped

    def read(self, pages: Mapping[bytes, PageParts]) -> Iterator[tuple[bytes, bool]]:
        """Read pages about in the order of the files; yield each key once its page was read, and True.

        False, with anything in the page, if the record is absent or damaged; a damaged record is forgotten.
        Several reads are under way at once, because a disk that waits for the next order is idle. None is
        under way once the iterator has ended, been closed or raised an error: the pages may be used again.
        """
        runs = self._runs(pages)
        yield from ((key, False) for key in pages if key not in self._where)
        for keys in runs:
            self._where[keys[0]].used = next(self._serials)
        waiting = deque(runs)
        results: SimpleQueue[dict[bytes, bool] | Exception] = SimpleQueue()

        def read_runs() -> None:
            with suppress(IndexError):  # no run is waiting
                while keys := waiting.popleft():
                    try:
                        results.put(self._read_run(keys, [pages[key] for key in keys]))
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

    def _runs(self, pages: Mapping[bytes, PageParts]) -> list[list[bytes]]:
        """Return the keys that are here, in the order of the files; each list is one read."""
        num_buffers = 1 + max(map(len, pages.values()), default=0)  # of a page, with the gap behind it
        most = max(1, min(_READ_BYTES // self._stride, _MOST_BUFFERS // num_buffers))
        runs: list[list[bytes]] = []
        last = -2
        for place, key in sorted((self.place_of(key), key) for key in pages if key in self._where):
            if place == last + 1 and place % self.num_slots and len(runs[-1]) < most:
                runs[-1].append(key)
            else:
                runs.append([key])
            last = place
        return runs

    def _read_run(self, keys: Sequence[bytes], pages: Sequence[PageParts]) -> dict[bytes, bool]:
        """Read adjacent pages with one call, and return whether each has its contents. Changes nothing."""
        segment = self._where[keys[0]]
        buffers: list[memoryview] = []
        for page in pages:
            if buffers and len(self._gap):
                buffers.append(self._gap.data)
            buffers += [part.data for part in page]
        num_read = self._read_buffers(segment, buffers, self._data + segment.keys[keys[0]][0] * self._stride)
        num_whole = (num_read + len(self._gap)) // self._stride  # no gap follows the last page
        return {
            key: number < num_whole and self._checksum(key, page) == segment.keys[key][1]
            for number, (key, page) in enumerate(zip(keys, pages, strict=True))
        }

    def _read_buffers(self, segment: _Segment, buffers: Sequence[memoryview], offset: int) -> int:
        """Read past the system's cache of files where that is possible.

        The disk then writes straight to the host pages. A copy out of the cache would take about as long as
        the disk, on a processor that the steps need. Direct reads need aligned memory and a file system that
        supports them.
        """
        if self._can_be_direct and segment.direct_fd >= 0:
            try:
                return os.preadv(segment.direct_fd, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._can_be_direct = False
        return os.preadv(segment.fd, buffers, offset)

    def forget_all(self) -> list[bytes]:
        """Remove every record, also for the next process; return their keys."""
        keys = list(self._where)
        for segment in self._segments.values():
            self._path(segment.place).unlink()
            segment.close()
        self._segments.clear()
        self._where.clear()
        self._active = None
        return keys

    def _forget(self, key: bytes) -> None:
        """Remove a damaged record, also for the next process."""
        self.num_damaged += 1
        segment = self._where.pop(key)
        slot, _ = segment.keys.pop(key)
        _write(segment.fd, [bytes(_ENTRY.size)], _BLOCK + slot * _ENTRY.size)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._where.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _hash(self, kind: bytes, about: bytes) -> bytes:
        return blake2b(about, digest_size=32, key=self._identity, person=b"baton-" + kind).digest()

    def _checksum(self, key: bytes, page: PageParts) -> bytes:
        found = xxhash.xxh3_128(key, self._seed)
        for part in page:
            found.update(part.data)
        return found.digest()

    def _path(self, place: int) -> Path:
        return self._directory / f"segment-{place:05d}.kv"

    def _found(self) -> Iterator[_Segment]:
        """Open the segments in the directory, and remove files that are no segments of these pages."""
        for path in sorted(self._directory.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            place = int(number) if number.isascii() and number.isdigit() else self.num_segments
            is_ours = place < self.num_segments and path == self._path(place)
            try:
                segment = self._opened(place) if is_ours else None
                if segment is None:
                    path.unlink()
            except OSError as error:
                logger.warning("the disk tier of KV pages does without %s: %s", path, error)
                if is_ours:
                    self._lost.add(place)
                continue
            if segment is not None:
                yield segment

    def _opened(self, place: int) -> _Segment | None:
        fd = os.open(self._path(place), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = os.pread(fd, _HEAD.size, 0)
            index = os.pread(fd, self.num_slots * _ENTRY.size, _BLOCK)
        except OSError:
            os.close(fd)
            raise
        serial = _HEAD.unpack(head)[1] if len(head) == _HEAD.size else 0
        if head != self._head(serial):
            os.close(fd)
            return None
        segment = _Segment(place, serial, fd, self._open_direct(place), serial)
        whole = index[: len(index) // _ENTRY.size * _ENTRY.size]
        for slot, (key, checksum, check) in enumerate(_ENTRY.iter_unpack(whole)):
            if check == self._hash(b"entry", _place(serial, slot) + key + checksum)[:16]:
                segment.keys[key] = slot, checksum
                segment.num_written = slot + 1  # later slots have no record, or a torn one
        return segment

    def _open_direct(self, place: int) -> int:
        try:
            return os.open(self._path(place), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return -1

    def _head(self, serial: int) -> bytes:
        sizes = np.array([self.page_bytes, self.num_slots], "<u8").tobytes()
        return _HEAD.pack(_VERSION, serial, self._hash(b"head", _VERSION + _place(serial, 0) + sizes))

    def _create(self) -> _Segment:
        taken = self._lost | self._segments.keys()
        place = next(each for each in range(self.num_segments) if each not in taken)
        serial = next(self._serials)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(place), flags, 0o600)
        segment = _Segment(place, serial, fd, self._open_direct(place), serial)
        self._segments[place] = segment
        _write(segment.fd, [self._head(serial)], 0)
        return segment

    def _drop_oldest(self) -> list[bytes]:
        """Remove the segment that was used least recently if there is no place for another."""
        if len(self._segments) + len(self._lost) < self.num_segments:
            return []
        if not self._segments:
            raise OSError(errno.ENOSPC, "no file of the directory can be used")
        oldest = min(self._segments.values(), key=lambda each: each.used)
        del self._segments[oldest.place]
        oldest.close()
        self._path(oldest.place).unlink()
        dropped = [key for key in oldest.keys if self._where.get(key) is oldest]
        for key in dropped:
            del self._where[key]
        return dropped


def _place(serial: int, slot: int) -> bytes:
    return serial.to_bytes(8, "little") + slot.to_bytes(8, "little")


def _write(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    if os.pwritev(fd, buffers, offset) != sum(map(len, buffers)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_store(root: Path, identity: bytes, page_bytes: int, max_bytes: int) -> DiskStore:
    """Open the first directory below `root` of these pages that no other process has.

    A process that starts again gets the directory that it had, or one of a worker with the same model.
    ConfigError when the directory cannot be used.
    """
    name = blake2b(identity, digest_size=8).hexdigest()
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
    """The place of a key on disk from now on; NOT_ON_DISK: its record is gone."""

    key: bytes
    place: int


class Loaded(NamedTuple):
    """A load that has ended. is_valid: the host page has the contents of the key."""

    key: bytes
    is_valid: bool


NOT_ON_DISK: Final = -1


class DiskTier:
    """The disk below a host tier: a ledger for the thread of the steps, and a thread that reads and writes.

    `places` changes in `take_reports` alone, so the ledger is a little behind the files.
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
        self.places: dict[bytes, int] = dict(store.places())
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

    def load(self, key: bytes, host_page: int, mark: int) -> None:
        """Read a page into a host page, which is free once `mark` has passed. A Loaded report follows."""
        self._loads.append((key, host_page, mark))
        self._wakes.set()

    def write(self, key: bytes, host_page: int, generation: int, mark: int) -> None:
        """Write a host page that has its contents once `mark` has passed, unless it is taken before."""
        if key not in self.places and not self.num_failed and len(self._writes) < MAX_QUEUED_WRITES:
            self._writes.append((key, host_page, generation, mark))
            self._wakes.set()

    def take_reports(self) -> list[Written | Loaded]:
        """Return the events since the last call; `places` is as after them."""
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        self.is_stalled = self.is_stalled and not reports
        for report in reports:
            if isinstance(report, Loaded) or self._must_forget:
                continue
            if report.place == NOT_ON_DISK:
                self.places.pop(report.key, None)
            else:
                self.places[report.key] = report.place
        return reports

    def forget_all(self) -> None:
        """Forget every page: `places` is empty at once, and the files are before the next order."""
        self._must_forget = True
        self.places.clear()
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

    def stop(self) -> bool:
        """End the thread; the orders that it has not begun are lost. Return False for a disk that hangs."""
        self._closing.set()
        self._wakes.set()
        self._thread.join(STOP_S)
        has_ended = not self._thread.is_alive()
        if has_ended and self._must_forget:
            self._forget_all()
        return has_ended

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
            self._reports.extend(Written(key, NOT_ON_DISK) for key in self._store.forget_all())
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
                    self._reports.append(Written(key, NOT_ON_DISK))
                self._reports.append(Loaded(key, is_valid))
            self.page_s += NEWEST_SHARE * ((time.monotonic() - began_s) / len(batch) - self.page_s)

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
            self._reports.append(Written(dropped, NOT_ON_DISK))
        self.num_written += 1
        self._reports.append(Written(key, self._store.place_of(key)))

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
        self._reports.extend(Loaded(key, False) for key in ended)

    def _fail(self, error: Exception) -> None:
        """Turn the tier off: nothing is on disk from now on."""
        self.num_failed += 1
        logger.error("the disk tier of KV pages is off until the worker starts again: %s", error)
        for key, _ in list(self._store.places()):
            self._reports.append(Written(key, NOT_ON_DISK))
