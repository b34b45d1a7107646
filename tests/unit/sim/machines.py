"""Simulated replicas for tests."""

from typing import Any

from baton.request import Request, SamplingParams
from baton.sim.engine import TokenMachine
from tests.node_peers import id_of

MAX_MODEL_LEN = 64


def a_machine(**changes: Any) -> TokenMachine:
    fields: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 48,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": MAX_MODEL_LEN,
        "step_s": 0.01,
        "token_s": 0.001,
    }
    return TokenMachine(**{**fields, **changes})


def a_request(name: str, *token_ids: int, **sampling: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": 5, "seed": 3, **sampling}
    return Request(request_id=id_of(name), token_ids=token_ids, sampling=SamplingParams(**fields))
