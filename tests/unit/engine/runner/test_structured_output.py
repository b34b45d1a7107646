"""Answers have the form that was asked for, and the same tokens whatever happens on the way."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import jsonschema
import msgspec
import pytest
import torch

from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import ALL_BANNED, BAD_LOGITS, Engine, load_engine
from baton.engine.runner.logits_processors import LOGITS_PROCESSORS
from baton.engine.runner.sampler import Sampled, Sampler
from baton.engine.runner.structured_output import MAX_COMPILED, MAX_TENANTS, StructuredOutputMask
from baton.engine.scheduler.sequence import Batch, Plan, Row
from baton.engine.speculation.draft_lengths import StepCosts
from baton.errors import InvalidRequest
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, Request, SamplingParams, StepOutput, StructuredOutputs, TokenIds
from tests.batches import make_batch, make_sequence, rest_of
from tests.parity.runs import PreemptInTurn
from tests.tiny_models import pause, run_to_end, tiny_engine, token_ids, write_config

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

TINY: Final = resolve_model("tiny")
VOCAB_SIZE: Final = 1024  # of the logits; the tokenizer has fewer tokens
END_ID: Final = 1
SECOND_END_ID: Final = 2  # of a model with two
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: Final[dict[str, StructuredOutputs]] = {
    "json": StructuredOutputs(json=json.dumps(SCHEMA)),
    "regex": StructuredOutputs(regex="([a-z]{3} ){8}end"),
    "choice": StructuredOutputs(choice=("fig tree", "fig", "plum")),
    "grammar": StructuredOutputs(grammar='start: "(" start ")" | /[0-9]{2,6}/'),
    # Reasoning of bounded length, then a form.
    "frame": StructuredOutputs(
        choice=("fig", "plum"), frame='start: thought @form\nthought[lazy]: /[a-z ]{5,30}/ "</think>"'
    ),
}
PROMPTS: Final = ("k1=fig k2=plum\nk1?", "a", "7+5=")


def engine(**settings: Any) -> Engine:
    cache = {"page_size": 4, "kv_cache_memory_bytes": 2**22, **settings.pop("cache", {})}
    return load_engine(
        engine_config({"model": str(TINY), "device": "cpu", "max_model_len": 512, "cache": cache, **settings})
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    made = engine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.find(TINY)
    assert found is not None
    return found


def request_of(tokenizer: Tokenizer, request_id: str, sampling: SamplingParams) -> Request:
    token_ids = TokenIds.of(tokenizer.encode(PROMPTS[0]))
    return Request(request_id=request_id, token_ids=token_ids, sampling=sampling)


def requests(tokenizer: Tokenizer, temperature: float = 1.3) -> list[Request]:
    return [
        Request(
            request_id=f"{name} {number}",
            token_ids=TokenIds.of(tokenizer.encode(prompt)),
            sampling=SamplingParams(
                max_tokens=400, temperature=temperature, seed=number, structured_outputs=form
            ),
        )
        for name, form in FORMS.items()
        for number, prompt in enumerate(PROMPTS)
    ]


def answers(made: Engine, asked: list[Request], before_step: Any = None) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in asked}
    for request in asked:
        made.add(request)
    while made.has_work():
        if before_step is not None:
            before_step(made)
        for output in made.step():
            outputs[output.request_id].append(output)
        pause(made)
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_answers_have_their_form(plain: Engine, tokenizer: Tokenizer, temperature: float) -> None:
    texts: dict[str, str] = {}
    for request_id, outputs in answers(plain, requests(tokenizer, temperature)).items():
        assert outputs[-1].finish_reason is FinishReason.STOP
        texts[request_id] = tokenizer.decode([each.token_id or 0 for each in outputs])
    for number in range(len(PROMPTS)):
        jsonschema.validate(json.loads(texts[f"json {number}"]), SCHEMA)
        assert [len(word) for word in texts[f"regex {number}"].split()] == [3] * 9
        assert texts[f"choice {number}"] in (FORMS["choice"].choice or ())
        assert texts[f"grammar {number}"].strip("()").isdigit()
        thought, _, form = texts[f"frame {number}"].partition("</think>")
        assert 5 <= len(thought) <= 30 and form in ("fig", "plum")


WAYS: Final[dict[str, dict[str, Any]]] = {
    "asynchronous": {"scheduler": {"async_scheduling": True}},
    "short chunks": {"scheduler": {"max_num_batched_tokens": 16}},
    "two ranks": {"tensor_parallel_size": 2},
    "back from the host": {"cache": {"host_cache_memory_bytes": 2**22}},
    "drafts": {"speculative": {"method": "ngram", "prompt_lookup_min": 1}},
    "drafts of a model": {"speculative": {"model": str(TINY), "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("way", ["recomputed", *WAYS])
def test_tokens_are_those_of_an_undisturbed_run(plain: Engine, tokenizer: Tokenizer, way: str) -> None:
    expected = {key: token_ids(outputs) for key, outputs in answers(plain, requests(tokenizer)).items()}
    preempts = PreemptInTurn(evicts=way == "back from the host")
    disturbs = preempts if way in ("recomputed", "back from the host") else None
    with closing(engine(**WAYS.get(way, {}))) as made:
        found = answers(made, requests(tokenizer), disturbs)
        assert {key: token_ids(outputs) for key, outputs in found.items()} == expected


SAMPLINGS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0},
    {"temperature": 2.5, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 1e-6, "logit_bias": {5: 90.0}},
    {"temperature": 1.0, "allowed_token_ids": (1, *range(5, 140))},
)


def sampled(spread: float, *, masks_first: bool) -> tuple[list[list[int]], list[Sampled]]:
    """Answers to random logits, in every form with all parameters, and the results of the steps."""
    generator, mask = torch.Generator().manual_seed(1), StructuredOutputMask(TINY, VOCAB_SIZE, [END_ID])
    device, processors = torch.device("cpu"), LOGITS_PROCESSORS.values()
    sampler = Sampler(device, (*processors, mask)) if masks_first else Sampler(device, processors, mask)
    sequences = [
        make_sequence(f"{number}", (1, 2, 3), seed=number, structured_outputs=form, **sampling)
        for number, (form, sampling) in enumerate(product(FORMS.values(), SAMPLINGS))
    ]
    results: list[Sampled] = []
    for _ in range(30):
        logits = torch.randn((len(sequences), VOCAB_SIZE), generator=generator) * spread
        banned = {each for result in results for each in result.banned}
        live = [
            number
            for number, each in enumerate(sequences)
            if each not in banned and (not each.num_generated_tokens or each.token_ids[-1] > 1)
        ]
        batch = make_batch(*(rest_of(sequences[number], sequences[number].num_tokens - 1) for number in live))
        results.append(sampler.sample(batch, logits[live]).wait())
        for number, token_id in zip(live, results[-1].token_ids, strict=True):
            if token_id is not None:
                sequences[number].token_ids.append(token_id)
    return [each.token_ids[3:] for each in sequences], results


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_tokens_are_those_of_rows_that_are_masked_before_the_draw(spread: float) -> None:
    answers, results = sampled(spread, masks_first=False)
    expected, expected_results = sampled(spread, masks_first=True)
    assert answers == expected
    assert [each.logprobs for each in results] == [each.logprobs for each in expected_results]
    ended = [[each.key for each in result.banned] for result in results]
    assert ended == [[each.key for each in result.banned] for result in expected_results]
    assert any(ended), "some answers reach a place where no allowed token keeps the form"
    assert not any(result.failed for result in results)
    assert sum(map(len, answers)) > 500


def test_a_token_that_is_not_banned_is_in_the_mask(tokenizer: Tokenizer) -> None:
    """For each token of the vocabulary, along an answer in each form."""
    num_allowed = num_masked = 0
    for form in FORMS.values():
        mask = StructuredOutputMask(TINY, VOCAB_SIZE, [END_ID])
        sequence = make_sequence("s", (1,), structured_outputs=form)
        row, logits = Row(sequence), torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
        generator = torch.Generator().manual_seed(2)
        while sequence.token_ids[-1] != END_ID or len(sequence.token_ids) == 1:
            logits = torch.rand((1, VOCAB_SIZE), generator=generator)
            mask.process_rows(logits, {0: row})
            in_mask = set(logits[0].isfinite().nonzero().flatten().tolist())
            rows = dict.fromkeys(range(VOCAB_SIZE), row)
            allowed = rows.keys() - mask.banned(rows, [{token} for token in range(VOCAB_SIZE)]).keys()
            assert allowed <= in_mask
            num_allowed, num_masked = num_allowed + len(allowed), num_masked + len(in_mask)
            sequence.token_ids.append(int(logits[0].argmax()))
    assert num_allowed > 0.9 * num_masked, "only forced text and the end are left to the mask"


def test_tokens_that_the_form_forces_need_no_step_each(plain: Engine, tokenizer: Tokenizer) -> None:
    """Forced tokens are drafts: one step computes them all, and the model still chooses how to spell them."""
    form = StructuredOutputs(regex="the weather is (good|bad), and so is the road ahead")
    sampling = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=form)
    request = request_of(tokenizer, "r", sampling)
    expected = token_ids(answers(plain, [request])["r"])
    made, batches = engine(speculative={"method": "ngram"}), list[int]()
    made.on_batch = batches.append
    assert token_ids(answers(made, [request])["r"]) == expected
    assert len(batches) < 0.7 * len(expected)
    made.close()


def conversation(tokenizer: Tokenizer, answered: dict[str, list[StepOutput]]) -> list[Request]:
    """Return requests in every form. Each prompt has the answers of this form so far, with their ends."""
    asked: list[Request] = []
    biases: tuple[dict[int, float], ...] = ({}, {END_ID: 60.0}, {SECOND_END_ID: 60.0})
    for (name, form), bias, top_k in product(FORMS.items(), biases, (0, 20)):
        earlier = [token_ids(outputs) for key, outputs in answered.items() if key.startswith(name)]
        prompt = [token_id or 0 for each in earlier for token_id in each] + tokenizer.encode(PROMPTS[0])
        sampling = SamplingParams(
            seed=len(asked), top_k=top_k, max_tokens=200, structured_outputs=form, logit_bias=bias
        )
        key = f"{name} {len(asked)}"
        asked.append(Request(request_id=key, token_ids=TokenIds.of(prompt[-240:]), sampling=sampling))
    return asked


def test_drafts_that_run_over_the_end_of_a_form_change_no_token(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has two end tokens, and answers repeat earlier ones."""
    flat = {1: 1.0, 4096: 1.0}  # so all proposed tokens are computed
    monkeypatch.setattr("baton.engine.engine.time_steps", lambda *arguments: StepCosts(flat, flat))
    monkeypatch.setattr(StepCosts, "observe", lambda *arguments, **fields: None)
    directory = copytree(TINY, tmp_path / "model")
    ends = {"eos_token_id": [END_ID, SECOND_END_ID]}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    speculative, drafts = {"method": "suffix", "prompt_lookup_min": 1}, list[list[int]]()
    with (
        closing(engine(model=str(directory))) as plain,
        closing(engine(model=str(directory), speculative=speculative)) as drafting,
    ):
        apply = drafting.scheduler.apply

        def note(plan: Plan) -> Batch:
            batch = apply(plan)
            drafts.extend([*each] for each in batch.drafts.values())
            return batch

        monkeypatch.setattr(drafting.scheduler, "apply", note)
        expected: dict[str, list[StepOutput]] = {}
        for _ in range(3):
            asked = conversation(tokenizer, expected)
            expected, found = answers(plain, asked), answers(drafting, asked)
            assert {key: token_ids(each) for key, each in found.items()} == {
                key: token_ids(each) for key, each in expected.items()
            }
            assert {each[-1].token_id for each in found.values()} == {END_ID, SECOND_END_ID}
    for end in (END_ID, SECOND_END_ID):
        assert any(end in each[:-1] for each in drafts), "no draft has tokens after an end"


def test_nobody_waits_for_the_grammar_of_another(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, may_compile = engine(), threading.Event()
    monkeypatch.setattr(made._form_mask, "_matcher", _after(may_compile, made._form_mask._matcher))
    slow, quick = requests(tokenizer)[0], request_of(tokenizer, "quick", SamplingParams(max_tokens=5))
    made.add(slow)
    assert made.step() == [] and made.wait_s is not None and made.has_work()
    made.add(quick)
    assert {output.request_id for _ in range(5) for output in made.step()} == {"quick"}
    may_compile.set()
    found = run_to_end(made)
    assert token_ids(found) == token_ids(answers(made, [slow])[slow.request_id])
    made.add(msgspec.structs.replace(slow, request_id="again"))
    assert made.step() != [], "its grammar is known by now"
    made.abort("again")
    made.close()


def _after(event: threading.Event, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: object) -> Any:
        event.wait(30)
        return function(*arguments)

    return called


def test_answer_continues_after_any_token(plain: Engine, tokenizer: Tokenizer) -> None:
    """As on the worker that takes over a request, whose matcher sees the tokens at once."""
    for request in requests(tokenizer)[::3]:
        plain.add(request)
        whole = token_ids(run_to_end(plain))
        for cut in range(1, len(whole)):
            begun = tuple(token_id or 0 for token_id in whole[:cut])
            plain.add(
                Request(
                    request_id="r",
                    token_ids=request.token_ids,
                    sampling=request.sampling,
                    generated_token_ids=begun,
                )
            )
            assert token_ids(run_to_end(plain)) == whole[cut:]


def test_form_that_does_not_compile_fails_alone(plain: Engine, tokenizer: Tokenizer) -> None:
    good, other, *_ = requests(tokenizer)
    expected = token_ids(answers(plain, [good])[good.request_id])
    sampling = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="a("))
    bad = Request(request_id="bad", token_ids=other.token_ids, sampling=sampling)
    outputs = answers(plain, [bad, good])
    assert [each.finish_reason for each in outputs["bad"]] == [FinishReason.ERROR]
    assert outputs["bad"][0].error not in (None, BAD_LOGITS, ALL_BANNED)
    assert token_ids(outputs[good.request_id]) == expected
    plain.scheduler.check_integrity()


def test_form_whose_compiler_fails_once_fails_alone_and_is_compiled_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, failures = engine(), [RuntimeError("no memory")]
    sampling = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    form, plain = requests(tokenizer)[0], request_of(tokenizer, "plain", sampling)
    compiles = made._form_mask._matcher

    def fails_once(asked: StructuredOutputs) -> Any:
        if failures:
            raise failures.pop()
        return compiles(asked)

    monkeypatch.setattr(made._form_mask, "_matcher", fails_once)
    outputs = answers(made, [form, plain])
    (failed,) = outputs[form.request_id]
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "no memory")
    assert outputs["plain"][-1].finish_reason is FinishReason.LENGTH
    assert answers(made, [form])[form.request_id][-1].finish_reason is FinishReason.STOP
    made.scheduler.check_integrity()
    made.close()


def test_form_that_fails_leaves_the_cached_pages_of_its_prompt(plain: Engine, tokenizer: Tokenizer) -> None:
    good, sampling = requests(tokenizer)[0], SamplingParams(structured_outputs=StructuredOutputs(regex="a("))
    answers(plain, [good])
    answers(plain, [msgspec.structs.replace(good, request_id="bad", sampling=sampling)])
    assert answers(plain, [good])[good.request_id][0].num_cached_tokens > 0
    plain.scheduler.check_integrity()


def test_form_that_the_allowed_tokens_cannot_keep_ends_alone_in_an_error(
    plain: Engine, tokenizer: Tokenizer
) -> None:
    good, *_ = requests(tokenizer)
    expected = token_ids(answers(plain, [good])[good.request_id])
    allowed = (END_ID, *tokenizer.encode("fi"))
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature=temperature, structured_outputs=FORMS["choice"], allowed_token_ids=allowed
        )
        outputs = answers(plain, [request_of(tokenizer, "r", sampling), good])
        *tokens, last = outputs["r"]
        assert tokenizer.decode([each.token_id or 0 for each in tokens]) in ("f", "fi")
        assert (last.finish_reason, last.token_id) == (FinishReason.ERROR, None)
        assert last.error == ALL_BANNED and last.is_invalid
        assert token_ids(outputs[good.request_id]) == expected
    plain.scheduler.check_integrity()


def test_masks_grammars_and_failures_are_counted(tokenizer: Tokenizer) -> None:
    made = engine()
    good = [request for request in requests(tokenizer) if request.request_id.startswith("json")]
    num_tokens = sum(map(len, answers(made, good).values()))
    sampling = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="a("))
    answers(made, [Request(request_id="bad", token_ids=good[0].token_ids, sampling=sampling)])
    load = made.load()
    assert (load.num_masks, load.num_compiled_forms, load.num_failed_forms) == (num_tokens, 2, 1)
    assert load.mask_us > 0 and load.compile_us > 0
    made.close()


def test_grammars_of_many_forms_and_tenants_are_forgotten(tokenizer: Tokenizer) -> None:
    """The tokens are the same when a grammar is compiled again."""
    made = engine()
    sampling = SamplingParams(max_tokens=8, seed=1)
    prompt = TokenIds.of(tokenizer.encode("a"))

    def ask(tenant: str, form: StructuredOutputs) -> list[int | None]:
        asked = msgspec.structs.replace(sampling, structured_outputs=form)
        made.add(Request(request_id="r", token_ids=prompt, sampling=asked, tenant=tenant))
        return token_ids(run_to_end(made))

    wanted = StructuredOutputs(regex="[a-f]{3}")
    first = ask("one", wanted)
    for number in range(MAX_COMPILED + 1):
        ask("one", StructuredOutputs(regex=f"[a-f]{{{1 + number % 3}}}|x{number}"))
    ask("one", StructuredOutputs(choice=tuple(f"{n:06d}" for n in range(9000))))
    ask("one", StructuredOutputs(regex="a", frame="start: @form" + " " * 250_000))
    for number in range(MAX_TENANTS + 1):
        ask(f"tenant {number}", wanted)
    assert ask("one", wanted) == first
    made.close()


@pytest.mark.parametrize(("keys", "lacks"), [({"eos_token_id": 3}, "tokenizer"), ({}, "end token")])
def test_model_that_cannot_keep_a_form_refuses_it(keys: dict[str, int], lacks: str, tmp_path: Path) -> None:
    made = tiny_engine(write_config(tmp_path / "model", **keys))
    request = Request(
        request_id="r",
        token_ids=TokenIds.of([1]),
        sampling=SamplingParams(structured_outputs=StructuredOutputs(regex="a")),
    )
    with pytest.raises(InvalidRequest, match=lacks):
        made.add(request)
