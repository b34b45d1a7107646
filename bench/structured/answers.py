"""Sampled answers of `tiny` at temperature 1: whether they are valid, and whether drafts change them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from baton.bench.report import Report, Row, at_least, at_most
from baton.bench.structured.batch import BATCH
from baton.bench.structured.cases import Case
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import load_engine
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, Request, SamplingParams
from baton.token_ids import TokenIds

PROMPTS: Final = ("k1=fig k2=plum\nk1?", "copy(sun moon star)=", "7+5=", "close ([{ =")
MAX_ANSWER_TOKENS: Final = 400


def sampled_answers(
    cases: Sequence[Case], num_answers: int, report: Report, speculative: Mapping[str, Any] | None = None
) -> list[tuple[Case, list[int], bool]]:
    """Return answers of `tiny` at temperature 1: the schema, the tokens, whether max_tokens cut it."""
    directory = resolve_model("tiny")
    tokenizer = Tokenizer.find(directory)
    assert tokenizer is not None
    prompts = [TokenIds.of(tokenizer.encode(prompt)) for prompt in PROMPTS]
    settings = {"model": str(directory), "device": "cpu", "cache": {"kv_cache_memory_bytes": 2**26}}
    engine = load_engine(engine_config({**settings, "speculative": speculative}))
    answers = [(cases[number % len(cases)], list[int](), [False]) for number in range(num_answers)]
    waiting, num_ended = iter(range(num_answers)), 0
    try:
        while num_ended < num_answers:
            while engine.scheduler.num_running + engine.scheduler.num_waiting < BATCH:
                if (number := next(waiting, None)) is None:
                    break
                sampling = SamplingParams(
                    max_tokens=MAX_ANSWER_TOKENS,
                    temperature=1.0,
                    seed=number,
                    structured_outputs=answers[number][0].form,
                )
                prompt = prompts[number // len(cases) % len(prompts)]
                engine.add(Request(request_id=str(number), token_ids=prompt, sampling=sampling))
            for output in engine.step():
                _, tokens, is_cut = answers[int(output.request_id)]
                if output.token_id is not None:
                    tokens.append(output.token_id)
                if output.finish_reason is not None:
                    num_ended += 1
                    is_cut[0] = output.finish_reason is FinishReason.LENGTH
            report.tell(f"answers{' with drafts' if speculative else ''}", num_ended / num_answers)
    finally:
        engine.close()
    return [(case, tokens, is_cut[0]) for case, tokens, is_cut in answers]


def error_of(case: Case, text: str) -> str | None:
    """Return why the text is no instance of the schema by jsonschema, or None."""
    import jsonschema

    validator = jsonschema.validators.validator_for(case.schema)
    checker = validator(case.schema, format_checker=validator.FORMAT_CHECKER)
    try:
        error = jsonschema.exceptions.best_match(checker.iter_errors(json.loads(text)))
    except ValueError as wrong:
        return str(wrong)
    return None if error is None else f"{error.message} at {error.json_path}"


def answer_rows(report: Report, cases: Sequence[Case], num_answers: int) -> list[Row]:
    """Return how many sampled answers are valid, and how many tokens drafts change."""
    tokenizer = Tokenizer.find(resolve_model("tiny"))
    assert tokenizer is not None
    plain = sampled_answers(cases, num_answers, report)
    invalid, num_cut = list[str](), 0
    for case, tokens, is_cut in plain:
        num_cut += is_cut
        error = None if is_cut else error_of(case, tokenizer.decode(tokens))
        if error is not None:
            invalid.append(f"{case.name}: {error}"[:200])
    num_whole = len(plain) - num_cut
    note = f"{num_whole:,} of {num_answers:,}, {num_cut:,} cut by max_tokens {MAX_ANSWER_TOKENS}"
    percent = 100 * (1 - len(invalid) / num_whole)
    rows = [at_least("whole answers that are valid", percent, "%", 100, note)]
    report.extra["invalid answers"] = invalid
    drafted = sampled_answers(cases, num_answers, report, {"method": "ngram"})
    num_differing = sum(one != other for (_, one, _), (_, other, _) in zip(plain, drafted, strict=True))
    note = f"of {sum(len(tokens) for _, tokens, _ in plain):,} tokens"
    return [*rows, at_most("answers that drafts change", num_differing, "", 0, note)]
