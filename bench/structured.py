"""Structured output: masks, their cost in a batch, schemas with instances, sampled answers, hostile schemas.

- Masks are timed with vocabularies of 32,000 and 128,000 tokens, made here by byte-level BPE from the sources
  of Python's standard library. A token's time is that of its mask and of advancing the grammar, as processor
  time of the thread. xgrammar does the same work beside it, where it is installed.
- TPOT at batch 32: a Llama of 56 million parameters, with and without forms, in turns; the figure is the
  median of the ratios of pairs.
- Instances: each token of a valid instance must be allowed up to the end; no invalid instance may be. With
  `--schemas FOLDER` these are the lines of FOLDER/schemas.jsonl, otherwise a few schemas of the suite's own.
  A line is {"name", "schema", "tests": [{"valid", "data"}]}.
- Sampled answers of `tiny` at temperature 1 are checked with jsonschema, and sampled again with drafts.
- Hostile schemas go through the gateway's FormChecker beside ordinary forms of another tenant.

    python -m baton.bench.structured [--schemas FOLDER] [--only PART ...]
"""

import argparse
import asyncio
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.bench.engine.replica import LlamaShape, request_of
from baton.bench.report import Report, Row, Suite, at_least, at_most, percentile, plot_lines, ranked_shares
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.errors import InvalidRequest
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.text.tokenizer import Tokenizer
from baton.kernels.sample import WORD_BITS, num_mask_words
from baton.request import FinishReason, Request, SamplingParams, StructuredOutputs
from baton.rpc import process
from baton.structured_output import check_form, grammar_of, parser_limits
from baton.token_ids import TokenIds

VOCAB_SIZES: Final = (32_000, 128_000)
MASK_P50_BAR_US: Final = 60.0
MASK_P99_BAR_US: Final = 1000.0
TPOT_BAR: Final = 3.0  # % that forms add
VALID_BAR: Final = 97.0  # % of valid instances
HOSTILE_BAR_S: Final = 2.0
P99_BAR: Final = 2.0  # times, of ordinary forms beside hostile ones
MAX_TIMED_SCHEMAS: Final = 150  # xgrammar takes seconds to compile some
END: Final = "<|end|>"
END_ID: Final = 0

# Schemas of the suite's own.


class Instance(NamedTuple):
    """A value, and whether it fits its schema."""

    is_valid: bool
    data: Any


class Case(NamedTuple):
    """A schema with instances."""

    name: str
    schema: Any
    instances: tuple[Instance, ...]

    @property
    def form(self) -> StructuredOutputs:
        """The schema as a form."""
        return StructuredOutputs(json=json.dumps(self.schema))


PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ORDER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "price": {"type": "number", "minimum": 0},
        "date": {"type": "string", "format": "date"},
        "note": {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]},
    },
    "required": ["id", "price", "date"],
    "additionalProperties": False,
}
TREE: Final[dict[str, Any]] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def own_cases() -> list[Case]:
    """Return schemas as function calls and extractions have them."""
    person, order = {"name": "Ada", "age": 36, "tags": ["red"]}, {"id": "ABC-1234", "price": 1.5}
    dated = {**order, "date": "2024-02-29"}
    tree = {"value": 1, "children": [{"value": -2}, {"value": 3, "children": []}]}
    return [
        Case("person", PERSON, (Instance(True, person), Instance(False, {**person, "age": 131}))),
        Case("order", ORDER, (Instance(True, dated), Instance(False, {**dated, "id": "abc"}))),
        Case("tree", TREE, (Instance(True, tree), Instance(False, {"value": 1, "children": [{}]}))),
    ]


def read_cases(folder: Path | None) -> list[Case]:
    """Return the schemas of FOLDER/schemas.jsonl, or the suite's own."""
    if folder is None:
        return own_cases()
    with (folder / "schemas.jsonl").open(encoding="utf-8") as lines:
        return [
            Case(
                found["name"],
                found["schema"],
                tuple(Instance(test["valid"], test["data"]) for test in found["tests"]),
            )
            for found in map(json.loads, lines)
        ]


def honoured(cases: Iterable[Case]) -> tuple[list[Case], dict[str, str]]:
    """Return the schemas that are served, and name -> why the others are refused."""
    kept, refused = list[Case](), dict[str, str]()
    for case in cases:
        try:
            check_form(case.form)
            kept.append(case)
        except InvalidRequest as error:
            refused[case.name] = str(error)
    return kept, refused


# Tokenizers.


def tokenizer_text(vocab_size: int, cache: Path | None = None) -> str:
    """Return the tokenizer.json of a byte-level BPE; smaller vocabularies are the beginning of the largest.

    cache: the folder where the largest is kept; else the system's folder of temporary files.
    """
    largest = max(VOCAB_SIZES)
    path = (cache or Path(tempfile.gettempdir())) / f"baton-bench-bpe-{largest}-{os.getuid()}.json"
    if not path.exists():
        _train(largest, path)
    tokenizer = json.loads(path.read_text("utf-8"))
    model, ids = tokenizer["model"], tokenizer["model"]["vocab"]
    model["vocab"] = {token: id_ for token, id_ in ids.items() if id_ < vocab_size}
    model["merges"] = [pair for pair in model["merges"] if ids["".join(pair)] < vocab_size]
    return json.dumps(tokenizer)


def _train(vocab_size: int, path: Path) -> None:
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        min_frequency=1,
        show_progress=False,
    )
    trained.train_from_iterator(_training_texts(), trainer)
    if trained.get_vocab_size() != vocab_size:
        raise RuntimeError(f"the tokenizer has {trained.get_vocab_size()} tokens of {vocab_size}")
    fresh = path.with_suffix(f".{os.getpid()}")
    trained.save(str(fresh))
    fresh.replace(path)


def _training_texts() -> Iterator[str]:
    """The standard library, and invented words, as it has too few of its own."""
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(source.parts):
            yield source.read_text("utf-8", "replace")
    rng = random.Random(0)
    syllables = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    for _ in range(200):
        yield " ".join("".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(500))


# Masks.


def spellings(case: Case) -> Iterator[tuple[Instance, str]]:
    """Each instance as JSON text, in turns on one line and indented."""
    for number, instance in enumerate(case.instances):
        yield (
            instance,
            json.dumps(instance.data, indent=None if number % 2 else 2, ensure_ascii=False),
        )


class Verdicts(NamedTuple):
    """Instances by the mask's verdict, and the seconds of each token."""

    counts: Counter[tuple[bool, bool]]  # (is valid, is accepted)
    wrong: list[str]
    token_s: list[float]


def follow_instances(cases: Iterable[Case], tokenizer: LLTokenizer) -> Verdicts:
    """Let the grammar of each schema mask and take the tokens of each instance."""
    verdicts = Verdicts(Counter(), [], [])
    mask_W = np.zeros(num_mask_words(tokenizer.vocab_size), np.int32)
    for case in cases:
        compiled = LLMatcher(tokenizer, grammar_of(case.form), log_level=0, limits=parser_limits())
        for instance, text in spellings(case):
            matcher, is_accepted = compiled.deep_copy(), True
            for token in tokenizer.tokenize_str(text):
                began_s = time.thread_time()
                matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
                is_accepted = _allows(mask_W, token) and matcher.consume_tokens([token])
                verdicts.token_s.append(time.thread_time() - began_s)
                if not is_accepted:
                    break
            is_accepted = is_accepted and matcher.is_accepting()
            verdicts.counts[instance.is_valid, is_accepted] += 1
            if is_accepted != instance.is_valid:
                verdicts.wrong.append(f"{case.name}: {matcher.get_error()[:80]}")
    return verdicts


def _allows(mask_W: "np.ndarray[Any, Any]", token: int) -> bool:
    return bool(int(mask_W[token // WORD_BITS]) >> token % WORD_BITS & 1)


def follow_with_xgrammar(cases: Iterable[Case], text: str, tokenizer: LLTokenizer) -> Verdicts:
    """Do the same with xgrammar; a schema that it refuses counts for nothing."""
    import xgrammar

    vocab = json.loads(text)["model"]["vocab"]
    info = xgrammar.TokenizerInfo(
        sorted(vocab, key=vocab.get),
        xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=len(vocab),
        stop_token_ids=[END_ID],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    verdicts = Verdicts(Counter(), [], [])
    mask_1W = np.zeros((1, num_mask_words(len(vocab))), np.int32)
    for case in cases:
        try:
            compiled = compiler.compile_json_schema(json.dumps(case.schema))
        except Exception as error:  # its kinds are many
            verdicts.wrong.append(f"{case.name}: {error}"[:80])
            continue
        for instance, spelled in spellings(case):
            matcher, is_accepted = xgrammar.GrammarMatcher(compiled), True
            for token in tokenizer.tokenize_str(spelled):
                began_s = time.thread_time()
                matcher.fill_next_token_bitmask(mask_1W)
                is_accepted = _allows(mask_1W[0], token) and matcher.accept_token(token)
                verdicts.token_s.append(time.thread_time() - began_s)
                if not is_accepted:
                    break
            if is_accepted:
                matcher.fill_next_token_bitmask(mask_1W)
            verdicts.counts[instance.is_valid, is_accepted and _allows(mask_1W[0], END_ID)] += 1
    return verdicts


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """xgrammar writes a warning for each constraint that it drops."""
    kept, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(silent)


def mask_rows(report: Report, cases: Sequence[Case]) -> list[Row]:
    """Return the rows of the times of masks, and let the report plot them."""
    rows = list[Row]()
    timed, curves = cases[:: -(-len(cases) // MAX_TIMED_SCHEMAS)], dict[str, list[float]]()
    for vocab_size in VOCAB_SIZES:
        report.tell(f"masks, vocabulary of {vocab_size:,}")
        text = tokenizer_text(vocab_size)
        tokenizer = LLTokenizer(text, eos_token=END_ID)
        times_us = [1e6 * each for each in follow_instances(timed, tokenizer).token_s]
        name = f"mask, vocabulary of {vocab_size:,}"
        note = f"{len(times_us):,} tokens of {len(timed)} schemas, processor time"
        rows += [
            at_most(f"{name}: p50", percentile(times_us, 50), "us", MASK_P50_BAR_US, note),
            at_most(f"{name}: p99", percentile(times_us, 99), "us", MASK_P99_BAR_US),
        ]
        curves[f"{vocab_size:,}"] = times_us
        if find_spec("xgrammar") is None:
            rows.append(Row(f"xgrammar, {name}", None, "us", note="pip install xgrammar"))
            continue
        with _silent_stderr():
            found = follow_with_xgrammar(timed, text, tokenizer)
        times_us = [1e6 * each for each in found.token_s]
        note = (
            f"{found.counts[False, True]} invalid instances accepted, "
            f"{found.counts[True, False]} valid refused, {len(found.wrong)} schemas refused"
        )
        rows += [
            Row(f"xgrammar, {name}: p50", percentile(times_us, 50), "us", note=note),
            Row(f"xgrammar, {name}: p99", percentile(times_us, 99), "us"),
        ]
        curves[f"{vocab_size:,}, xgrammar"] = times_us
    panels = {"mask and advance": {name: ranked_shares(times) for name, times in curves.items()}}
    report.plot = lambda path: plot_lines(
        path, panels, x_label="us", y_label="share of tokens", is_log=True, is_stepped=True
    )
    report.extra["token us, by percentile"] = {
        name: [percentile(times, share) for share in range(101)] for name, times in curves.items()
    }
    return rows


# A batch with forms and without.

BATCH: Final = 32
NUM_ANSWER_TOKENS: Final = 64
LLAMA_56M: Final = LlamaShape(
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=min(VOCAB_SIZES),
    max_positions=2048,
)


def batch_engine(directory: Path) -> Engine:
    """Return an engine with dummy weights and the smaller tokenizer."""
    LLAMA_56M.write(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": END_ID}))
    (directory / "tokenizer.json").write_text(tokenizer_text(LLAMA_56M.vocab_size))
    cache = {"kv_cache_memory_bytes": 2**29}
    return load_engine(engine_config({"model": str(directory), "load_format": "dummy", "cache": cache}))


def step_s(engine: Engine, forms: Sequence[StructuredOutputs | None]) -> float:
    """Return the seconds of a decode step of a batch; its sequences take turns at the forms.

    No answer ends before its last token, and every prompt is in the prefix cache.
    """
    rng = random.Random(1)
    prompts = [rng.sample(range(1, LLAMA_56M.vocab_size), 64) for _ in range(BATCH)]
    for prompt in prompts:
        engine.add(request_of(prompt, SamplingParams(max_tokens=1)))
    while engine.has_work():
        engine.step()
    for number, prompt in enumerate(prompts):
        form = forms[number % len(forms)]
        sampling = SamplingParams(
            max_tokens=NUM_ANSWER_TOKENS, temperature=0.0, ignore_eos=form is None, structured_outputs=form
        )
        engine.add(request_of(prompt, sampling))
    times_s, num_tokens = list[float](), 0
    while engine.has_work():
        began_s = time.perf_counter()
        num_tokens += len(engine.step())
        times_s.append(time.perf_counter() - began_s)
    if num_tokens != BATCH * NUM_ANSWER_TOKENS:
        raise RuntimeError(
            f"{num_tokens} tokens instead of {BATCH * NUM_ANSWER_TOKENS}: an answer ended early"
        )
    return sum(times_s[2:]) / len(times_s[2:])  # without those that compile and compute the prompts' ends


def batch_rows(report: Report, num_pairs: int) -> list[Row]:
    """Return what forms add to the time of a token at batch 32."""
    forms = [
        StructuredOutputs(json=json.dumps({"type": "array", "minItems": 500, "items": items}))
        for items in (PERSON, ORDER)
    ]
    with tempfile.TemporaryDirectory() as folder, process.freeze_gc():
        engine = batch_engine(Path(folder))
        step_s(engine, [None])
        step_s(engine, forms)
        before, with_s, without_s = engine.load(), list[float](), list[float]()
        for pair in range(num_pairs):
            report.tell(f"batch of {BATCH}", pair / num_pairs)
            for is_on in (True, False)[:: 1 if pair % 2 else -1]:
                (with_s if is_on else without_s).append(step_s(engine, forms if is_on else [None]))
        after = engine.load()
        engine.close()
    added = 100 * (median(on / off for on, off in zip(with_s, without_s, strict=True)) - 1)
    mask_us = (after.mask_us - before.mask_us) / (after.num_masks - before.num_masks)
    note = (
        f"{1e3 * median(without_s):.2f} -> {1e3 * median(with_s):.2f} ms, "
        f"a mask takes {mask_us:.0f} us of the step"
    )
    return [at_most(f"TPOT added at batch {BATCH}", added, "%", TPOT_BAR, note)]


# Instances and answers.


def instance_rows(
    report: Report, cases: Sequence[Case], kept: Sequence[Case], refused: Mapping[str, str]
) -> list[Row]:
    """Return the rows of valid and invalid instances. kept, refused: as `honoured` returns them."""
    report.tell("instances")
    verdicts = follow_instances(kept, LLTokenizer(tokenizer_text(max(VOCAB_SIZES)), eos_token=END_ID))
    num_valid = sum(instance.is_valid for case in cases for instance in case.instances)
    num_accepted = verdicts.counts[True, True]
    num_kept = num_accepted + verdicts.counts[True, False]
    unnamed = sum(not _names_a_keyword(why, case.schema) for case in cases if (why := refused.get(case.name)))
    reasons = Counter(why.splitlines()[0] for why in refused.values())
    report.extra |= {"refused": dict(reasons.most_common()), "wrong": verdicts.wrong}
    note = f"{num_valid}; {num_valid - num_kept} belong to the {len(refused)} schemas that are refused"
    return [
        at_least("valid instances accepted", 100 * num_accepted / num_valid, "%", VALID_BAR, note),
        Row("the same, of schemas that are served", 100 * num_accepted / max(1, num_kept), "%"),
        at_most("invalid instances accepted", verdicts.counts[False, True], "", 0),
        at_most("refusals that name no keyword", unnamed, "", 0, f"of {len(refused)}"),
    ]


def _names_a_keyword(why: str, schema: Any) -> bool:
    """True when the message has a key of the schema, or the value of a `format`."""
    return any(word in why for word in _keywords(schema))


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(_keywords, schema.values()))


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


# Hostile schemas.


def hostile_forms(num_forms: int, seed: int) -> list[tuple[str, StructuredOutputs | None]]:
    """Return forms that are slow, large or endless to compile, each with the name of its family.

    None: the gateway refuses the form before it is checked, because it is too large.
    """
    rng = random.Random(seed)
    families = list(_FAMILIES.items())
    chosen = [families[number % len(families)] for number in range(num_forms)]
    return [(name, _form_of(make(rng))) for name, make in chosen]


def _form_of(fields: dict[str, Any]) -> StructuredOutputs | None:
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except (msgspec.ValidationError, InvalidRequest):
        return None


def _json(schema: Any) -> dict[str, Any]:
    return {"json": schema if isinstance(schema, str) else json.dumps(schema)}


def _nested(rng: random.Random) -> dict[str, Any]:
    depth = rng.choice((100, 500, 900, 2000))
    parts = (('{"type":"array","items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}"))
    begin, end = rng.choice(parts)
    return _json(begin * depth + "{}" + end * depth)


def _enum(rng: random.Random) -> dict[str, Any]:
    num, length = rng.choice(((7000, 5), (2500, 20), (120, 500), (9000, 9)))
    return _json({"enum": ["".join(rng.choices("abcdef", k=length)) for _ in range(num)]})


def _regex(rng: random.Random) -> str:
    num = rng.randint(5, 1500)
    inner = rng.choice(("a", "[a-z]", "(a|b)", "\\\\w"))
    return rng.choice(
        (
            f"({inner}+)+b" * (num % 40 + 1),
            f".*{inner}.{{{num}}}",
            f"({inner}|{inner})*" * num + "b",
            f"((({inner}{{1,{num}}}){{1,{num}}}){{1,{num}}}){{1,9}}",
            "|".join(f"{inner}{{{each}}}x" for each in range(num)),
            "(" * num + inner + ")" * num,
            f"(.*{inner}){{{num}}}",
            f"(?:{inner}?){{{num}}}{inner}{{{num}}}",
        )
    )


def _recursive(rng: random.Random) -> dict[str, Any]:
    num = rng.randint(1, 60)
    key = rng.choice(("allOf", "anyOf", "oneOf"))
    links = {
        f"d{each}": {
            key: [{"$ref": f"#/$defs/d{(each + 1) % num}"}, {"$ref": f"#/$defs/d{(each + 2) % num}"}]
        }
        for each in range(num)
    }
    return _json({"$defs": links, "$ref": "#/$defs/d0"})


def _product(rng: random.Random) -> dict[str, Any]:
    one = {"anyOf": [{"minLength": each, "pattern": f"a{{{each}}}"} for each in range(rng.randint(3, 12))]}
    return _json({rng.choice(("allOf", "oneOf")): [one] * rng.randint(3, 12)})


def _bounds(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((1000, 100_000, 2**31, 10**18))
    return _json(
        rng.choice(
            (
                {"type": "string", "minLength": size, "maxLength": 2 * size},
                {"type": "array", "minItems": size, "items": {"type": "integer"}},
                {"type": "integer", "minimum": -size, "maximum": size * 7 + 3, "multipleOf": 9973},
                {"type": "number", "multipleOf": 1 / size, "minimum": 0.1234567891},
                {"type": "string", "pattern": f"^.{{{min(size, 10**6)}}}$"},
                {"type": "object", "minProperties": size, "additionalProperties": {"type": "null"}},
            )
        )
    )


def _properties(rng: random.Random) -> dict[str, Any]:
    num = rng.choice((200, 1000, 1800))
    if rng.random() < 0.5:
        return _json({"properties": {f"p{each}": {"pattern": f"a.*{each}"} for each in range(num)}})
    return _json({"patternProperties": {f"^a{{{each}}}.*b{each}$": {} for each in range(num)}})


def _grammar(rng: random.Random) -> dict[str, Any]:
    num = rng.randint(10, 1800)
    chain = "\n".join(f"r{each}: r{each + 1} r{each + 1} | r{each + 1}" for each in range(num))
    return {
        "grammar": rng.choice(
            (
                f'start: r0\n{chain}\nr{num}: "a"',
                "start: start start | start",
                'start: (("a"*)*)*',
                "root ::= " + "(" * num + '"a"' + ")" * num,
                f"start: /{_regex(rng)}/",
            )
        )
    }


def _wrapped(rng: random.Random) -> dict[str, Any]:
    """Several hostile schemas in one."""
    makes = (_enum, _recursive, _product, _bounds, _properties)
    parts = [json.loads(rng.choice(makes)(rng)["json"]) for _ in range(3)]
    definitions = {key: value for part in parts for key, value in part.pop("$defs", {}).items()}
    return _json({"properties": {f"q{each}": part for each, part in enumerate(parts)}, "$defs": definitions})


_FAMILIES: Final = {
    "nested": _nested,
    "enum": _enum,
    "regex": lambda rng: {"regex": _regex(rng)},
    "pattern": lambda rng: _json({"type": "string", "pattern": _regex(rng)}),
    "recursive": _recursive,
    "product": _product,
    "bounds": _bounds,
    "properties": _properties,
    "grammar": _grammar,
    "wrapped": _wrapped,
}
WARMUP_TOKENS: Final = 24


def compile_and_walk_s(form: StructuredOutputs, tokenizer: LLTokenizer, rng: random.Random) -> float:
    """Return the seconds of compiling the form or of its slowest token, the longer of the two."""
    began_s = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=parser_limits())
    longest_s = time.thread_time() - began_s
    mask_W = np.zeros(num_mask_words(tokenizer.vocab_size), np.int32)
    for _ in range(WARMUP_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began_s = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        matcher.consume_tokens([int(rng.choice(allowed))])
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s


@dataclass
class HostileChecks:
    """The checks of hostile forms."""

    times_s: list[float] = field(default_factory=list)
    slowest: str = ""
    accepted: list[StructuredOutputs] = field(default_factory=list)
    num_refused: int = 0
    failed: list[str] = field(default_factory=list)  # neither accepted nor refused


async def check_hostile(
    checker: FormChecker, forms: Iterable[tuple[str, StructuredOutputs | None]]
) -> HostileChecks:
    """Check the forms one after another, as one tenant's are."""
    found = HostileChecks()
    for name, form in forms:
        if form is None:
            found.num_refused += 1
            continue
        began_s = time.monotonic()
        try:
            await checker.check("hostile", form)
            found.accepted.append(form)
        except InvalidRequest:
            found.num_refused += 1
        except Exception as error:  # every other exception is a failure of the check
            found.failed.append(f"{name}: {error!r}"[:200])
        took_s = time.monotonic() - began_s
        if took_s > max(found.times_s, default=0.0):
            found.slowest = name
        found.times_s.append(took_s)
    return found


async def ordinary_checks(
    checker: FormChecker, numbers: Iterator[int], until: asyncio.Event | int
) -> list[float]:
    """Check ordinary new forms of another tenant, one at a time; return the seconds of each."""
    times_s = list[float]()
    while not until.is_set() if isinstance(until, asyncio.Event) else len(times_s) < until:
        schema = {**PERSON, "title": str(next(numbers))}
        began_s = time.monotonic()
        await checker.check("good", StructuredOutputs(json=json.dumps(schema)))
        times_s.append(time.monotonic() - began_s)
        await asyncio.sleep(0.01)
    return times_s


async def hostile_rows(report: Report, num_forms: int, seed: int) -> list[Row]:
    """Return what hostile forms do to themselves and to others."""
    numbers, checker = count(), FormChecker()
    forms = hostile_forms(num_forms, seed)
    try:
        report.tell("ordinary forms alone")
        await ordinary_checks(checker, numbers, 20)
        alone_s = await ordinary_checks(checker, numbers, 300)
        report.tell("hostile forms")
        ended = asyncio.Event()
        beside = asyncio.create_task(ordinary_checks(checker, numbers, ended))
        found = await check_hostile(checker, forms)
        ended.set()
        beside_s = await beside
        alone_s += await ordinary_checks(checker, numbers, 300)  # before and after: the machine's load varies
    finally:
        await checker.close()
    note = f"{found.num_refused} refused, {len(found.accepted)} accepted; slowest: {found.slowest}"
    alone_ms, beside_ms = 1e3 * percentile(alone_s, 99), 1e3 * percentile(beside_s, 99)
    rows = [
        at_most(f"longest of {num_forms} hostile checks", max(found.times_s), "s", HOSTILE_BAR_S, note),
        at_most("hostile checks without an answer", len(found.failed), "", 0),
        at_most(
            "other tenant's p99 beside them",
            beside_ms / alone_ms,
            "times",
            P99_BAR,
            f"{alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside",
        ),
    ]
    report.tell("accepted hostile forms in an engine")
    tokenizer = LLTokenizer(tokenizer_text(min(VOCAB_SIZES)), eos_token=END_ID)
    rng = random.Random(seed)
    longest_s = max((compile_and_walk_s(form, tokenizer, rng) for form in found.accepted), default=0.0)
    note = "compiling, or one token, of those that are accepted"
    rows.append(at_most("longest wait in an engine", longest_s, "s", HOSTILE_BAR_S, note))
    report.extra["failed checks"] = found.failed
    return rows


PARTS: Final = ("instances", "masks", "batch", "answers", "hostile")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="of a schemas.jsonl with instances")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument("--pairs", type=int, default=9, help="batches with and without forms (9)")
    parser.add_argument("--answers", type=int, default=2000, help="sampled answers (2000)")
    parser.add_argument("--hostile", type=int, default=500, help="hostile schemas (500)")
    parser.add_argument("--seed", type=int, default=1, help="of the hostile schemas (1)")


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure each part, and print its rows."""
    cases = read_cases(options.schemas)
    kept, refused = honoured(cases)
    if not {"instances", "masks", "batch", "hostile"}.isdisjoint(options.only):
        report.tell("tokenizer: half a minute at first")
        tokenizer_text(max(VOCAB_SIZES))
    if "instances" in options.only:
        report.show("Instances", instance_rows(report, cases, kept, refused))
    if "masks" in options.only:
        report.show("Masks", mask_rows(report, kept))
    if "batch" in options.only:
        report.show("Batch", batch_rows(report, options.pairs))
    if "answers" in options.only:
        report.show("Answers", answer_rows(report, kept, options.answers))
    if "hostile" in options.only:
        rows = asyncio.run(hostile_rows(report, options.hostile, options.seed))
        report.show("Hostile forms", rows)


SUITE: Final = Suite("structured", "Structured output", add_options, measure)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
