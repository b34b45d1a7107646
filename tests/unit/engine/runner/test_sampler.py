"""From logits to tokens. Shapes: R rows, V vocabulary."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.runner import sampler as sampler_module
from baton.engine.runner.logits_processors import LOGITS_PROCESSORS
from baton.engine.runner.sampler import Sampler, copy_logprobs, read_logprobs
from baton.engine.scheduler.sequence import Row, ScheduledChunk, Sequence
from baton.errors import ConfigError, InvalidRequest
from baton.request import Request, SamplingParams, TokenIds
from tests.batches import make_batch, make_sequence, rest_of
from tests.tiny_models import generate, run_to_end, tiny_engine

CPU = torch.device("cpu")
VOCAB_SIZE = 37
tokens = st.integers(0, VOCAB_SIZE - 1)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(sequence: Sequence, logits_V: Tensor) -> Tensor:
    result = logits_V.clone()
    for processor in LOGITS_PROCESSORS.values():
        if processor.applies(sequence.sampling):
            processor.process_rows(result[None], {0: Row(sequence)})
    return result


def grown(row: Row) -> Sequence:
    """The sequence as it is once the row's drafts are its tokens."""
    sequence = row.sequence
    return replace(sequence, token_ids=[*sequence.token_ids, *row.drafts])


def by_definition(sequence: Sequence, logits_V: Tensor) -> list[float]:
    """Token by token, in vLLM's order."""
    sampling, seen = sequence.sampling, set(sequence.token_ids)
    counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    result = []
    answer = sequence.token_ids[sequence.num_prompt_tokens :]
    for token, logit in enumerate(logits_V.tolist()):
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            logit = float("-inf")
        for word in sampling.bad_words_token_ids:
            if [*answer, token][-len(word) :] == list(word):
                logit = float("-inf")
        logit += sampling.logit_bias.get(token, 0.0)
        if token in sequence.stop_ids and sequence.num_generated_tokens < sampling.min_tokens:
            logit = float("-inf")
        if token in seen:
            logit = logit * sampling.repetition_penalty if logit < 0 else logit / sampling.repetition_penalty
        if token in counts:
            logit -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty
        result.append(logit)
    return result


@given(
    prompt=st.lists(tokens, min_size=1, max_size=12),
    generated=st.lists(tokens, max_size=12),
    repetition_penalty=st.sampled_from((0.5, 1.0, 1.7)),
    presence_penalty=st.sampled_from((-1.5, 0.0, 0.8)),
    frequency_penalty=st.sampled_from((-0.3, 0.0, 1.1)),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.integers(0, 14),
)
def test_processors_agree_with_a_loop_over_the_vocabulary(
    prompt: list[int], generated: list[int], **sampling: Any
) -> None:
    sequence, logits = make_sequence("s", prompt, generated, **sampling), random_logits(1)[0]
    expected = torch.tensor(by_definition(sequence, logits))
    torch.testing.assert_close(adjusted(sequence, logits), expected)


@given(
    samplings=st.lists(
        st.fixed_dictionaries(
            {
                "repetition_penalty": st.sampled_from((0.5, 1.0, 1.7)),
                "presence_penalty": st.sampled_from((-1.5, 0.0, 0.8)),
                "frequency_penalty": st.sampled_from((-0.3, 0.0, 1.1)),
                "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
                "stop_token_ids": st.lists(tokens, max_size=3).map(tuple),
                "min_tokens": st.integers(0, 5),
                "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=20).map(tuple),
                "bad_words_token_ids": st.lists(
                    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4
                ).map(tuple),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=6, max_size=6),
    steps=st.lists(st.lists(tokens, min_size=6, max_size=6), min_size=1, max_size=5),
)
def test_rows_of_growing_sequences_are_each_changed_by_their_own_parameters(
    samplings: list[dict[str, Any]], prompts: list[list[int]], steps: list[list[int]]
) -> None:
    sequences = [make_sequence(str(i), prompts[i], **each) for i, each in enumerate(samplings)]
    for step, new_tokens in enumerate(steps):
        # The rows of each sequence: after its own tokens, and after one and two drafts.
        rows = [Row(each, new_tokens[:num]) for each in sequences for num in range(3)]
        logits = random_logits(len(rows), step)
        expected = torch.tensor(
            [by_definition(grown(row), logits_V) for row, logits_V in zip(rows, logits, strict=True)]
        )
        for processor in LOGITS_PROCESSORS.values():
            applying = {i: row for i, row in enumerate(rows) if processor.applies(row.sequence.sampling)}
            if applying:
                processor.process_rows(logits, applying)
        torch.testing.assert_close(logits, expected)
        for sequence, token in zip(sequences, new_tokens, strict=False):
            sequence.token_ids.append(token)


class EvenTokens:
    """Bans odd token ids. A logits processor from outside the tree."""

    def applies(self, sampling: SamplingParams) -> bool:
        return bool(sampling.extra_args.get("even_only"))

    def process(self, logits_V: Tensor, row: Row) -> None:
        logits_V[1::2] = float("-inf")


def test_outside_processor_changes_only_its_own_requests(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, logits_processors=(f"{__name__}:EvenTokens",))
    even = SamplingParams(extra_args={"even_only": True}, temperature=0.0, max_tokens=12)
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    engine.add(Request(request_id="even", token_ids=TokenIds.of((1, 2, 3)), sampling=even))
    engine.add(Request(request_id="any", token_ids=TokenIds.of((1, 2, 3)), sampling=plain))
    answers: dict[str, list[int]] = {"even": [], "any": []}
    for output in run_to_end(engine):
        answers[output.request_id].append(output.token_id or 0)
    assert len(answers["even"]) == 12 and not any(token % 2 for token in answers["even"])
    usual = tiny_engine(tiny_model)
    assert answers["any"] == [each.token_id for each in generate(usual, [1, 2, 3], max_tokens=12)]
    with pytest.raises(
        InvalidRequest, match="extra_args: no logits processor of this server takes even_only"
    ):
        usual.add(Request(request_id="even", token_ids=TokenIds.of((1, 2, 3)), sampling=even))
    for cut in range(1, 12):  # as on a worker that takes over the request
        begun = Request(
            request_id="even",
            token_ids=TokenIds.of((1, 2, 3)),
            sampling=even,
            generated_token_ids=tuple(answers["even"][:cut]),
        )
        engine.add(begun)
        assert [each.token_id for each in run_to_end(engine)] == answers["even"][cut:]


@pytest.mark.parametrize(
    "name", ["nowhere:Even", f"{__name__}:Nothing", f"{__name__}:CPU", "json:JSONDecoder"]
)
def test_outside_processor_that_cannot_be_loaded_is_named(tiny_model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors: '{name}'"):
        tiny_engine(tiny_model, logits_processors=(name,))


def test_parameters_that_ban_every_token_are_refused(tiny_model: Path) -> None:
    sampling = SamplingParams(allowed_token_ids=(5, 7), stop_token_ids=(7, 5, 9), min_tokens=2)
    request = Request(request_id="r", token_ids=TokenIds.of((1, 2)), sampling=sampling)
    with pytest.raises(InvalidRequest, match="allowed_token_ids: each of them ends the answer"):
        tiny_engine(tiny_model).add(request)


def test_tokens_are_given_to_the_chunks_that_sample() -> None:
    sequences = [make_sequence(name, range(5)) for name in "abc"]
    batch = make_batch(rest_of(sequences[0], 4), ScheduledChunk(sequences[1], 0, 3), rest_of(sequences[2], 1))
    logits = random_logits(2)
    sampled = Sampler(CPU).sample(batch, logits.clone()).wait()
    greedy = logits.argmax(-1).tolist()
    assert sampled.token_ids == [greedy[0], None, greedy[1]]
    assert not sampled.logprobs and not sampled.prompt_logprobs


def test_row_with_nan_fails_alone() -> None:
    sequences = [make_sequence(name, range(5), logprobs=2, temperature=1.0) for name in "abc"]
    batch = make_batch(*(rest_of(sequence) for sequence in sequences))
    logits = random_logits(3)
    whole = Sampler(CPU).sample(batch, logits.clone()).wait()
    logits[1, 7] = float("nan")
    sampled = Sampler(CPU).sample(batch, logits).wait()
    assert sampled.failed == [sequences[1]] and whole.failed == []
    assert sampled.token_ids == [whole.token_ids[0], None, whole.token_ids[2]]
    assert sampled.logprobs == {key: whole.logprobs[key] for key in (("a", 0, 0), ("c", 0, 0))}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_that_bans_every_token_ends_alone(temperature: float) -> None:
    sequences = [make_sequence(name, range(5), logprobs=2, temperature=temperature) for name in "abc"]
    batch = make_batch(*(rest_of(sequence) for sequence in sequences))
    logits = random_logits(3)
    whole = Sampler(CPU).sample(batch, logits.clone()).wait()
    logits[1] = float("-inf")
    sampled = Sampler(CPU).sample(batch, logits).wait()
    assert (sampled.failed, sampled.banned, whole.banned) == ([], [sequences[1]], [])
    assert sampled.token_ids == [whole.token_ids[0], None, whole.token_ids[2]]
    assert sampled.logprobs == {key: whole.logprobs[key] for key in (("a", 0, 0), ("c", 0, 0))}


def drawn_beside(company: list[Sequence]) -> list[int | None]:
    """Five tokens of one sequence; at each step one of those before it has left."""
    sampler, ours = Sampler(CPU), make_sequence("ours", [1, 2, 3], temperature=1.0, seed=7, top_p=0.9)
    drawn: list[int | None] = []
    for step in range(5):
        sequences = [*company[step:], ours]
        batch = make_batch(*(rest_of(sequence, sequence.num_tokens - 1) for sequence in sequences))
        drawn.append(
            sampler.sample(batch, random_logits(1, step).repeat(len(sequences), 1)).wait().token_ids[-1]
        )
        ours.token_ids.append(drawn[-1] or 0)
    return drawn


def test_sequence_draws_the_same_tokens_in_any_batch() -> None:
    company = [make_sequence(str(i), [i], temperature=2.0 * (i % 2), seed=i) for i in range(4)]
    assert drawn_beside(company) == drawn_beside([])
    assert len(set(drawn_beside([]))) > 1


def test_reused_key_has_its_new_parameters() -> None:
    sampler, logits = Sampler(CPU), random_logits(1)
    sampler.sample(make_batch(rest_of(make_sequence("s", [1]))), logits.clone())
    likeliest = int(logits.argmax())
    banned = make_sequence("s", [1], logit_bias={likeliest: -100.0})
    assert sampler.sample(make_batch(rest_of(banned)), logits.clone()).wait().token_ids != [likeliest]


def test_logprobs_are_of_unprocessed_logits_and_only_on_request() -> None:
    asking = make_sequence("a", [1, 2], [3], logprobs=2, logit_bias={5: 100.0}, temperature=0.7, top_k=1)
    silent = make_sequence("b", [1, 2], [3])
    bare = make_sequence("c", [1, 2], [3], logprobs=0)
    logits = random_logits(3)
    sampled = (
        Sampler(CPU)
        .sample(make_batch(*(rest_of(s, 2) for s in (asking, silent, bare))), logits.clone())
        .wait()
    )
    assert sampled.logprobs.keys() == {(*asking.key, 1), (*bare.key, 1)}
    logprobs = logits.log_softmax(-1)
    ours, bares = sampled.logprobs[*asking.key, 1], sampled.logprobs[*bare.key, 1]
    assert sampled.token_ids[0] == ours.token_id == 5
    assert ours.logprob == pytest.approx(float(logprobs[0, 5]))
    assert ours.rank == 1 + int((logprobs[0] > logprobs[0, 5]).sum())
    assert [token for token, _ in ours.top] == logprobs[0].topk(2).indices.tolist()
    assert bares.top == () and bares.rank == 1


def drafted(sequence: Sequence, drafts: list[int]) -> ScheduledChunk:
    """The decode of a sequence, with drafts."""
    return ScheduledChunk(sequence, sequence.num_tokens - 1, 1 + len(drafts), drafts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_up_to_the_first_that_would_not_be_sampled(temperature: float) -> None:
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "seed": 5,
        "repetition_penalty": 1.3,
        "logprobs": 2,
    }
    logits = random_logits(4)
    one_by_one, logprobs = make_sequence("s", [1, 2], [3], **sampling), []
    expected: list[int | None] = []
    for logits_V in logits:
        batch = make_batch(rest_of(one_by_one, one_by_one.num_tokens - 1))
        sampled = Sampler(CPU).sample(batch, logits_V[None].clone()).wait()
        logprobs.append(sampled.logprobs["s", 0, len(expected) + 1])
        expected.append(sampled.token_ids[0])
        one_by_one.token_ids.append(expected[-1] or 0)
    for num_right in range(4):
        drafts = [each or 0 for each in expected[:3]]
        if num_right < 3:
            drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
        sequence, beside = make_sequence("s", [1, 2], [3], **sampling), make_sequence("b", [1, 2], [3])
        batch = make_batch(rest_of(beside, 2), drafted(sequence, drafts), drafts={1: drafts})
        sampled = Sampler(CPU).sample(batch, torch.cat((logits[:1], logits)).clone()).wait()
        assert sampled.token_ids[1] == expected[0]
        assert sampled.accepted.get(1, []) == expected[1 : num_right + 1]
        for index in range(num_right + 1):
            ours = sampled.logprobs["s", 0, index + 1]
            assert ours == logprobs[index] and ours.token_id == expected[index]


def test_row_with_nan_after_an_accepted_draft_fails_only_when_it_comes_next() -> None:
    logits = random_logits(3)
    right = logits.argmax(-1).tolist()
    logits[1, 7] = float("nan")
    sequence = make_sequence("s", [1, 2], [3])
    batch = make_batch(drafted(sequence, right[:2]), drafts={0: right[:2]})
    sampled = Sampler(CPU).sample(batch, logits.clone()).wait()
    assert (sampled.token_ids, sampled.accepted, sampled.failed) == ([right[0]], {}, [])
    sequence.token_ids.append(right[0])
    following = Sampler(CPU).sample(make_batch(rest_of(sequence, 3)), logits[1:2].clone()).wait()
    assert following.failed == [sequence]


def prompt_rows(sampler: Sampler, sequence: Sequence, edges: list[int], logits: Tensor) -> Any:
    """Run the chunks between neighbouring edges; return the prompt logprobs of the last."""
    sampled = None
    for start, stop in pairwise(edges):
        chunk = ScheduledChunk(sequence, start, stop - start)
        sampled = sampler.sample(make_batch(chunk), logits[start:stop].clone()).wait()
        assert (sequence.key in sampled.prompt_logprobs) == (stop == sequence.num_tokens)
    assert sampled is not None
    return sampled.prompt_logprobs[sequence.key]


@given(
    num_tokens=st.integers(1, 20),
    num_top=st.integers(0, 4),
    cuts=st.sets(st.integers(1, 19)),
    again=st.booleans(),
)
def test_prompt_logprobs_do_not_depend_on_the_chunks(
    num_tokens: int, num_top: int, cuts: set[int], again: bool
) -> None:
    prompt = [(7 * i) % VOCAB_SIZE for i in range(num_tokens)]
    sequence, logits = make_sequence("s", prompt, prompt_logprobs=num_top), random_logits(num_tokens)
    edges = [0, *sorted(cut for cut in cuts if cut < num_tokens), num_tokens]
    sampler = Sampler(CPU)
    if again and len(edges) > 2:  # preempted after the first chunk: computed from the start once more
        sampler.sample(make_batch(ScheduledChunk(sequence, 0, edges[1])), logits[: edges[1]].clone())
    rows = prompt_rows(sampler, sequence, edges, logits)
    logprobs = logits.log_softmax(-1)
    assert rows[0] is None and len(rows) == num_tokens
    for position, row in enumerate(rows[1:], start=1):
        before = logprobs[position - 1]
        assert row.token_id == prompt[position] and len(row.top) == num_top
        assert row.logprob == pytest.approx(float(before[prompt[position]]))
        assert row.rank == 1 + int((before > before[prompt[position]]).sum())
        assert [token for token, _ in row.top] == before.topk(num_top).indices.tolist()


def test_prompt_rows_and_sampling_rows_are_separated() -> None:
    asking, plain = make_sequence("a", range(6), prompt_logprobs=0), make_sequence("b", range(4))
    decode, logits = make_sequence("c", [1], [2]), random_logits(1 + 4 + 1, seed=1)
    batch = make_batch(rest_of(decode, 1), ScheduledChunk(asking, 0, 4), rest_of(plain))
    sampled = Sampler(CPU).sample(batch, logits.clone()).wait()
    greedy = logits.argmax(-1).tolist()
    assert sampled.token_ids == [greedy[0], None, greedy[5]]
    assert not sampled.prompt_logprobs


def test_forgotten_sequence_leaves_no_logprobs_to_a_reused_key() -> None:
    sampler, first = Sampler(CPU), make_sequence("s", range(6), prompt_logprobs=0)
    sampler.sample(make_batch(ScheduledChunk(first, 0, 4)), random_logits(4))
    sampler.forget(first)
    second = make_sequence("s", [9], prompt_logprobs=0)
    assert prompt_rows(sampler, second, [0, 1], random_logits(1)) == (None,)


@given(
    num_rows=st.integers(0, 9), vocab_size=st.integers(1, 40), num_top=st.integers(0, 45), tied=st.booleans()
)
def test_logprob_rank_and_alternatives_agree_with_log_softmax(
    num_rows: int, vocab_size: int, num_top: int, tied: bool
) -> None:
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(num_rows)) * 3
    logits = logits.round() if tied else logits
    token_ids = [row * 7 % vocab_size for row in range(num_rows)]
    rows = read_logprobs(copy_logprobs(logits, torch.tensor(token_ids, dtype=torch.int64), num_top))
    assert [row.token_id for row in rows] == token_ids
    for row, logprobs_V in zip(rows, logits.double().log_softmax(-1).tolist(), strict=True):
        chosen = logprobs_V[row.token_id]
        assert row.logprob == pytest.approx(chosen, abs=1e-5)
        assert row.rank == 1 + sum(value > chosen for value in logprobs_V)
        assert len(row.top) == min(num_top, vocab_size)
        likeliest = sorted(logprobs_V, reverse=True)[: len(row.top)]
        assert [value for _, value in row.top] == pytest.approx(likeliest, abs=1e-5)
        assert all(value == pytest.approx(logprobs_V[token], abs=1e-5) for token, value in row.top)


def test_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((20, 11), generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(20) % 11
    at_once = read_logprobs(copy_logprobs(logits, token_ids, 3))
    for rows_at_once in (1, 7, 19, 20):
        monkeypatch.setattr(sampler_module, "ROWS_AT_ONCE", rows_at_once)
        assert read_logprobs(copy_logprobs(logits, token_ids, 3)) == at_once
