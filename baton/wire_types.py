"""Bounds of what crosses between processes: a value beyond them is refused while it is decoded."""

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

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
LinkTimeout: TypeAlias = Annotated[float, Meta(ge=2, le=600)]  # seconds; see link_life.py
StepTimeout: TypeAlias = Annotated[float, Meta(ge=1, le=86_400)]  # seconds; see steps.py


class Kind(StrEnum):
    """What a process is to the others."""

    GATEWAY = "gateway"
    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"  # the command line: it asks, and serves nothing
