"""Schemas with instances, tokenizers of a given size, and what masks allow and cost, alone and in a batch.

A token's time is that of its mask and of advancing the grammar, as processor time of the thread. In a batch,
forms add to the time of a token of a Llama of 56 million parameters, with and without them in turns.
"""

import json
import os
import random
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from baton.bench.engine.replica import LLAMA_56M, generate, request_of
from baton.bench.report import Plot, Report, Row, at_least, at_most, paired_ratio, percentile, ranked_shares
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.scheduler.sequence import Row as LogitsRow
from baton.errors import InvalidRequest
from baton.kernels.sample import WORD_BITS, num_mask_words
from baton.request import SamplingParams, StructuredOutputs
from baton.rpc import process
from baton.structured_output import check_form, grammar_of, parser_limits

VOCAB_SIZES: Final = (32_000, 128_000)
END: Final = "<|end|>"
END_ID: Final = 0


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


def tokenizer_text(vocab_size: int) -> str:
    """Return the tokenizer.json of a byte-level BPE; smaller vocabularies are the beginning of the largest.

    The largest is kept in the system's folder of temporary files.
    """
    largest = max(VOCAB_SIZES)
    path = Path(tempfile.gettempdir()) / f"baton-bench-bpe-{largest}-{os.getuid()}.json"
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


MASK_P50_BAR_US: Final = 60.0
MASK_P99_BAR_US: Final = 1000.0
VALID_BAR: Final = 97.0  # % of valid instances
MAX_TIMED_SCHEMAS: Final = 150  # xgrammar takes seconds to compile some


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
    report.plot = Plot(panels, x_label="us", y_label="share of tokens", is_log=True, is_stepped=True)
    report.extra["token us, by percentile"] = {
        name: [percentile(times, share) for share in range(101)] for name, times in curves.items()
    }
    return rows


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


TPOT_BAR: Final = 3.0  # % that forms add
BATCH: Final = 32
NUM_ANSWER_TOKENS: Final = 64
ITEMS: Final = (  # of arrays of PERSON and of ORDER
    {"name": "Ada Lovelace", "age": 36, "tags": ["red"]},
    {"id": "ABC-1234", "price": 1.5, "date": "2024-02-29"},
)


class Says:
    """Makes the model say the tokens of `extra_args["says"]`, as one does that follows its form."""

    def applies(self, sampling: SamplingParams) -> bool:
        return "says" in sampling.extra_args

    def process(self, logits_V: Tensor, row: LogitsRow) -> None:
        token_ids = row.sequence.sampling.extra_args["says"]
        assert isinstance(token_ids, tuple)
        logits_V[token_ids[row.num_tokens - row.sequence.num_prompt_tokens]] = 1e9


def batch_engine(directory: Path) -> Engine:
    """Return an engine with dummy weights and the smaller tokenizer."""
    LLAMA_56M.write(directory, eos_token_id=END_ID)
    (directory / "tokenizer.json").write_text(tokenizer_text(LLAMA_56M.vocab_size))
    cache = {"kv_cache_memory_bytes": 2**29}
    settings = {"model": str(directory), "load_format": "dummy", "cache": cache}
    return load_engine(engine_config({**settings, "logits_processors": [f"{__name__}:Says"]}))


def step_s(
    engine: Engine,
    forms: Sequence[StructuredOutputs | None],
    says: Sequence[tuple[int, ...]] | None = None,
) -> float:
    """Return the seconds of a decode step of a batch; its sequences take turns at the forms.

    says: the tokens of an answer in each form, which the model then says; None: the weights are random, so
    hardly a token that they prefer is allowed. No answer ends before its last token, and every prompt is in
    the prefix cache.
    """
    rng = random.Random(1)
    prompts = [rng.sample(range(1, LLAMA_56M.vocab_size), 64) for _ in range(BATCH)]
    generate(engine, prompts, [1] * BATCH)
    for number, prompt in enumerate(prompts):
        form = forms[number % len(forms)]
        sampling = SamplingParams(
            max_tokens=NUM_ANSWER_TOKENS,
            temperature=0.0,
            ignore_eos=form is None,
            structured_outputs=form,
            extra_args={} if says is None else {"says": says[number % len(says)]},
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
    schemas = [{"type": "array", "minItems": 500, "items": items} for items in (PERSON, ORDER)]
    forms = [StructuredOutputs(json=json.dumps(schema)) for schema in schemas]
    tokenizer = LLTokenizer(tokenizer_text(LLAMA_56M.vocab_size), eos_token=END_ID)
    says = [tuple(tokenizer.tokenize_str(json.dumps([item] * NUM_ANSWER_TOKENS))) for item in ITEMS]
    with tempfile.TemporaryDirectory() as folder, process.freeze_gc():
        engine = batch_engine(Path(folder))
        rows = [
            _added_row(report, engine, num_pairs, forms, None, TPOT_BAR),
            _added_row(report, engine, num_pairs, forms, says, None),
        ]
        engine.close()
    return rows


def _added_row(
    report: Report,
    engine: Engine,
    num_pairs: int,
    forms: Sequence[StructuredOutputs],
    says: Sequence[tuple[int, ...]] | None,
    bar: float | None,
) -> Row:
    name = f"TPOT added at batch {BATCH}{', the model follows its form' if says else ''}"
    step_s(engine, forms, says)  # compiles the forms
    before = engine.load()
    kinds = {"with": partial(step_s, engine, forms, says), "without": partial(step_s, engine, [None], says)}
    with_s, without_s = report.in_rounds(kinds, num_pairs, f"{name}, ").values()
    after = engine.load()
    added = 100 * (paired_ratio(with_s, without_s) - 1)
    mask_us = (after.mask_us - before.mask_us) / (after.num_masks - before.num_masks)
    times = f"{1e3 * median(without_s):.2f} -> {1e3 * median(with_s):.2f} ms"
    return at_most(name, added, "%", bar, f"{times}, the grammar takes {mask_us:.0f} us a token of the step")
