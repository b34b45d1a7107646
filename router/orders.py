"""What the choice of a pair makes of an attempt: an entry in the books, and a word to either side."""

from typing import Final

import msgspec

from baton.control import MAX_AGE_S, Dispatch, Routed
from baton.control_wire import fits_beside
from baton.errors import ProtocolError
from baton.request import Request
from baton.router.books import Entry, Key, num_kv_tokens, party_of
from baton.router.cost_model import CostModel
from baton.router.pairing import Pair
from baton.wire_types import Attempt, Id

_KEY: Final = tuple[Id, Attempt]


def key_of(request: Request) -> Key:
    """The attempt's name. ProtocolError when it is none that messages can carry."""
    key = (request.request_id, request.attempt)
    try:
        return msgspec.convert(key, _KEY)
    except msgspec.ValidationError as error:
        message = f"attempt {key[1]} of {key[0][:64]!r} is no attempt's name: {error}"
        raise ProtocolError(message) from error


def prefill_of(pair: Pair) -> str:
    """Its id, or ""."""
    return pair.prefill.id if pair.prefill is not None else ""


def entry_of(gateway_id: str, request: Request, pair: Pair, model: CostModel, charged: float) -> Entry:
    """charged: work, to its tenant."""
    num_prompt_tokens = request.num_tokens
    if pair.choice is not None:
        num_prompt_tokens -= pair.choice.candidate.num_held_tokens
        compute_s = pair.choice.candidate.terms.compute_s
    else:
        computer = model.of(prefill_of(pair) or pair.decode.id)
        compute_s = computer.compute_s(num_prompt_tokens, num_prompt_tokens)
    num_tokens = num_kv_tokens(request)
    return Entry(
        gateway=gateway_id,
        decode=pair.decode.id,
        prefill=prefill_of(pair),
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        compute_s=compute_s,
        party=party_of(request),
        num_output_tokens=num_tokens - request.num_tokens,
        charged=charged,
    )


def dispatch_of(gateway_id: str, request: Request, pair: Pair, age_s: float) -> Dispatch:
    source = pair.choice.source if pair.choice is not None else None
    if source is not None and not fits_beside(request, source):
        source = None  # then all is computed: a hint is not worth the request
    return Dispatch(
        request=request,
        gateway=gateway_id,
        prefill=prefill_of(pair),
        age_s=min(MAX_AGE_S, age_s),
        source=source,
    )


def routed_of(request: Request, pair: Pair) -> Routed:
    return Routed(
        request_id=request.request_id,
        attempt=request.attempt,
        decode=pair.decode.id,
        prefill=prefill_of(pair),
        reason=pair.reason,
    )
