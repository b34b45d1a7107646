"""Schemas with instances, and tokenizers of a given size."""

import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from baton.errors import InvalidRequest
from baton.request import StructuredOutputs
from baton.structured_output import check_form

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
