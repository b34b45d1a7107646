"""A slice of the suite of structured output: instances, sampled answers, hostile forms, a batch."""

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from baton.bench.report import Report
from baton.bench.structured.answers import error_of, sampled_answers
from baton.bench.structured.hostile import check_hostile, hostile_forms
from baton.bench.structured.masks import (
    BATCH,
    Case,
    Instance,
    follow_instances,
    honoured,
    own_cases,
    read_cases,
)
from baton.cluster.model_directory import resolve_model
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.text.tokenizer import Tokenizer
from tests.event_loop import on_loop

TINY = resolve_model("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((TINY / "tokenizer.json").read_text("utf-8"), eos_token=1)


def test_valid_instances_are_accepted_token_by_token_and_invalid_ones_are_not(tokenizer: LLTokenizer) -> None:
    cases = own_cases()
    verdicts = follow_instances(cases, tokenizer)
    assert not verdicts.wrong and len(verdicts.token_s) > 100
    assert verdicts.counts == {(True, True): len(cases), (False, False): len(cases)}


def test_schemas_are_read_from_a_folder_and_refused_ones_are_named(tmp_path: Path) -> None:
    cases = [Case("kept", {"type": "integer"}, (Instance(True, 7),)), Case("not", {"not": {}}, ())]
    lines = (
        {
            "name": case.name,
            "schema": case.schema,
            "tests": [{"valid": each.is_valid, "data": each.data} for each in case.instances],
        }
        for case in cases
    )
    (tmp_path / "schemas.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_cases(tmp_path) == cases
    kept, refused = honoured(cases)
    assert [case.name for case in kept] == ["kept"] and '"not"' in refused["not"]


def test_sampled_answers_are_valid_and_the_same_with_drafts(tmp_path: Path) -> None:
    cases, report = own_cases(), Report("structured", "", tmp_path)
    text = Tokenizer.find(TINY)
    assert text is not None
    plain = sampled_answers(cases, BATCH + 4, report)
    whole = [(case, text.decode(tokens)) for case, tokens, is_cut in plain if not is_cut]
    assert len(whole) > BATCH / 4
    assert [error_of(*each) for each in whole] == [None] * len(whole)
    assert sampled_answers(cases, BATCH + 4, report, {"method": "ngram"}) == plain


def test_invalid_answer_is_explained() -> None:
    person = own_cases()[0]
    assert "131" in (error_of(person, '{"name": "A", "age": 131, "tags": []}') or "")
    assert error_of(person, "{") is not None


@pytest.mark.slow
@on_loop
async def test_each_hostile_form_is_accepted_or_refused() -> None:
    forms = hostile_forms(22, seed=3)
    assert len({name for name, _ in forms}) == 11
    checker = FormChecker()
    try:
        found = await check_hostile(checker, forms)
    finally:
        await checker.close()
    assert not found.failed and found.num_refused + len(found.accepted) == 22
