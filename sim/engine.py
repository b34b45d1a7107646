"""A simulated replica: the engine's own scheduler and page ledger over a model of numbers.

The model's next token depends on every KV entry that the model reads, page by page. The entry of a token
encodes the token, its position, and a hash of everything before it, which the model reads back through the
page table. So one entry that is missing, late, foreign or damaged changes all later tokens, and `golden`
computes the answer of an undisturbed run without an engine.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final
from zlib import crc32

from baton.clock import Clock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.replica import LayerWatch, Replica, last_output
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import ScheduledChunk
from baton.engine.scheduler.sequence import Sequence as EngineSequence
from baton.kernels.native import TORCH_DTYPES
from baton.kvtransfer.transports.pages import PeerGenerations, SharedPool
from baton.messages.workers import Worker
from baton.pages import DTYPE_BYTES, PageKeys, PageLayout
from baton.request import FilledPages, FinishReason, Request, SamplingParams, StepOutput
from baton.sim.process import Crash

VOCAB_SIZE: Final = 61
POISON: Final = VOCAB_SIZE - 1  # in a prompt: kills the process that computes it
UNSAMPLEABLE: Final = VOCAB_SIZE - 2  # in a prompt: its logits are not finite
NUM_WORDS: Final = VOCAB_SIZE - 2  # token ids below are harmless; only they are sampled
ENTRY_BYTES: Final = 8  # of one token's KV
MODEL: Final = "numbers"  # where there is one
KV_DTYPE: Final = "float32"  # page keys depend on both
_MASK: Final = 2**64 - 1


def page_layout(page_size: int, num_ranks: int = 1) -> PageLayout:
    """Return the layout of the model's pages: one layer, and a head for each rank.

    The key of a token and head is its entry; values stay 0.
    """
    return PageLayout(
        tp_size=num_ranks,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=num_ranks,
        head_dim=ENTRY_BYTES // DTYPE_BYTES[KV_DTYPE],
        dtype=KV_DTYPE,
    )


class KvMemory:
    """The pages of one rank, which hold `page_size` entries each: the KV pool of the model of numbers."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        layout = page_layout(page_size)
        self.page_size = page_size
        self.page_bytes = layout.page_bytes
        self.shared = SharedPool()
        shape = num_pages, layout.num_layers, 2, layout.heads_per_rank, page_size, layout.row_elements
        self.tensor = self.shared.zeros(shape, TORCH_DTYPES[layout.element_type])
        self.bytes = self.shared.memory.view()
        # As processes see the table that may write the pages.
        self.generations = PeerGenerations(self.shared.generations.file.descriptor, num_pages)
        self.shared.close()  # no other process maps the pages
        self._keys_bytes = page_size * ENTRY_BYTES

    def read(self, pages: Sequence[int], num_tokens: int, context: int) -> int:
        """Return the hash of `context` and the entries of the first `num_tokens` tokens in `pages`."""
        view, size = self.bytes, self._keys_bytes
        num_left = num_tokens * ENTRY_BYTES
        for page in pages:
            if num_left <= 0:
                break
            first = page * self.page_bytes
            context = crc32(view[first : first + min(size, num_left)], context)
            num_left -= size
        return context

    def write(self, page: int, slot: int, entry: bytes) -> None:
        """Write one token's entry."""
        first = page * self.page_bytes + slot * ENTRY_BYTES
        self.bytes[first : first + ENTRY_BYTES] = entry

    def place(self, pages: Sequence[int], unit: int, unit_tokens: int) -> tuple[int, slice]:
        """Return the page of a transfer's unit, and the place in `bytes` of the unit's entries.

        pages: of the transfer, in order; a page holds one or several units.
        """
        units_per_page = self.page_size // unit_tokens
        page = pages[unit // units_per_page]
        first = page * self.page_bytes + unit % units_per_page * unit_tokens * ENTRY_BYTES
        return page, slice(first, first + unit_tokens * ENTRY_BYTES)


def run_chunk(memory: KvMemory, chunk: ScheduledChunk, fingerprint: str) -> int | None:
    """Read the KV before the chunk, write the chunk's KV, and return the next token if one is due.

    fingerprint: of the model; models of different fingerprints continue a prompt differently.
    """
    sequence, page_size = chunk.sequence, memory.page_size
    table = sequence.page_table
    context = memory.read(table, chunk.start, crc32(sequence.cache_salt, crc32(fingerprint.encode())))
    for position in range(chunk.start, chunk.start + chunk.num_tokens):
        entry = entry_of(context, sequence.token_ids[position], position)
        memory.write(table[position // page_size], position % page_size, entry)
        context = crc32(entry, context)
    return _sample_next(context, sequence) if chunk.samples else None


def entry_of(context: int, token_id: int, position: int) -> bytes:
    """Return the KV entry of a token. context: the hash of everything before the token."""
    value = (context * 6364136223846793005 + token_id * 2862933555777941757 + position + 1) & _MASK
    return (value ^ value >> 29).to_bytes(ENTRY_BYTES, "little")


def golden(request: Request, seed: int | None, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Return the tokens and the finish reason of an undisturbed run.

    seed: the request's, or the seed that its gateway minted.
    """
    sampling, token_ids = request.sampling, list(request.token_ids)
    context = crc32(request.cache_salt, crc32(fingerprint_of(request.model).encode()))
    for position, token_id in enumerate(token_ids):
        context = crc32(entry_of(context, token_id, position), context)
    num_prompt, answer = len(token_ids), list[int]()
    limit = max_model_len - num_prompt
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    while True:
        position = num_prompt + len(answer)
        must_go_on = len(answer) < sampling.min_tokens
        banned = sampling.stop_token_ids if must_go_on else ()
        token_id = sample(context, _key(sampling, seed), request.choice, position, banned)
        answer.append(token_id)
        if token_id in sampling.stop_token_ids and len(answer) >= sampling.min_tokens:
            return answer, FinishReason.STOP
        if len(answer) >= limit:
            return answer, FinishReason.LENGTH
        context = crc32(entry_of(context, token_id, position), context)


def sample(context: int, key: int, choice: int, position: int, banned: Iterable[int]) -> int:
    """Return a harmless token that is not in `banned`."""
    value = (context * 3202034522624059733 + key * 935386905 + choice * 7919 + position) & _MASK
    token_id = (value ^ value >> 33) % NUM_WORDS
    while token_id in banned:
        token_id = (token_id + 1) % NUM_WORDS
    return token_id


def _sample_next(context: int, sequence: EngineSequence) -> int:
    must_go_on = sequence.num_tokens < sequence.min_num_tokens
    banned = sequence.stop_ids if must_go_on else ()
    sampling = sequence.sampling
    return sample(context, _key(sampling, sampling.seed), sequence.choice, sequence.num_tokens, banned)


def _key(sampling: SamplingParams, seed: int | None) -> int:
    """Return the key of the random numbers; greedy sampling has none."""
    if sampling.temperature == 0:
        return 0
    assert seed is not None, "gateways mint a seed for every sampled request"
    return seed


IDLE_STEP_S: Final = 0.02  # a step without a batch
STEPS_PER_CHECK: Final = 16  # between two integrity checks


def fingerprint_of(model: str) -> str:
    """Return the fingerprint of a model's weights. model: as in Request.model."""
    return f"{MODEL} {model}"


class SimEngine(Replica):
    """A replica with a model of numbers."""

    def __init__(
        self,
        worker: Worker,
        clock: Clock,
        spend: Callable[[float], None],
        *,
        step_s: float = 0.0,
        token_s: float = 0.0,
        has_prefix_cache: bool = True,
    ) -> None:
        """worker: has the sizes. spend: called with the duration of each step.

        step_s: of an empty batch. token_s: for each token of the batch. has_prefix_cache: see
        `CacheConfig.enable_prefix_caching`.
        """
        self.memory = KvMemory(worker.num_pages, worker.page_size)
        self.more_s = 0.0  # a fault: each step takes this much longer
        self._fingerprint = worker.fingerprint
        self._spend, self._step_s, self._token_s = spend, step_s, token_s
        self._num_steps = 0
        pool = PagePool(worker.num_pages, worker.page_size)
        keys = PageKeys(model_fingerprint=worker.fingerprint, dtype=KV_DTYPE, page_size=worker.page_size)
        config = SchedulerConfig(
            max_num_seqs=worker.max_num_seqs, max_num_batched_tokens=worker.max_num_batched_tokens
        )
        cache = PrefixCache(pool, keys if has_prefix_cache else None, HostTier())
        scheduler = Scheduler(config, cache, clock)
        super().__init__(scheduler, vocab_size=VOCAB_SIZE, max_model_len=worker.max_model_len)

    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[EngineSequence, ...]:
        """As `Replica.add`; requests have one choice and a seed."""
        self.check(request)
        assert request.sampling.n == 1, "gateways ask for one choice at a time"
        return self._add(request, filled, keeps_pages)

    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        """As `Replica.step`; the only layer has no watch."""
        batch = self.scheduler.apply(self.scheduler.plan())
        busy_s = self._step_s + self._token_s * batch.num_tokens + self.more_s
        duration_s = busy_s if batch.sequences else IDLE_STEP_S
        self._spend(duration_s)
        if batch.sequences:
            self._last_step = batch, duration_s
            self._step_meter.observe(duration_s, batch.num_tokens)
        failed = [
            chunk.sequence
            for chunk in batch.chunks
            if chunk.samples and UNSAMPLEABLE in chunk.sequence.token_ids
        ]
        sampled = [self._run(chunk) for chunk in batch.chunks]
        for sequence in failed:
            self.scheduler.fail(sequence)
        outputs = self.scheduler.commit(batch, sampled, duration_s, computed_s=duration_s)
        self._num_steps += 1
        if not self._num_steps % STEPS_PER_CHECK:
            self.scheduler.check_integrity()
        return outputs + [last_output(sequence) for sequence in failed]

    def _run(self, chunk: ScheduledChunk) -> int | None:
        sequence, pool, size = chunk.sequence, self.pages, self.pages.page_size
        if POISON in sequence.token_ids:
            raise Crash(sequence.request_id)
        last = chunk.start + chunk.num_tokens - 1
        for index, page in enumerate(sequence.page_table[: last // size + 1]):
            is_written = index >= chunk.start // size
            owners = pool.owners(page)
            assert sequence.key in owners, f"{sequence.key} reads page {page} of {owners}"
            assert not is_written or len(owners) == 1, f"{sequence.key} writes page {page} of {owners}"
        return run_chunk(self.memory, chunk, self._fingerprint)
