"""Request traces of real services: arrival times, lengths, and shared prefixes.

Two formats are read: Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`
for blocks of 512 tokens) and Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import ConfigError

BLOCK_TOKENS: Final = 512  # tokens that one of Mooncake's hash ids names


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Equal `block_ids` at equal depth are a shared prefix of `block_tokens` tokens each."""

    arrival_s: float  # since the trace began
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, scale: float = 1.0, limit: int | None = None) -> list[TraceRequest]:
    """Return the first `limit` requests in order of arrival, their lengths divided by `scale`, at least 1.

    ConfigError names a line of another format.
    """
    if not (scale > 0):
        raise ConfigError(f"scale: expected more than 0, got {scale}")
    rows = _azure_rows(path) if path.suffix == ".csv" else _mooncake_rows(path)
    try:
        requests = sorted(rows, key=lambda request: request.arrival_s)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    return [_scaled(request, scale) for request in requests[:limit]]


def _scaled(request: TraceRequest, scale: float) -> TraceRequest:
    return msgspec.structs.replace(
        request,
        input_tokens=max(1, round(request.input_tokens / scale)),
        output_tokens=max(1, round(request.output_tokens / scale)),
        block_tokens=max(1, round(request.block_tokens / scale)),
    )


def _mooncake_rows(path: Path) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            yield TraceRequest(
                arrival_s=row.timestamp / 1e3,
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                block_ids=row.hash_ids,
            )


def _azure_rows(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="") as file:
        first_s: float | None = None
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                moment_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error!r}") from error
            first_s = moment_s if first_s is None else first_s
            yield TraceRequest(arrival_s=moment_s - first_s, input_tokens=tokens[0], output_tokens=tokens[1])


def tokens_of(traced: TraceRequest) -> tuple[int, ...]:
    """Return tokens that are alike where the blocks' ids are; without ids every prompt is alone."""
    size = traced.block_tokens
    if not traced.block_ids:
        first = int(traced.arrival_s * 1e6) % 2**30
        return tuple((first + at) % 2**31 for at in range(traced.input_tokens))
    ids = [block * size + at for block in traced.block_ids for at in range(size)]
    return tuple(ids[: traced.input_tokens])
