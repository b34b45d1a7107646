"""A router's decision log as a trace: the same prompts at the same moments, for another policy to route."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from baton.bench.traces import TraceRequest
from baton.errors import ConfigError
from baton.router.decision_log import HasEnded, SentOut, decode_lines, keys_in


class Log(NamedTuple):
    trace: list[TraceRequest]  # first attempts alone: what was replayed would not be under another policy
    page_size: int
    num_prefill: int
    num_decode: int
    ttft_mean_s: float | None  # as it was measured


def read_log(path: Path, step_s: float) -> Log:
    """step_s: a decode step, by which a duration is taken for a number of tokens."""
    sent: dict[str, SentOut] = {}
    ended: dict[str, HasEnded] = {}
    for line in _lines(path):
        if isinstance(line, SentOut):
            if line.decision.attempt == 0:
                sent[line.decision.request_id] = line
        elif line.attempt == 0:
            ended[line.request_id] = line
    if not sent:
        raise ConfigError(f"decision log {path}: there is no request in it")
    blocks: dict[bytes, int] = {}
    begun_s = min(line.at_s for line in sent.values())
    trace = [_traced(line, ended.get(id_), blocks, begun_s, step_s) for id_, line in sent.items()]
    waits_s = [each.first_token_s for each in ended.values() if each.first_token_s is not None]
    weighed = [each for line in sent.values() for each in (line.decision.chosen, *line.decision.weighed)]
    return Log(
        trace=trace,
        page_size=next(iter(sent.values())).page_size,
        num_prefill=len({each.prefill for each in weighed if each.prefill}),
        num_decode=len({each.decode for each in weighed}),
        ttft_mean_s=sum(waits_s) / len(waits_s) if waits_s else None,
    )


def _lines(path: Path) -> Iterator[SentOut | HasEnded]:
    try:
        with path.open("rb") as file:
            yield from decode_lines(file, str(path))
    except OSError as error:
        raise ConfigError(f"decision log {path} cannot be read: {error}") from error


def _traced(
    line: SentOut, end: HasEnded | None, blocks: dict[bytes, int], begun_s: float, step_s: float
) -> TraceRequest:
    """blocks: a number for each page's name, grown here."""
    ids = [blocks.setdefault(key, len(blocks)) for key in keys_in(line)]
    if len(ids) * line.page_size < line.decision.num_tokens:
        ids.append(blocks.setdefault(line.decision.request_id.encode(), len(blocks)))
    num_output = line.num_output_tokens
    if end is not None and end.first_token_s is not None:
        num_output = round((end.at_s - line.at_s - end.first_token_s) / step_s)
    return TraceRequest(
        arrival_s=line.at_s - begun_s,
        input_tokens=line.decision.num_tokens,
        output_tokens=max(1, num_output),
        block_ids=tuple(ids),
        block_tokens=line.page_size,
    )
