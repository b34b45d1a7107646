"""Token ids as they travel between processes."""

import struct
import sys
from abc import ABCMeta
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, SupportsIndex, overload

import msgspec

from baton.errors import InvalidRequest

TOKEN_ID_BYTES = 4


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32. Raises InvalidRequest for an id that does not fit 32 bits."""
    if type(token_ids) is TokenIds:  # isinstance is slow for a class with an ABC's metaclass
        return token_ids.packed
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        bad = next(each for each in token_ids if not isinstance(each, SupportsIndex) or not 0 <= each < 2**32)
        raise InvalidRequest(f"token id {bad!r}: expected an integer from 0 to {2**32 - 1}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class _SequenceMeta(msgspec.StructMeta, ABCMeta):
    """Makes a struct that is a `collections.abc.Sequence`."""


class TokenIds(
    msgspec.Struct,
    Sequence[int],
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
    metaclass=_SequenceMeta,
):
    """An immutable sequence of token ids, packed as little-endian u32.

    A process that only forwards a long prompt copies its bytes: it creates no integers for its garbage
    collector to visit. An engine unpacks the prompt when a sequence starts.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bytes):
            raise TypeError("TokenIds.of packs a sequence of token ids")
        if len(self.packed) % TOKEN_ID_BYTES:
            raise ValueError(f"{len(self.packed)} bytes are not a whole number of token ids")

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Self:
        """Pack token ids. Raises InvalidRequest for an id that does not fit 32 bits."""
        return token_ids if isinstance(token_ids, cls) else cls(pack(tuple(token_ids)))

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
                return type(self)(self.packed[TOKEN_ID_BYTES * start : TOKEN_ID_BYTES * stop])
            return self.of(tuple(self)[index])
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} token ids")
        token_id: int
        (token_id,) = struct.unpack_from("<I", self.packed, TOKEN_ID_BYTES * position)
        return token_id

    def __add__(self, more: Sequence[int]) -> Self:
        return type(self)(self.packed + self.of(more).packed) if more else self

    def __repr__(self) -> str:
        return f"TokenIds.of({tuple(self)})"
