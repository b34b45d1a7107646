"""The model of numbers: every entry that it reads shows in what it says."""

import pytest

from baton.request import FinishReason, Request, SamplingParams
from baton.sim.engine import (
    ENTRY_BYTES,
    NUM_WORDS,
    KvMemory,
    context_of_salt,
    entry_of,
    golden,
    sample,
)
from tests.node_peers import id_of

MAX_MODEL_LEN = 32


def a_request(*token_ids: int, salt: bytes = b"", choice: int = 0, **sampling: object) -> Request:
    fields: dict[str, object] = {"max_tokens": 6, "seed": 1, **sampling}
    return Request(
        request_id=id_of("r"),
        token_ids=token_ids,
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        cache_salt=salt,
        choice=choice,
    )


def answer(request: Request) -> list[int]:
    return golden(request, request.sampling.seed, MAX_MODEL_LEN)[0]


def test_every_token_the_salt_the_choice_and_the_seed_matter() -> None:
    first = a_request(1, 2, 3)
    others = [
        a_request(9, 2, 3),
        a_request(1, 2, 9),
        a_request(1, 3, 2),
        a_request(1, 2, 3, salt=b"tenant"),
        a_request(1, 2, 3, choice=1),
        a_request(1, 2, 3, seed=2),
    ]
    answers = [answer(request) for request in (first, *others)]
    assert len({tuple(each) for each in answers}) == len(answers)
    assert answer(first) == answers[0]


def test_greedy_answers_have_no_seed() -> None:
    requests = [a_request(1, 2, temperature=0.0, seed=seed) for seed in (None, 7)]
    assert answer(requests[0]) == answer(requests[1])


def test_answer_ends_at_its_limit_or_the_model_s() -> None:
    assert golden(a_request(1, max_tokens=3), 1, MAX_MODEL_LEN)[1] is FinishReason.LENGTH
    assert len(answer(a_request(1, max_tokens=3))) == 3
    assert len(answer(a_request(1, 2, max_tokens=None))) == MAX_MODEL_LEN - 2


def test_stop_tokens_end_an_answer_but_not_before_its_least_length() -> None:
    free = answer(a_request(1))
    stopped, reason = golden(a_request(1, stop_token_ids=(free[1],)), 1, MAX_MODEL_LEN)
    assert (stopped, reason) == (free[:2], FinishReason.STOP)
    longer = answer(a_request(1, stop_token_ids=(free[1],), min_tokens=4))
    assert longer[0] == free[0] and free[1] not in longer[:3] and len(longer) >= 4


def test_only_harmless_tokens_are_sampled() -> None:
    sampled = {sample(context, 0, 0, 0, ()) for context in range(2000)}
    assert sampled == set(range(NUM_WORDS))


@pytest.mark.parametrize("damage", [0, 3 * ENTRY_BYTES, 7 * ENTRY_BYTES + 5])
def test_damage_of_any_byte_that_is_read_shows(damage: int) -> None:
    memory = KvMemory(num_pages=4, page_size=4)
    context = context_of_salt(b"")
    for position in range(8):
        memory.write((2, 0)[position // 4], position % 4, entry_of(context, position, position))
    whole = memory.read((2, 0), 8, context)
    place = damage + (2 * memory.page_bytes if damage < memory.page_bytes else -memory.page_bytes)
    memory.bytes[place] ^= 1
    assert memory.read((2, 0), 8, context) != whole
    memory.bytes[place] ^= 1
    assert memory.read((2, 0), 8, context) == whole
    assert memory.read((0, 2), 8, context) != whole


def test_what_lies_behind_the_last_token_is_not_read() -> None:
    memory = KvMemory(num_pages=2, page_size=4)
    before = memory.read((1, 0), 6, 0)
    memory.write(0, 2, b"\xff" * ENTRY_BYTES)
    assert memory.read((1, 0), 6, 0) == before
    memory.write(0, 1, b"\xff" * ENTRY_BYTES)
    assert memory.read((1, 0), 6, 0) != before
