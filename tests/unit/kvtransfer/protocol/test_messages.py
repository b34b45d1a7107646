from typing import Any

import msgspec
import pytest

from baton.errors import WireError
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    MAX_PAGES,
    Commit,
    Corrupt,
    EndpointHello,
    Grant,
    PullRequest,
    decode,
    encode,
)
from baton.messages.bounds import MAX_BODY_BYTES, MAX_PULLED_PAGES
from baton.rpc.session import encode_frame
from tests.unit.kvtransfer.frame_mutations import LAYOUT

ID = b"t" * 16


def altered(message: Any, **changes: object) -> bytes:
    """The message on the wire, with other values than its type allows; ... takes a field away."""
    fields = {**msgspec.msgpack.decode(encode(message)), **changes}
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not ...})


def grant(num_pages: int = 1, **changes: Any) -> Grant:
    fields = {
        "transfer": ID,
        "epoch": 1,
        "deadline_ms": 1000,
        "num_units": num_pages,
        "pages": tuple(range(num_pages)),
        "generations": (1,) * num_pages,
    }
    return Grant(**{**fields, **changes})


def pull(**changes: Any) -> PullRequest:
    fields = {
        "transfer": ID,
        "epoch": 1,
        "deadline_ms": 1,
        "num_units": 1,
        "wanted_keys": bytes(16),
        "pages": (0,),
        "generations": (1,),
    }
    return PullRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_units": 0},
        {"num_units": MAX_PAGES + 1},
        {"num_units": -1},
        {"num_units": "1"},
        {"num_units": 1.5},
        {"num_units": True},
        {"num_units": 2**64 - 1},
        {"transfer": b"short"},
        {"transfer": ID + b"x"},
        {"transfer": ID.decode()},
        {"deadline_ms": 0},
        {"deadline_ms": 2**40},
        {"position": 2**31},
        {"num_layer_groups": 0},
        {"num_layer_groups": 257},
        {"extra": 1},
        {"num_units": ...},
        {"kind": "Unknown"},
        {"kind": ...},
    ],
)
def test_field_out_of_bounds_is_refused_by_decode(changes: dict[str, object]) -> None:
    with pytest.raises(WireError) as caught:
        decode(altered(grant(), **changes))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (altered(grant(2), generations=[1]), "2 pages have 1 generations"),
        (altered(grant(2), pages=[3, 3]), "a page is granted twice"),
        (altered(grant(), pages=[-1]), "malformed|Expected"),
        (altered(grant(), pages=[2**31]), "Expected"),
        (altered(grant(), pages=[]), "Expected"),
        (altered(grant(), epoch=0), "Expected"),
        (altered(pull(), generations=[1, 1]), "1 pages have 2 generations"),
        (altered(pull(), wanted_keys=bytes(33)), "33 bytes are not a multiple of the size of a key"),
        (
            altered(Commit(transfer=ID, epoch=1, first=0, stop=1, digests=bytes(8)), digests=bytes(9)),
            "9 bytes are not a multiple",
        ),
        (altered(Corrupt(transfer=ID, epoch=1, units=(1,)), units=[1, 1]), "not in ascending order"),
        (altered(Corrupt(transfer=ID, epoch=1, units=(1,)), units=[2, 1]), "not in ascending order"),
        (b"", "cannot decode"),
        (b"\xc1", "cannot decode"),
        (encode(grant()) + b"x", "trailing"),
        (encode(grant())[:-1], "truncated"),
    ],
)
def test_rules_between_fields_are_checked(body: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(body)


@pytest.mark.parametrize("field", ["tp_size", "page_size", "num_layers", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2**40, "1", None])
def test_layouts_have_bounds(field: str, value: object) -> None:
    hello = EndpointHello(protocol=1, incarnation=ID, fingerprint="f", layout=LAYOUT)
    layout = msgspec.msgpack.decode(encode(hello))["layout"]
    with pytest.raises(WireError):
        decode(altered(hello, layout={**layout, field: value}))


def test_largest_messages_fit_a_frame() -> None:
    pages, generations = tuple(range(2**31 - MAX_PAGES, 2**31)), (2**32 - 1,) * MAX_PAGES
    pulled = {
        "num_units": MAX_PULLED_PAGES,
        "pages": pages[:MAX_PULLED_PAGES],
        "generations": generations[:MAX_PULLED_PAGES],
        "wanted_keys": bytes(16 * MAX_PULLED_PAGES),
    }
    for message in (
        grant(MAX_PAGES, epoch=2**32 - 1, pages=pages, generations=generations),
        Commit(transfer=ID, epoch=1, first=0, stop=MAX_PAGES, digests=bytes(MAX_PAGES * DIGEST_BYTES)),
        Corrupt(transfer=ID, epoch=1, units=tuple(range(MAX_PAGES))),
        pull(**pulled),
    ):
        assert decode(encode(message)) == message
        assert len(encode(message)) <= MAX_BODY_BYTES
        encode_frame(encode(message))
