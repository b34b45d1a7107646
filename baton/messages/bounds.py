"""The base of messages, and bounds of the values that cross between processes.

A decoder refuses a value outside its bounds.
"""

import hashlib
import json
import re
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

SHORT_ID_CHARS: Final = 8
MAX_WORKERS: Final = 1024
MAX_NODES: Final = 64  # over which the ranks of one worker are spread
MAX_ROUTERS: Final = 8  # of one cluster
MAX_EVENTS: Final = 16_384  # in one message
KEY_BYTES: Final = 16  # of a page key: see baton/pages.py
SHORT_KEY_BYTES: Final = KEY_BYTES // 2  # by which routers know pages
# Pages of one pull, on each side: one frame holds two lists of this length and the keys.
MAX_PULLED_PAGES: Final = 28_672
MAX_FRAME_BYTES: Final = 1 << 20  # the largest length that a frame's header may announce
SEAL_BYTES: Final = 16  # at the end of each frame
MAX_BODY_BYTES: Final = MAX_FRAME_BYTES - 1 - SEAL_BYTES  # of one message: see baton/rpc/session.py
LINK_TIMEOUT_S: Final = 8.0  # default of the setting `link_timeout_s`
STEP_TIMEOUT_S: Final = 30.0  # default of the setting `step_timeout_s`
DEFAULT_KV_STREAMS: Final = 2  # default of the setting `kv_streams`
_ANSWER_ID: Final = re.compile("(?:[a-z]+[-_])?([0-9a-f]{32})")
MAX_NAME_CHARS: Final = 128
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Id: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
TransferId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
MAX_REASON_CHARS: Final = 512
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, le=2**16)]
MAX_SECONDS: Final = 86_400.0  # longer times are cut to this before they are sent
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Moment: TypeAlias = Annotated[float, Meta(ge=0)]  # seconds by the monotonic clock of one process
PageId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]  # 0: any that is free
Ids: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=MAX_WORKERS)]
LinkTimeout: TypeAlias = Annotated[float, Meta(ge=2, le=600)]  # seconds; see baton/rpc/liveness.py
DrainTimeout: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]  # seconds for running requests
# Streams of CUDA; see kvtransfer/transports/torch_distributed.py.
KvStreams: TypeAlias = Annotated[int, Meta(ge=1, le=8)]
StepTimeout: TypeAlias = Annotated[float, Meta(ge=1, le=86_400)]  # seconds; see baton/rpc/liveness.py


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """The base of all messages; the class name is the tag."""


class Kind(StrEnum):
    """The kind of a process of the cluster."""

    GATEWAY = "gateway"
    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"  # the command line, which sends queries and serves nothing


SCHEMA_BYTES: Final = 8
_SEALS: Final = "keyed BLAKE2b"  # how links seal messages: see baton/rpc/session.py
_PINGS: Final = "silence, three times"  # see baton/rpc/liveness.py
_NO_MEANING: Final = frozenset({"description", "title"})  # prose, and names that no message carries


@cache
def short_id(id: str) -> str:
    """Return the beginning of a process' id, as logs, metrics and commands show it where there is no name."""
    return id[:SHORT_ID_CHARS]


def request_id_in(answer_id: str) -> str | None:
    """Return the request's id in the `id` of an answer: ID itself, or such as chatcmpl-ID, msg_ID, resp_ID.

    None: it does not end with 32 hex digits.
    """
    found = _ANSWER_ID.fullmatch(answer_id)
    return None if found is None else found[1]


def schema_hash(*types: Any) -> bytes:
    """Hash the fields of these message types and of the types they contain: names, tags, bounds, defaults.

    Two builds with equal hashes can decode each other's messages. The hash covers the sealing method and the
    pings too.
    """
    schemas, components = msgspec.json.schema_components(types)
    described = json.dumps([_SEALS, _PINGS, *map(_bare, (*schemas, components))], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=SCHEMA_BYTES).digest()


def _bare(value: Any) -> Any:
    """Remove the prose from a schema. Keys under `properties` are field names and stay."""
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
