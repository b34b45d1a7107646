"""Failures of one request or of a whole step, and the state that survives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.clock import ManualClock
from baton.engine.engine import ALL_BANNED, BAD_LOGITS, Engine
from baton.engine.runner.step_inputs import StepArrays
from baton.request import FilledPages, FinishReason, Request, SamplingParams, StepOutput, TokenIds
from tests.tiny_models import add, generate, run_to_end, tiny_engine, token_ids

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(params=["device", "host-tier", "async"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    return tiny_engine(
        tiny_model,
        ManualClock(),
        scheduler={"async_scheduling": request.param == "async"},
        cache={"host_cache_memory_bytes": 0 if request.param == "device" else 2**16},
    )


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for output in run_to_end(engine):
        outputs.setdefault(output.request_id, []).append(output)
    return outputs


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """The model gives no numbers for the token that follows `position`, whatever the batch."""
    execute = engine.runner.execute

    @torch.inference_mode()
    def with_poison(arrays: StepArrays, *others: Any) -> Tensor:
        logits = execute(arrays, *others)
        logits[arrays.positions[arrays.logit_rows] == position] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "execute", with_poison)


def test_request_with_nan_logits_ends_alone_in_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = token_ids(generate(engine, PROMPT[:3], max_tokens=6))
    with monkeypatch.context() as patch:
        poison(engine, patch, len(PROMPT) + 2)  # of its fourth token
        add(engine, "bad", PROMPT, logprobs=1)
        add(engine, "good", PROMPT[:3])
        outputs = drain(engine)
    assert token_ids(outputs["good"]) == expected
    *tokens, last = outputs["bad"]
    assert [output.finish_reason for output in tokens] == [None] * 3
    assert (last.finish_reason, last.token_id, last.index) == (FinishReason.ERROR, None, 3)
    assert last.error == BAD_LOGITS
    engine.scheduler.check_integrity()
    assert engine.load().pages["active"] == 0
    assert generate(engine, PROMPT)[0].num_cached_tokens == 0  # its pages are not trusted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_request_that_bans_every_token_ends_alone_in_an_error(engine: Engine, temperature: float) -> None:
    expected = token_ids(generate(engine, PROMPT[:3], max_tokens=6))
    bans = {"allowed_token_ids": (5, 6), "bad_words_token_ids": ((6,), (5, 5, 5))}
    add(engine, "bad", PROMPT, temperature=temperature, logprobs=1, **bans)
    add(engine, "good", PROMPT[:3])
    outputs = drain(engine)
    assert token_ids(outputs["good"]) == expected
    assert token_ids(outputs["bad"]) == [5, 5, None]
    last = outputs["bad"][-1]
    assert (last.finish_reason, last.index) == (FinishReason.ERROR, 2)
    assert last.error == ALL_BANNED and last.is_invalid, "another replica would fail likewise"
    engine.scheduler.check_integrity()
    assert generate(engine, PROMPT)[0].num_cached_tokens > 0  # its pages are valid


def test_one_choice_may_fail_and_another_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(engine, PROMPT, n=2, seed=1, temperature=1.0, max_tokens=4)
    execute = engine.runner.execute

    @torch.inference_mode()
    def second_row_fails(arrays: StepArrays, *others: Any) -> Tensor:
        logits = execute(arrays, *others)
        logits[1:] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "execute", second_row_fails)
    outputs = generate(engine, PROMPT, n=2, seed=1, temperature=1.0, max_tokens=4)
    first = [output for output in outputs if output.choice == 0]
    assert token_ids(first) == [output.token_id for output in whole if output.choice == 0]
    assert [output.finish_reason for output in outputs if output.choice == 1] == [FinishReason.ERROR]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("where", ["build", "execute", "sample"])
def test_failed_step_loses_all_requests_and_all_known_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = token_ids(generate(engine, PROMPT * 3))
    add(engine, "lost", PROMPT, max_tokens=1)
    add(engine, "waits", PROMPT, max_tokens=1)
    owner = {"build": engine._builders[0], "execute": engine.runner, "sample": engine._sampler}[where]

    def fail(*arguments: object, **named: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fail)
        with pytest.raises(Interrupted):
            run_to_end(engine)
    assert not engine.has_work()
    engine.scheduler.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages
    again = generate(engine, PROMPT * 3)
    assert token_ids(again) == expected and again[0].num_cached_tokens == 0
    assert engine.load().pages["active"] == 0


def test_several_choices_cannot_bring_the_same_pages(engine: Engine) -> None:
    pages = tuple(engine.pages.allocate(1, "mine"))
    request = Request(request_id="r", token_ids=TokenIds.of((1,) * 5), sampling=SamplingParams(n=2))
    with pytest.raises(ValueError, match="2 choices cannot share"):
        engine.add(request, FilledPages(pages, 4, "mine"))
    engine.release(FilledPages(pages, 4, "mine"))
    assert not engine.has_work() and engine.pages.num_free == engine.pages.num_pages


def test_make_room_evicts_up_to_the_available_pages(engine: Engine) -> None:
    generate(engine, PROMPT * 4)
    assert engine.load().pages["cached"]
    num_pages = engine.num_available_pages
    assert num_pages == engine.pages.num_pages
    assert not engine.make_room(num_pages + 1) and engine.pages.num_free < num_pages
    assert engine.make_room(num_pages) and engine.pages.num_free == num_pages
    assert engine.load().pages["cached"] == 0


def test_stats_count_sequences_pages_and_hits(engine: Engine) -> None:
    generate(engine, PROMPT)
    generate(engine, PROMPT)
    add(engine, "runs", PROMPT, max_tokens=9)
    add(engine, "waits", PROMPT[::-1])
    engine.step()
    engine.pages.reserve(3, "transfer")
    load = engine.load()
    assert (load.num_running, load.num_waiting) == (2, 0)
    assert list(load.pages) == ["free", "active", "cached", "leased", "quarantined"]
    assert sum(load.pages.values()) == engine.pages.num_pages
    assert (load.pages["active"], load.pages["leased"]) == (6, 3)
    assert (load.prefix_queries_tokens, load.prefix_hits_tokens) == (40, 16)
    drain(engine)
    assert engine.load().num_running == 0 and engine.load().num_preemptions == 0
