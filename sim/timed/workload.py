"""The calls of clients: arrival times, lengths of prompts and answers together, and shared prefixes.

`read_trace` reads Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` for
blocks of 512 tokens), Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), the decision log of a router,
and its recording in a bundle (`baton bundle`). `synthetic` draws arrivals at a rate, with lengths that depend
on each other.
"""

import csv
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import exp, inf, isfinite, log, sqrt
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import msgspec
import numpy as np

from baton.errors import ConfigError, reason_of
from baton.messages.control import Ended
from baton.pages import split_keys
from baton.request import AttemptKey
from baton.router.decisions import DispatchedLine, decode_lines, keys_in
from baton.router.recording import PromptPages, Submitted
from baton.sim.replay import Replay, read_bundle

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 512  # tokens that one of Mooncake's hash ids names
BLOCK_A_PAGE: Final = 16  # tokens of a block of a synthetic prompt
NUM_DOCUMENTS: Final = 16  # whose beginnings synthetic prompts share
_P90: Final = 1.2815515655446004  # of a standard normal distribution


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
    try:
        requests = sorted(_rows(path), key=lambda request: request.arrival_s)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {reason_of(error)}") from error
    return [_scaled(request, scale) for request in requests[:limit]]


def _rows(path: Path) -> Iterator[TraceRequest]:
    if path.suffix == ".csv":
        yield from _azure_rows(path)
    elif path.suffix == ".zip":
        yield from _recorded_rows(read_bundle(path))
    elif _is_decision_log(path):
        yield from _log_rows(path)
    else:
        yield from _mooncake_rows(path)


def _is_decision_log(path: Path) -> bool:
    with path.open("rb") as file:
        if b'"timestamp"' in file.readline():
            return False
        file.seek(0)
        try:
            return next(decode_lines(file, ""), None) is not None
        except ConfigError:
            return False


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
                moment_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
                tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error!r}") from error
            first_s = moment_s if first_s is None else first_s
            yield TraceRequest(arrival_s=moment_s - first_s, input_tokens=tokens[0], output_tokens=tokens[1])


def at_speed(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Return the same requests in a shorter time. speed: 2.0 halves the time."""
    return [msgspec.structs.replace(each, arrival_s=each.arrival_s / speed) for each in requests]


def tokens_of(traced: TraceRequest, number: int) -> tuple[int, ...]:
    """Return tokens that are alike where the blocks' ids are. number: of a prompt without ids, which shares
    no page with prompts of other numbers.
    """
    size = traced.block_tokens
    if not traced.block_ids:
        first = 2**30 + number
        return tuple((first + at) % 2**31 for at in range(traced.input_tokens))
    ids = [(block * size + at) % 2**31 for block in traced.block_ids for at in range(size)]
    return tuple(ids[: traced.input_tokens])


def page_keys(traced: TraceRequest, page_size: int, number: int) -> bytes:
    """Return a short key for each full page of the prompt, alike where the prompts are alike up to there.
    number: as in `tokens_of`.

    A block's id at its depth stands for all tokens before: no token is made, and nothing is hashed in a
    chain. The keys are not those of `PageKeys`.
    """
    pages = np.arange(traced.input_tokens // page_size, dtype=np.uint64)
    if traced.block_ids:
        ids = np.array(traced.block_ids, np.uint64)
        last = (pages + np.uint64(1)) * np.uint64(page_size) - np.uint64(1)
        owner = ids[
            np.minimum(last // np.uint64(traced.block_tokens), np.uint64(len(ids) - 1)).astype(np.intp)
        ]
    else:
        owner = np.full(len(pages), 2**40 + number, np.uint64)
    mixed = (owner * np.uint64(0x9E3779B97F4A7C15)) ^ (pages * np.uint64(0xD6E8FEB86659FD93))
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    joined: bytes = mixed.tobytes()
    return joined


def _log_rows(path: Path) -> Iterator[TraceRequest]:
    """Yield the first attempts of a decision log: another policy would have other later ones.

    An answer has the tokens of all attempts; without an end, as many as it may have. A request with an end
    that does not tell its tokens is left out.
    """
    sent: dict[str, DispatchedLine] = {}
    answers: dict[str, list[int | None]] = {}  # request id -> tokens of each attempt that has ended
    with path.open("rb") as file:
        for line in decode_lines(file, str(path)):
            if isinstance(line, DispatchedLine):
                if line.decision.attempt == 0:
                    sent[line.decision.request_id] = line
            else:
                answers.setdefault(line.request_id, []).append(line.num_tokens)
    if not sent:
        raise ConfigError(f"decision log {path}: there is no request in it")
    blocks: dict[bytes, int] = {}
    begun_s = min(line.at_s for line in sent.values())
    num_left_out = 0
    for request_id, line in sent.items():
        numbers = [number for number in answers.get(request_id, ()) if number is not None]
        if len(numbers) < len(answers.get(request_id, ())):
            num_left_out += 1
            continue
        yield _traced(line, sum(numbers) if numbers else line.num_output_tokens, blocks, begun_s)
    if num_left_out == len(sent):
        raise ConfigError(f"decision log {path}: no end in it tells the tokens of its answer")
    if num_left_out:
        told = {"log": str(path), "requests": num_left_out}
        logger.warning("requests without the number of answered tokens are left out", extra=told)


def _traced(line: DispatchedLine, num_output: int, blocks: dict[bytes, int], begun_s: float) -> TraceRequest:
    """Return one request; `blocks` maps page keys to block ids and grows."""
    decision, size = line.decision, line.page_size
    ids = _block_ids(keys_in(line), size, decision.num_tokens, decision.request_id, blocks)
    return TraceRequest(
        arrival_s=line.at_s - begun_s,
        input_tokens=decision.num_tokens,
        output_tokens=max(1, num_output),
        block_ids=ids,
        block_tokens=size,
    )


def _recorded_rows(replays: Sequence[Replay]) -> Iterator[TraceRequest]:
    """Yield the requests that gateways have submitted.

    An answer has the tokens of all its attempts; as many as the request allows when no end is recorded.
    """
    submitted: dict[str, tuple[float, Submitted]] = {}  # request id -> date and record of its first attempt
    keys: dict[str, PromptPages] = {}
    answered: dict[AttemptKey, int] = {}
    for replay in replays:
        begun_s = replay.checkpoint.date_s - replay.checkpoint.at_s
        for at_s, _, record in replay.records:
            if isinstance(record, Submitted):
                request = record.request
                if not request.attempt and not request.is_health_check:
                    submitted.setdefault(request.request_id, (begun_s + at_s, record))
            elif isinstance(record, PromptPages) and not record.attempt:
                keys[record.request_id] = record
            elif isinstance(record, Ended):
                answered.update(zip(record.attempts, record.num_tokens, strict=False))
    num_answered = Counter[str]()  # by all attempts of a request
    for (request_id, _), number in answered.items():
        num_answered[request_id] += number
    blocks: dict[bytes, int] = {}
    first_s = min((date_s for date_s, _ in submitted.values()), default=0.0)
    for request_id, (date_s, first) in submitted.items():
        pages = keys.get(request_id)
        joined, size = (pages.keys, pages.family[2]) if pages is not None else (b"", BLOCK_TOKENS)
        num_output = num_answered.get(request_id, first.request.sampling.max_tokens or 1)
        yield TraceRequest(
            arrival_s=date_s - first_s,
            input_tokens=first.num_prompt_tokens,
            output_tokens=max(1, num_output),
            block_ids=_block_ids(split_keys(joined), size, first.num_prompt_tokens, request_id, blocks),
            block_tokens=size,
        )


def _block_ids(
    names: Sequence[bytes], size: int, num_tokens: int, request_id: str, blocks: dict[bytes, int]
) -> tuple[int, ...]:
    """Return the ids of a prompt's pages, and one of its own for the rest. `blocks` grows."""
    ids = [blocks.setdefault(name, len(blocks)) for name in names]
    if len(ids) * size < num_tokens:
        ids.append(blocks.setdefault(request_id.encode(), len(blocks)))
    return tuple(ids)


class Lengths(NamedTuple):
    """Lengths of prompts and answers, log-normal each, and how they depend on each other."""

    input_p50: float
    input_p90: float
    output_p50: float
    output_p90: float
    correlation: float = 0.0  # of their logarithms
    shared: float = 0.0  # part of a prompt that is the beginning of one of NUM_DOCUMENTS documents

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read P50-P90,P50-P90[,CORRELATION[,SHARED]], as 400-1600,64-256,0.3; ConfigError for others."""
        try:
            first, second, *more = text.split(",")
            pairs = [float(each) for part in (first, second) for each in part.split("-")]
            made = cls(*pairs, *map(float, more))
        except (ValueError, TypeError):
            made = None
        if made is None or not (
            1 <= made.input_p50 <= made.input_p90
            and 1 <= made.output_p50 <= made.output_p90
            and -1 < made.correlation < 1
            and 0 <= made.shared < 1
        ):
            raise ConfigError(f"lengths: expected P50-P90,P50-P90[,CORRELATION[,SHARED]], got {text!r}")
        return made


def arrivals(rate: float, random: Random, since_s: float = 0.0, until_s: float = inf) -> Iterator[float]:
    """Yield the moments of a Poisson process, `rate` a second on average. Each is drawn when it is wanted."""
    at_s = since_s + random.expovariate(rate)
    while at_s < until_s:
        yield at_s
        at_s += random.expovariate(rate)


def synthetic(rate: float, seconds: float, lengths: Lengths, seed: int = 0) -> list[TraceRequest]:
    """Draw requests that come as a Poisson process, `rate` a second on average.

    Raises ConfigError for a rate without which no request comes, or for an endless time.
    """
    if not (rate > 0 and isfinite(seconds)):
        raise ConfigError(
            f"expected a rate of more than 0 requests/s for a finite time, got {rate:g}/s for {seconds:g} s"
        )
    random, base = Random(seed), 1 + 1009 * seed  # of the numbers of prompts: other seeds share nothing
    requests, rest = list[TraceRequest](), sqrt(1 - lengths.correlation**2)
    for now_s in arrivals(rate, random, until_s=seconds):
        first, second = random.gauss(), random.gauss()
        second = lengths.correlation * first + rest * second
        num_input = _log_normal(lengths.input_p50, lengths.input_p90, first)
        num_shared = int(num_input * lengths.shared) // BLOCK_A_PAGE
        document = (base + random.randrange(NUM_DOCUMENTS)) << 12
        own = (base + NUM_DOCUMENTS + len(requests)) << 12
        num_blocks = -(-num_input // BLOCK_A_PAGE)
        ids = (*range(document, document + num_shared), *range(own + num_shared, own + num_blocks))
        requests.append(
            TraceRequest(
                arrival_s=now_s,
                input_tokens=num_input,
                output_tokens=_log_normal(lengths.output_p50, lengths.output_p90, second),
                block_ids=ids,
                block_tokens=BLOCK_A_PAGE,
            )
        )
    return requests


def _log_normal(p50: float, p90: float, normal: float) -> int:
    return max(1, round(exp(log(p50) + normal * log(p90 / p50) / _P90)))
