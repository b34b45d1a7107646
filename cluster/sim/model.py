"""A model whose next token depends on every KV entry that it reads, page by page.

The entry of a token says what the token is, where, and what came before it; what came before is what the
model reads back through the page table. So one entry that is missing, late, of another request or damaged
changes all that follows, and the answer that an undisturbed run gives is known without running it.
"""

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from baton.engine.plan import ScheduledChunk
from baton.engine.sequence import Sequence as EngineSequence
from baton.request import FinishReason, Request, SamplingParams

VOCAB_SIZE: Final = 61
POISON: Final = VOCAB_SIZE - 1  # in a prompt: it makes the process that computes it die
UNSAMPLEABLE: Final = VOCAB_SIZE - 2  # in a prompt: what comes out of it are no numbers
NUM_WORDS: Final = VOCAB_SIZE - 2  # token ids below are harmless, and only they are ever sampled
ENTRY_BYTES: Final = 8  # of one token's KV, as in a layout of one layer, one head, one fp32 number each

_MASK: Final = 2**64 - 1


class KvMemory:
    """Contents of one replica's pages: `page_size` entries each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * ENTRY_BYTES
        self.bytes = bytearray(num_pages * self.page_bytes)

    def read(self, pages: Sequence[int], num_tokens: int, context: int) -> int:
        """Go on from `context` over the entries of the first `num_tokens` tokens."""
        view, size = memoryview(self.bytes), self.page_bytes
        num_left = num_tokens * ENTRY_BYTES
        for page in pages:
            if num_left <= 0:
                break
            first = page * size
            context = crc32(view[first : first + min(size, num_left)], context)
            num_left -= size
        return context

    def write(self, page: int, slot: int, entry: bytes) -> None:
        first = page * self.page_bytes + slot * ENTRY_BYTES
        self.bytes[first : first + ENTRY_BYTES] = entry

    def unit(self, page: int, first_slot: int, num_tokens: int) -> slice:
        first = page * self.page_bytes + first_slot * ENTRY_BYTES
        return slice(first, first + num_tokens * ENTRY_BYTES)


def run_chunk(memory: KvMemory, chunk: ScheduledChunk) -> int | None:
    """Read what is computed, write what is new; the next token if it is due."""
    sequence, page_size = chunk.sequence, memory.page_size
    table = sequence.page_table
    context = memory.read(table, chunk.start, context_of_salt(sequence.cache_salt))
    for position in range(chunk.start, chunk.start + chunk.num_tokens):
        entry = entry_of(context, sequence.token_ids[position], position)
        memory.write(table[position // page_size], position % page_size, entry)
        context = crc32(entry, context)
    return _sample_next(context, sequence) if chunk.samples else None


def context_of_salt(salt: bytes) -> int:
    return crc32(salt)


def entry_of(context: int, token_id: int, position: int) -> bytes:
    value = (context * 6364136223846793005 + token_id * 2862933555777941757 + position + 1) & _MASK
    return (value ^ value >> 29).to_bytes(ENTRY_BYTES, "little")


def golden(request: Request, seed: int | None, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What an undisturbed run answers. seed: the request's, or the one that was minted for it."""
    sampling, token_ids = request.sampling, list(request.token_ids)
    context = context_of_salt(request.cache_salt)
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
    """A harmless token; `banned` ones are not sampled."""
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
    """What chance is keyed by: nothing, where the likeliest token is taken."""
    if sampling.temperature == 0:
        return 0
    assert seed is not None, "a gateway mints a seed for whoever has none"
    return seed
