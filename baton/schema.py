"""A hash of the types of messages: two builds whose hashes are equal can decode each other's messages."""

import hashlib
import json
from functools import cache
from typing import Any, Final

import msgspec

SCHEMA_BYTES: Final = 8
_SEALS: Final = "keyed BLAKE2b"  # of the links that carry the messages: see seal.py
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
