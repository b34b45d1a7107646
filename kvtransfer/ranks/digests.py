"""Digests that prove to a destination that its pages hold the bytes the source sent: one digest a unit.

XXH3-64 over the unit's bytes in plan order, so both ends get the same digest however their pools are cut. The
64-bit digests of the longest prompt fit one frame; a damaged unit is missed once in 2^64.

Page bytes come over sockets where a stranger may put other bytes in their place: gloo and NCCL do not
authenticate their peers, and a host on the way can change what TCP carries. The digests are therefore keyed
(ShardDigests). Each shard of a transfer has a secret that its two ends derive from the session of their link.
From the secret come the seed of the hash, and a mask as long as all digests that is XORed onto them before
they are sent over the link, which is sealed. A forger knows neither the seed nor any hash under it, which the
mask hides, and so cannot find other bytes with the same hash. A guess is right once in 2^64, and the second
wrong guess ends the transfer. This is the construction of Wegman and Carter with XXH3 in the place of a
universal hash, which XXH3 is not proved to be. Keyed BLAKE2b needs no such proof, but takes thirty times as
long, and would be slower than a link of 1 GB/s. A peer that holds the cluster key is trusted.

Where a transfer sends codes, both ends hash the rows that the codes stand for: the source turns its rows into
codes and back, the destination reads its pages. The digests therefore cover the codes and their decoding.

A GPU's pages are hashed by the CPU too, from host memory to which they are copied chunk by chunk, so a GPU
and a CPU agree by construction. A GiB costs 20 ms of a bus of 50 GB/s, and 20 ms or more of one core. Pages
that stream hide all but the last piece's cost. With `kv_digests: false` at both ends no digests are taken.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Final, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from baton.kernels.pages import Offsets, decode_runs
from baton.kvtransfer.protocol.messages import DIGEST_BYTES, NO_DIGESTS
from baton.kvtransfer.protocol.transfer_plan import Pages, TransferPlan, TransferSide
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.pages import StagedParts

CHUNK_BYTES: Final = 16 * 2**20  # hashed in a millisecond, the longest wait for the staging memory

_SHARD: Final = b"baton kv shard 1"
_SEED: Final = b"baton kv seed 1"
_MASK: Final = b"baton kv mask 1"
_UNITS_PER_BLOCK: Final = 64 // DIGEST_BYTES  # a block is a whole BLAKE2b


Result = TypeVar("Result")
INLINE_BYTES: Final = 2**21  # hashed in 0.1 ms, the time that it takes to wake a thread and hear of its end
CODES_COST: Final = 16  # encoding and decoding a byte takes as long as hashing 16


class UnitDigests:
    """Takes the digests of units of one rank's pool, in place on a CPU, chunk by chunk from a GPU.

    Any thread may call. The calling thread hashes a few bytes in this CPU's memory; a thread of this object
    hashes all others.
    """

    def __init__(self, rank: LocalRank) -> None:
        self._memory = rank.memory
        self._lock = threading.Lock()  # of the host memory to which a GPU's pages, and codes, are copied
        self._parts = StagedParts(rank.packing())
        if self._memory is None:
            self._parts.room(CHUNK_BYTES)  # allocated now: later the pool may leave no memory
        self.is_in_place = self._memory is not None  # the caller waits for nothing but the hash
        self._inline_bytes = INLINE_BYTES if self.is_in_place else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    def submit(self, num_bytes: int, function: Callable[[], Result]) -> "Future[Result]":
        """Call the function, which reads num_bytes; the future is done already where they are few.

        Functions that go to the thread run in the order in which they were submitted.
        """
        if num_bytes > self._inline_bytes:
            return self._thread.submit(function)
        future: Future[Result] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Return when no function runs any more; functions that have not begun are cancelled."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, plan: TransferPlan, offset_N: Offsets, num_units: int, seed: int = 0) -> bytes:
        """Return the digests of the units whose runs begin at `offset_N`, as `digest_units`.

        The units must not be written meanwhile. Where the plan sends codes, the digests are of the rows that
        the codes of these pages stand for.
        """
        if not len(offset_N) or (self._memory is not None and plan.sent_codes is None):
            content = memoryview(b"") if self._memory is None else self._memory.view()
            return digest_units(content, offset_N, plan.run_bytes, num_units, seed)
        offset_UR = offset_N.reshape(num_units, -1)
        units_per_chunk = max(1, CHUNK_BYTES // plan.sent_unit_bytes)
        chunks = range(0, num_units, units_per_chunk)
        return b"".join(
            self._take_chunk(plan, offset_UR[first : first + units_per_chunk], seed) for first in chunks
        )

    def _take_chunk(self, plan: TransferPlan, offset_UR: Offsets, seed: int) -> bytes:
        unit_bytes = plan.unit_bytes
        unit_offset_U = np.arange(len(offset_UR), dtype=np.int64) * unit_bytes
        with self._lock:
            fetched = self._parts.fetch(plan, offset_UR.reshape(-1))
            if plan.sent_codes is not None:
                codes, fetched = fetched, torch.empty(len(offset_UR) * unit_bytes, dtype=torch.uint8)
                run_offset_N = np.arange(offset_UR.size, dtype=np.int64) * plan.run_bytes
                decode_runs(fetched, run_offset_N, plan.run_bytes, plan.sent_codes, codes)
            return digest_units(fetched.numpy().data, unit_offset_U, unit_bytes, len(offset_UR), seed)


class ShardDigests:
    """The digests of one shard of a transfer, under the shard's own key. Any thread may call.

    Both ends of the shard get the same digests.
    """

    def __init__(self, units: UnitDigests, key: bytes, shard: int) -> None:
        """key: the transfer's, known to its two ends alone. NO_DIGESTS: every digest is 0."""
        self.are_taken = key != NO_DIGESTS
        self._units = units
        self._key = blake2b(shard.to_bytes(8, "big"), key=key, digest_size=32, person=_SHARD).digest()
        self._seed = int.from_bytes(blake2b(key=self._key, digest_size=8, person=_SEED).digest(), "big")

    def submit(
        self, plan: TransferPlan, side: TransferSide, pages: Pages, first: int, stop: int
    ) -> "Future[bytes]":
        """Take the masked digests of units [first, stop). side, pages: where the units lie here."""
        num_bytes = (stop - first) * plan.sent_unit_bytes if self.are_taken else 0
        if plan.sent_codes is not None:
            num_bytes *= CODES_COST
        return self._units.submit(
            num_bytes, lambda: self.take(plan, side.offsets(first, stop, pages), first, stop)
        )

    def take(self, plan: TransferPlan, offset_N: Offsets, first: int, stop: int) -> bytes:
        """Return the masked digests of units [first, stop). offset_N: the offsets of their runs."""
        if not self.are_taken:
            return bytes((stop - first) * DIGEST_BYTES)
        digests = self._units.take(plan, offset_N, stop - first, self._seed)
        return (_words(digests) ^ _words(self._mask(first, stop))).tobytes()

    def _mask(self, first: int, stop: int) -> bytes:
        first_block, stop_block = first // _UNITS_PER_BLOCK, -(-stop // _UNITS_PER_BLOCK)
        blocks = (
            blake2b(block.to_bytes(8, "big"), key=self._key, person=_MASK).digest()
            for block in range(first_block, stop_block)
        )
        start = (first - first_block * _UNITS_PER_BLOCK) * DIGEST_BYTES
        return b"".join(blocks)[start : start + (stop - first) * DIGEST_BYTES]


def digest_units(pool: memoryview, offset_N: Offsets, run_bytes: int, num_units: int, seed: int = 0) -> bytes:
    """Return `num_units` digests of DIGEST_BYTES each, read in place.

    pool: all of a rank's pages as bytes. offset_N: the offsets of this side's runs, unit by unit; all units
    have the same number of runs. ValueError when the runs do not divide into units, or leave the pool.
    """
    if num_units < 0 or (len(offset_N) % num_units if num_units else len(offset_N)):
        raise ValueError(f"{len(offset_N)} runs do not divide into {num_units} units")
    if len(offset_N) and not 0 <= int(offset_N.min()) <= int(offset_N.max()) <= pool.nbytes - run_bytes:
        raise ValueError(f"runs of {run_bytes} bytes leave a pool of {pool.nbytes}")
    if not len(offset_N):
        return xxhash.xxh3_64_digest(b"", seed) * num_units  # ranks that share no head have nothing to move
    offset_UR = offset_N.reshape(num_units, -1)
    num_runs = offset_UR.shape[1]
    if num_runs > 1 and bool((np.diff(offset_UR) == run_bytes).all()):  # a unit is one stretch of bytes
        offset_UR, run_bytes = offset_UR[:, :1], num_runs * run_bytes
    return b"".join(_digests(pool, offset_UR, run_bytes, seed))


def differing_units(expected: bytes, found: bytes) -> tuple[int, ...]:
    """Return the units with different digests. Raises ValueError for different numbers of units."""
    if len(expected) != len(found) or len(expected) % DIGEST_BYTES:
        raise ValueError(f"digests of {len(expected)} and {len(found)} bytes")
    differs_U = _words(expected) != _words(found)
    return tuple(int(unit) for unit in np.flatnonzero(differs_U))


def _digests(pool: memoryview, offset_UR: Offsets, run_bytes: int, seed: int) -> Iterator[bytes]:
    """Yield the digest of each unit. Suffixes: U units, R runs of a unit."""
    for offset_R in offset_UR.tolist():
        digest = xxhash.xxh3_64(seed=seed)
        for offset in offset_R:
            digest.update(pool[offset : offset + run_bytes])
        yield digest.digest()


def _words(digests: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(digests, dtype=np.uint64)
