"""What is said at the doors of a pool: one small message of a known type each way."""

from typing import TypeVar

import msgspec

from baton.errors import WireError

Said = TypeVar("Said", bound=msgspec.Struct)


def decode_said(body: bytes, kind: type[Said], reason: str) -> Said:
    """WireError, for that reason, for anything that is no such message in bounds."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a key that is no text
        raise WireError(f"no {kind.__name__}: {error}", reason=reason) from None
