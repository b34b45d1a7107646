"""Hand-offs and pulls that carry codes: the decode worker goes on with a rounded prompt."""

from pathlib import Path

import pytest
import torch

from baton.engine.engine import Engine
from baton.errors import ConfigError, TransferFailed
from baton.request import Request
from tests.tiny_models import run_rounded, tiny_config
from tests.worker_pair import WorkerHost, WorkerPair
from tests.worker_pair_cases import (
    PROMPT,
    MakePair,
    Said,
    a_request,
    answer_alone,
    answer_of,
    has_pulled,
    known_at,
    said,
)

TRANSFER_DTYPES = pytest.mark.parametrize("transfer_dtype", ["int8", "fp8"])


def answer_rounded(engine: Engine, request: Request, transfer_dtype: str) -> list[Said]:
    """The answer of one engine whose pages are rounded after the first token."""
    return [Said.of(output) for output in run_rounded(engine, request, transfer_dtype)]


def sent_bytes(pair: WorkerPair) -> int:
    return pair.prefill.node.load().kv_bytes


@TRANSFER_DTYPES
@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("page_sizes", [(4, 4), (16, 4), (4, 16)])
def test_answers_are_those_of_one_engine_that_rounds_the_prompt(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int], transport: str, transfer_dtype: str
) -> None:
    pair = make_pair(page_sizes=page_sizes, transport=transport, kv_transfer_dtype=transfer_dtype)
    rounded = 0
    for number, first in enumerate((0, 20)):
        request = a_request(number, PROMPT[first:], logprobs=2, max_tokens=20)
        (answer,) = pair.answer(request)
        assert said(answer) == answer_rounded(alone, request, transfer_dtype)
        assert said(answer)[0] == answer_alone(alone, request)[0]
        rounded += said(answer) != answer_alone(alone, request)
    assert rounded and not pair.decode_worker.counters["recomputed_prefills"]


def test_a_hand_off_takes_a_quarter_of_the_bytes_of_float32(make_pair: MakePair) -> None:
    sizes = []
    for transfer_dtype in ("auto", "int8"):
        pair = make_pair(kv_transfer_dtype=transfer_dtype)
        pair.answer(a_request())
        pair.quiet_down()  # the source counts the bytes when the transfer ends
        sizes.append(sent_bytes(pair))
    assert sizes[1] == sizes[0] * (16 + 2) / 64  # heads of 16 elements


def known_kv(host: WorkerHost) -> torch.Tensor:
    """The pages of PROMPT that the worker knows."""
    claim = host.engine.claim_prefix(PROMPT, b"", "the test")
    host.engine.release(claim)
    return host.engine.runner.pool.device[list(claim.pages)]


@TRANSFER_DTYPES
def test_rounded_pages_are_sent_on_as_they_are(make_pair: MakePair, transfer_dtype: str) -> None:
    """The prefill worker has lost the prompt, and pulls it from the decode worker."""
    pair = make_pair(kv_transfer_dtype=transfer_dtype)
    pair.answer(a_request(0))
    pair.quiet_down()
    source = known_at(pair.decode, PROMPT)
    pair.prefill.engine.scheduler.cache.make_room(96, keep=False)
    with torch.inference_mode():
        pair.prefill.engine.runner.pool.device.zero_()
    again = a_request(1, (*PROMPT, 5))
    pair.dispatch(again, source=source)
    answer_of(pair, again)
    assert has_pulled(pair.prefill, pulls=1)
    assert torch.equal(known_kv(pair.decode), known_kv(pair.prefill))


def test_a_flipped_bit_is_found_and_sent_again(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair(kv_transfer_dtype="int8")
    pair.decode.endpoint.num_flips = 1
    request = a_request(logprobs=2)
    (answer,) = pair.answer(request)
    assert said(answer) == answer_rounded(alone, request, "int8")
    assert pair.decode.endpoint.counts()["digest_mismatches"] == 1


def test_workers_that_round_otherwise_refuse_each_other(make_pair: MakePair) -> None:
    plain, rounding = make_pair(), make_pair(kv_transfer_dtype="int8")
    for one, other in ((plain, rounding), (rounding, plain)):
        with pytest.raises(TransferFailed, match="transfer_dtype"):
            one.decode.endpoint.link(other.prefill.endpoint.address)


def test_rounded_pages_have_keys_of_their_own(make_pair: MakePair) -> None:
    keys = {
        transfer_dtype: make_pair(kv_transfer_dtype=transfer_dtype).decode.engine.page_keys(PROMPT, b"", 4)[0]
        for transfer_dtype in ("auto", "int8", "fp8")
    }
    assert len(set(keys.values())) == 3


def test_pages_of_codes_are_not_rounded_again(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.kv_transfer_dtype: pages of int8 .* got fp8"):
        tiny_config(tiny_model, cache={"kv_cache_dtype": "int8", "kv_transfer_dtype": "fp8"})
