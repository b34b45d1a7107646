"""Pages that a reader pins by their keys, on the device or on the host."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baton.engine.cache.page_pool import PageState, mark_of
from baton.engine.engine import Engine
from baton.engine.runner.step_inputs import StepArrays
from baton.pages import PageKeys
from baton.request import Request, SamplingParams, TokenIds
from tests.tiny_models import VOCAB_SIZE, generate, run_to_end, tiny_engine

PAGE_BYTES: Final = 4 * 512
PROMPT: Final = [(5 * i + i * i) % VOCAB_SIZE for i in range(48)]
OTHER: Final = [(7 * i + i * i) % VOCAB_SIZE for i in range(80)]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """It has computed PROMPT, twelve pages; there is room for twenty-four, and for as many on the host."""
    cache = {"kv_cache_memory_bytes": 24 * PAGE_BYTES, "host_cache_memory_bytes": 24 * PAGE_BYTES}
    engine = tiny_engine(tmp_path / "model", cache=cache)
    generate(engine, PROMPT, max_tokens=1)
    return engine


def contents(engine: Engine, pages: list[int]) -> torch.Tensor:
    return engine.runner.pool.device[pages].clone()


def pin(engine: Engine, keys: list[bytes]) -> list[int]:
    pages = engine.pin(keys, "a reader")
    assert pages is not None
    return pages


def is_all_back(engine: Engine) -> bool:
    engine.scheduler.check_integrity()
    states = (PageState.ACTIVE, PageState.LEASED, PageState.QUARANTINED)
    return not any(engine.pages.count(state) for state in states)


def test_keys_name_the_same_pages_in_every_replica_and_are_of_a_salt(engine: Engine) -> None:
    keys = engine.page_keys(PROMPT, b"", 4)
    assert pin(engine, keys) == list(engine.scheduler.cache.find([*PROMPT, 0], b""))
    assert engine.pin(engine.page_keys(PROMPT, b"another tenant", 4), "another") is None
    layout, larger = engine.runner.layout, list[bytes]()
    namer = PageKeys(model_fingerprint=engine.fingerprint, dtype=layout.dtype, page_size=16)
    namer.extend(larger, PROMPT, 3, b"")
    assert engine.page_keys(PROMPT, b"", 16) == larger
    engine.pages.release(engine.scheduler.cache.find([*PROMPT, 0], b""), "a reader")
    assert is_all_back(engine)


def test_pages_on_the_host_are_pinned_as_copies(engine: Engine) -> None:
    keys = engine.page_keys(PROMPT, b"", 4)
    expected = contents(engine, engine.scheduler.cache.find([*PROMPT, 0], b""))
    generate(engine, OTHER, max_tokens=1)
    known = [engine.scheduler.cache.page_of(key) for key in keys]
    assert None in known and known[0] is not None  # the last ones have gone to the host
    pages = pin(engine, keys)
    assert torch.equal(contents(engine, pages), expected)
    assert [engine.scheduler.cache.page_of(key) for key in keys] == known  # no lookup finds a copy
    engine.pages.release(pages, "a reader")
    assert is_all_back(engine)
    assert engine.pages.num_free >= known.count(None)


def test_failed_copy_releases_the_pinned_pages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no copies today")

    keys = engine.page_keys(PROMPT, b"", 4)
    generate(engine, OTHER, max_tokens=1)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no copies today"):
        patched.setattr(engine.runner, "execute", fail)
        engine.pin(keys, "a reader")
    assert is_all_back(engine)
    assert len(pin(engine, keys)) == len(keys)


def test_pin_without_room_for_copies_is_refused(engine: Engine) -> None:
    keys = engine.page_keys(PROMPT, b"", 4)
    generate(engine, OTHER, max_tokens=1)
    taken = engine.pages.allocate(engine.pages.num_free, "another")
    held = [page for page in range(24) if engine.pages.state(page) is PageState.CACHED]
    engine.pages.share(held, "another")
    assert engine.pin(keys, "a reader") is None
    engine.pages.release([*taken, *held], "another")
    assert is_all_back(engine)


@pytest.mark.parametrize("wrong", ["unknown", "twice"])
def test_pin_of_an_absent_page_is_refused(engine: Engine, wrong: str) -> None:
    keys = engine.page_keys(PROMPT, b"", 4)
    keys = [*keys, b"?" * 16] if wrong == "unknown" else [*keys, keys[0]]
    assert engine.pin(keys, "a reader") is None
    assert is_all_back(engine)


def test_page_that_goes_to_the_host_is_free_for_other_writers_after_the_copy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the copy may run long after the page was released, and after the step has returned."""
    steps: list[StepArrays] = []
    execute = engine.runner.execute

    def note(arrays: StepArrays, *others: Any) -> torch.Tensor:
        steps.append(arrays)
        return execute(arrays, *others)

    monkeypatch.setattr(engine.runner, "execute", note)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id="evicts", token_ids=TokenIds.of(OTHER), sampling=sampling))
    engine.step()
    (step,) = steps
    copied = [device_page for device_page, _ in step.copies_to_host]
    assert copied and all(engine.pages.free_after([page]) >= mark_of(step.step) for page in copied)
    run_to_end(engine)
