"""Token ids as they travel between processes."""

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Self, overload

from baton.errors import InvalidRequest

TOKEN_ID_BYTES = 4


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids in four bytes each, as u32 little endian.

    A process that only passes a long prompt on copies its bytes: it makes no integers, and its garbage
    collector has none to visit. An engine unpacks the prompt when a sequence starts.
    """

    __slots__ = ("packed",)
    packed: bytes

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """Raises InvalidRequest for an id that does not fit 32 bits."""
        if isinstance(token_ids, TokenIds):
            self.packed = token_ids.packed
            return
        unpacked = tuple(token_ids)
        try:
            self.packed = struct.pack(f"<{len(unpacked)}I", *unpacked)
        except struct.error:
            bad = next(each for each in unpacked if not isinstance(each, int) or not 0 <= each < 2**32)
            raise InvalidRequest(
                f"token id {bad!r} is outside the vocabulary: ids are integers from 0 to {2**32 - 1}"
            ) from None

    @classmethod
    def of_packed(cls, packed: bytes) -> Self:
        """Return the token ids in these bytes. ValueError for a part of an id."""
        if len(packed) % TOKEN_ID_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole number of token ids")
        token_ids = cls.__new__(cls)
        token_ids.packed = packed
        return token_ids

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(struct.unpack(f"<{len(self)}I", self.packed))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> int | Self:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.of_packed(self.packed[TOKEN_ID_BYTES * start : TOKEN_ID_BYTES * stop])
            return type(self)(tuple(self)[index])
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{len(self)} token ids have none at {index}")
        token_id: int
        (token_id,) = struct.unpack_from("<I", self.packed, TOKEN_ID_BYTES * position)
        return token_id

    def __add__(self, more: Collection[int]) -> Self:
        return self.of_packed(self.packed + TokenIds(more).packed) if more else self

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, TokenIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"TokenIds({tuple(self)})"


def encode_hook(value: object) -> bytes:
    """Let a msgspec encoder write TokenIds as bytes."""
    if isinstance(value, TokenIds):
        return value.packed
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def decode_hook(kind: type, value: Any) -> Any:
    """Let a msgspec decoder read TokenIds from bytes."""
    if kind is not TokenIds:
        return value  # the decoder checks that it is of that kind
    if not isinstance(value, bytes):
        raise TypeError(f"token ids come as bytes, not as {type(value).__name__}")
    return TokenIds.of_packed(value)


def schema_hook(kind: type) -> dict[str, str]:
    """Describe TokenIds in a JSON schema."""
    if kind is TokenIds:
        return {"type": "string", "contentEncoding": "u32 little endian"}
    raise NotImplementedError(f"a {type(kind).__name__} has no schema")
