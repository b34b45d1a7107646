"""Bounds of what crosses between processes: a value beyond them is refused while it is decoded."""

import hashlib
import json
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

MAX_WORKERS: Final = 1024
MAX_ROUTERS: Final = 8  # of one cluster
MAX_EVENTS: Final = 16_384  # in one message
MAX_PULLED_PAGES: Final = 28_672  # as kvtransfer allows
Name: TypeAlias = Annotated[str, Meta(max_length=128)]
Id: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
TransferId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Reason: TypeAlias = Annotated[str, Meta(max_length=512)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, le=2**16)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]
PageId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Ids: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=MAX_WORKERS)]
LinkTimeout: TypeAlias = Annotated[float, Meta(ge=2, le=600)]  # seconds; see baton/rpc/liveness.py
StepTimeout: TypeAlias = Annotated[float, Meta(ge=1, le=86_400)]  # seconds; see baton/rpc/liveness.py


class Kind(StrEnum):
    """What a process is to the others."""

    GATEWAY = "gateway"
    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"  # the command line: it asks, and serves nothing


# A hash of the types of messages: two builds whose hashes are equal can decode each other's messages.

SCHEMA_BYTES: Final = 8
_SEALS: Final = "keyed BLAKE2b"  # of the links that carry the messages: see baton/rpc/frames.py
_NO_MEANING: Final = frozenset({"description", "title"})  # prose, and names that no message carries


@cache
def schema_hash(*types: Any) -> bytes:
    """Hash the fields of these types and of all that they hold: names, types, tags, bounds, defaults.

    The way in which links seal messages is hashed as well.
    """
    schemas, components = msgspec.json.schema_components(types)
    described = json.dumps([_SEALS, *map(_bare, (*schemas, components))], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=SCHEMA_BYTES).digest()


def _bare(value: Any) -> Any:
    """The schema without its prose. A field may have the name of a keyword: those under `properties` stay."""
    if isinstance(value, list):
        return [_bare(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {name: _bare(each) for name, each in inner.items()}
        if key in ("properties", "$defs")
        else _bare(inner)
        for key, inner in value.items()
        if key not in _NO_MEANING
    }
