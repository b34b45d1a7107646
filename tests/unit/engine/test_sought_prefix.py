"""The prefix of a request that may be pulled from a peer."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.engine import Engine
from baton.engine.replica import SoughtPrefix
from baton.request import Request, SamplingParams, TokenIds
from tests.tiny_models import run_to_end, tiny_engine

PROMPT = tuple(range(40))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return tiny_engine(tmp_path / "model")


def sought(
    engine: Engine, generated: tuple[int, ...] = (), salt: bytes = b"", **sampling: Any
) -> SoughtPrefix:
    request = Request(
        request_id="r",
        token_ids=TokenIds.of(PROMPT),
        sampling=SamplingParams(**sampling),
        cache_salt=salt,
        generated_token_ids=generated,
    )
    return SoughtPrefix(engine, request, "r.0")


def test_last_token_is_always_computed(engine: Engine) -> None:
    assert sought(engine).num_tokens == 39
    assert sought(engine, generated=(7, 8)).num_tokens == 41


def test_nothing_may_be_brought_where_every_logit_is_wanted(engine: Engine) -> None:
    assert sought(engine, prompt_logprobs=1).num_tokens == 0


def test_keys_cover_generated_tokens_and_the_salt(engine: Engine) -> None:
    keys = sought(engine, generated=(7, 8, 9, 10)).keys(4)
    assert len(keys) == 11 and keys[:10] == sought(engine).keys(4)
    assert not set(keys) & set(sought(engine, salt=b"another").keys(4))


def test_claim_belongs_to_the_owner_and_ends_at_a_page_of_both_sizes(engine: Engine) -> None:
    engine.add(
        Request(request_id="before", token_ids=TokenIds.of(PROMPT), sampling=SamplingParams(max_tokens=1))
    )
    run_to_end(engine)
    claim = sought(engine).claim(16)
    assert (claim.num_tokens, len(claim.pages), claim.owner) == (32, 8, "r.0")
    engine.release(claim)
