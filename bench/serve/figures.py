"""From what came over a connection to latencies, by the names that AIPerf and vLLM give them.

Of one streamed answer, by the client's clock, with events that carry tokens:

- **TTFT**: from the start of the request to the first event.
- **E2EL**: from there to the last one.
- **TPOT**: (E2EL - TTFT) / (tokens - 1). AIPerf calls this ITL.
- **ITL**: each gap between two events, those of all requests in one pool.
- **TBT**: the mean of the worst tenth of one request's gaps, as Mooncake has it.

An open-loop request starts when it was due, however late the client came to send it. An answer counts only
if it says why it ended and has as many tokens as were asked for; all others are failures, with a reason.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from baton.bench.serve.client import Answer

QUANTILES: Final = (50, 90, 99)
WORST_SHARE: Final = 0.1


class Bad(Exception):
    """An answer that does not count; the message is short, for answers are counted by it.

    `said`: the server's own words, where it has given any.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class Sample(NamedTuple):
    """One answer that counts; durations in seconds."""

    num_tokens: int
    ttft_s: float
    e2el_s: float
    gaps_s: tuple[float, ...]

    @property
    def tpot_s(self) -> float | None:
        """None: it came in one piece."""
        return (self.e2el_s - self.ttft_s) / (self.num_tokens - 1) if self.gaps_s else None

    @property
    def tbt_s(self) -> float | None:
        worst = sorted(self.gaps_s, reverse=True)[: max(1, round(len(self.gaps_s) * WORST_SHARE))]
        return sum(worst) / len(worst) if worst else None


class Slo(NamedTuple):
    """None: whatever it is, it is good enough."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @property
    def is_any(self) -> bool:
        return any(limit is not None for limit in self)

    def is_met(self, sample: Sample) -> bool:
        pairs = ((sample.ttft_s, self.ttft_s), (sample.tpot_s, self.tpot_s), (sample.e2el_s, self.e2el_s))
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


def events_of(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    """Server-sent events, each with the moment at which its last byte came; [DONE] is None.

    Comments are skipped. Bad for data that is no JSON, or a stream that ends within an event.
    """
    unread = b""
    for moment_s, piece in pieces:
        *events, unread = (unread + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                continue
            data = b"\n".join(lines)
            try:
                yield moment_s, None if data == b"[DONE]" else json.loads(data)
            except ValueError as error:
                raise Bad("an event that is no JSON") from error
    if unread.strip():
        raise Bad("the stream ended within an event")


def streamed(answer: Answer, start_s: float, num_tokens: int) -> Sample:
    """Bad when it does not count."""
    _check_status(answer)
    moments, num_said, reason, is_done = list[float](), None, None, False
    for moment_s, event in events_of(answer.pieces):
        if event is None:
            is_done = True
            continue
        if "error" in event:
            raise Bad(f"error in the stream: {_reason(event)}")
        usage = event.get("usage")
        num_said = usage["completion_tokens"] if usage else num_said
        for choice in event.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            moments.append(moment_s)
    if not is_done:
        raise Bad("no [DONE]")
    _check_end(reason, len(moments) if num_said is None else num_said, num_tokens)
    if not moments:
        raise Bad("no event had a token")
    gaps_s = tuple(after - before for before, after in itertools.pairwise(moments))
    return Sample(num_tokens, moments[0] - start_s, moments[-1] - start_s, gaps_s)


def unary(answer: Answer, start_s: float, num_tokens: int) -> Sample:
    """Of an answer in one piece: its first token comes with its last. Bad when it does not count."""
    _check_status(answer)
    try:
        content = json.loads(answer.body)
        reason, num_said = content["choices"][0]["finish_reason"], content["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError) as error:
        raise Bad("an answer that is no completion") from error
    _check_end(reason, num_said, num_tokens)
    e2el_s = answer.ended_s - start_s
    return Sample(num_tokens, e2el_s, e2el_s, ())


def _check_status(answer: Answer) -> None:
    if answer.status != 200:
        try:
            content = json.loads(answer.body)
        except ValueError:
            raise Bad(f"status {answer.status}") from None
        raise Bad(f"status {answer.status} {_reason(content)}", _said(content))


def _reason(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("code") or error.get("type") if isinstance(error, dict) else error)[:60]


def _said(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("message") or "")[:200] if isinstance(error, dict) else ""


def _check_end(reason: str | None, num_said: int, num_tokens: int) -> None:
    if reason is None:
        raise Bad("no finish_reason")
    if num_said != num_tokens:
        raise Bad(f"{num_said} tokens instead of {num_tokens}")


class Summary(NamedTuple):
    """Of one run. Quantiles are by name and percent: ("ttft", 50) -> seconds."""

    num_ok: int
    failures: dict[str, int]
    duration_s: float
    num_tokens: int
    num_good: int | None  # that met the SLO; None: there is none
    quantiles: dict[tuple[str, int], float]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        return self.num_ok / self.duration_s

    @property
    def goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    def as_json(self) -> dict[str, object]:
        quantiles_ms = {f"{name}_p{percent}_ms": 1e3 * s for (name, percent), s in self.quantiles.items()}
        return {
            "num_ok": self.num_ok,
            "failures": self.failures,
            "duration_s": self.duration_s,
            "out_tokens_per_s": self.tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "goodput_requests_per_s": self.goodput,
            **quantiles_ms,
        }


def summarise(samples: Sequence[Sample], failures: Sequence[str], duration_s: float, slo: Slo) -> Summary:
    pools = {
        "ttft": [sample.ttft_s for sample in samples],
        "tpot": [sample.tpot_s for sample in samples if sample.tpot_s is not None],
        "itl": [gap for sample in samples for gap in sample.gaps_s],
        "tbt": [sample.tbt_s for sample in samples if sample.tbt_s is not None],
        "e2el": [sample.e2el_s for sample in samples],
    }
    return Summary(
        num_ok=len(samples),
        failures=dict(Counter(failures)),
        duration_s=duration_s,
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_good=sum(map(slo.is_met, samples)) if slo.is_any else None,
        quantiles={
            (name, percent): quantile(values, percent)
            for name, values in pools.items()
            if values
            for percent in QUANTILES
        },
    )


def quantile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values in proportion; `values` are some."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)
