"""The hash of message types changes when, and only when, messages on the wire would."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, defstruct

from baton.messages.bounds import SCHEMA_BYTES, schema_hash
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage


def inner(field: str = "name", tag: str = "inner") -> type[msgspec.Struct]:
    return defstruct("Inner", [(field, str)], tag=tag, kw_only=True)


def message(*fields: Any) -> type[msgspec.Struct]:
    return defstruct("Message", fields, tag="message", kw_only=True)


BASE = message(("count", int), ("inner", inner()))


@pytest.mark.parametrize(
    "other",
    [
        message(("count", int), ("inner", inner()), ("further", int, 0)),
        message(("number", int), ("inner", inner())),
        message(("count", str), ("inner", inner())),
        message(("count", int, 1), ("inner", inner())),
        message(("count", Annotated[int, Meta(ge=0)]), ("inner", inner())),
        message(("count", int), ("inner", inner(tag="other"))),
        message(("count", int), ("inner", inner("names"))),
        message(("count", int), ("inner", inner()), ("title", int, 0)),
        message(("count", int), ("inner", inner()), ("description", int, 0)),
    ],
)
def test_every_change_of_a_message_changes_the_hash(other: type) -> None:
    assert schema_hash(other) != schema_hash(BASE)


def test_prose_does_not_change_the_hash() -> None:
    other = message(("count", int), ("inner", inner()))
    other.__doc__ = "Something else."
    assert schema_hash(other) == schema_hash(BASE)


def test_control_messages_have_a_hash() -> None:
    assert len(CONTROL_SCHEMA) == SCHEMA_BYTES
    assert schema_hash(AnyMessage) == CONTROL_SCHEMA != schema_hash(BASE)
