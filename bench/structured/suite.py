"""Structured output: masks, their cost in a batch, schemas with instances, sampled answers, hostile schemas.

docs/benchmarks.md explains the figures. A line of FOLDER/schemas.jsonl is {"name", "schema", "tests":
[{"valid", "data"}]}. `--kills N` compares N answers of a cluster whose workers are killed with those of one
engine.
"""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Final

from baton.bench.report import Report, option, suite
from baton.bench.structured.answers import answer_rows, kill_rows
from baton.bench.structured.hostile import hostile_rows
from baton.bench.structured.masks import (
    VOCAB_SIZES,
    batch_rows,
    honoured,
    instance_rows,
    mask_rows,
    read_cases,
    tokenizer_text,
)

PARTS: Final = ("instances", "masks", "batch", "answers", "hostile")  # without kills, which take minutes


@suite(
    "structured",
    "Structured output",
    option("--schemas", type=Path, metavar="FOLDER", help="of a schemas.jsonl with instances"),
    option("--only", PARTS, "parts to measure", choices=PARTS),
    option("--pairs", 9, "batches with and without forms"),
    option("--answers", 2000, "sampled answers"),
    option("--hostile", 500, "hostile schemas"),
    option("--kills", 0, "answers of a cluster whose workers are killed"),
    option("--seed", 1, "of the hostile schemas"),
)
def measure(options: Namespace, report: Report) -> None:
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
    if options.kills:
        report.show("Kills", asyncio.run(kill_rows(report, kept, options.kills)))
