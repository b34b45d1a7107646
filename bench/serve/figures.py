"""Latencies of answers, by the names that AIPerf and vLLM give them: docs/benchmarks.md has the definitions.

An open-loop request starts when it is due, however late the client sends it. An answer counts if it has a
finish reason and as many tokens as were asked for; every other answer is a failure, with a reason.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import Any, Final, NamedTuple

from baton.bench.report import percentile
from baton.bench.serve.client import Answer
from baton.errors import ConfigError, nearest_hint

PERCENTILES: Final = (50, 90, 99)
WORST_SHARE: Final = 0.1


class Bad(Exception):
    """An answer that does not count. Failures are counted by the message; `said` has the server's words."""

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
        """Seconds a token after the first; None: the answer came in one piece."""
        return (self.e2el_s - self.ttft_s) / (self.num_tokens - 1) if self.gaps_s else None

    @property
    def tbt_s(self) -> float | None:
        """Mean of the worst tenth of the gaps; None: there are none."""
        worst = sorted(self.gaps_s, reverse=True)[: max(1, round(len(self.gaps_s) * WORST_SHARE))]
        return sum(worst) / len(worst) if worst else None


# Names of `--goodput` -> field of Slo: vLLM's three, then AIPerf's.
GOODPUT_NAMES: Final = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "e2el": "e2el_s",
    "time_to_first_token": "ttft_s",
    "inter_token_latency": "tpot_s",
    "request_latency": "e2el_s",
}


class Slo(NamedTuple):
    """Latency objectives of a request; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> "Slo":
        """Read NAME:MILLISECONDS by the names of vLLM's or of AIPerf's --goodput; several may share a word.

        Raises ConfigError for an unknown name, a name given twice, or a value that is not above 0.
        """
        limits_s: dict[str, float] = {}
        for each in " ".join(given).split():
            name, _, value = each.partition(":")
            if name not in GOODPUT_NAMES:
                known = ", ".join(GOODPUT_NAMES)
                hint = nearest_hint(name, GOODPUT_NAMES)
                raise ConfigError(f"--goodput: expected one of {known}, got {name!r}{hint}")
            try:
                limit_s = float(value) / 1e3
            except ValueError:
                limit_s = math.nan
            if not 0 < limit_s < math.inf:
                raise ConfigError(f"--goodput: expected {name}:MILLISECONDS such as {name}:200, got {each!r}")
            if GOODPUT_NAMES[name] in limits_s:
                raise ConfigError(f"--goodput: {each!r} sets an objective twice")
            limits_s[GOODPUT_NAMES[name]] = limit_s
        return cls(**limits_s)

    @property
    def is_any(self) -> bool:
        return any(limit is not None for limit in self)

    def is_met(self, sample: Sample) -> bool:
        pairs = ((sample.ttft_s, self.ttft_s), (sample.tpot_s, self.tpot_s), (sample.e2el_s, self.e2el_s))
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


class Event(NamedTuple):
    """A server-sent event, and the moment at which its last byte came; the content of [DONE] is None."""

    moment_s: float
    id: str
    content: Any


def events_of(pieces: Sequence[tuple[float, bytes]], *, may_be_cut: bool = False) -> Iterator[Event]:
    """Yield the whole events; comments are skipped.

    Bad: an event is no JSON, or, unless `may_be_cut`, the stream ends within an event.
    """
    unread = b""
    for moment_s, piece in pieces:
        *texts, unread = (unread + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for text in texts:
            fields = [line.partition(b":") for line in text.split(b"\n")]
            data = b"\n".join(value.strip() for name, _, value in fields if name == b"data")
            id_ = next((value.strip().decode() for name, _, value in fields if name == b"id"), "")
            if not data:
                continue
            try:
                yield Event(moment_s, id_, None if data == b"[DONE]" else json.loads(data))
            except ValueError as error:
                raise Bad("an event that is no JSON") from error
    if unread.strip() and not may_be_cut:
        raise Bad("the stream ended within an event")


def token_ids_of(answer: Answer) -> list[int]:
    """Return the tokens of a streamed answer to a request with `return_token_ids`. Bad: see `events_of`."""
    choices = [
        choice for event in events_of(answer.pieces) if event.content for choice in event.content["choices"]
    ]
    return [token_id for choice in choices for token_id in choice.get("token_ids") or ()]


def streamed(answer: Answer, start_s: float, num_tokens: int) -> Sample:
    """Return the latencies of a streamed answer of `num_tokens`. Bad: the answer does not count."""
    _check_status(answer)
    moments, num_said, reason, is_done = list[float](), None, None, False
    for event in events_of(answer.pieces):
        if event.content is None:
            is_done = True
            continue
        if "error" in event.content:
            code, said = _error_in(event.content)
            raise Bad(f"error in the stream: {code}", said)
        usage = event.content.get("usage")
        num_said = usage["completion_tokens"] if usage else num_said
        for choice in event.content.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            moments.append(event.moment_s)
    if not is_done:
        raise Bad("no [DONE]")
    _check_end(reason, len(moments) if num_said is None else num_said, num_tokens)
    if not moments:
        raise Bad("no event had a token")
    gaps_s = tuple(after - before for before, after in itertools.pairwise(moments))
    return Sample(num_tokens, moments[0] - start_s, moments[-1] - start_s, gaps_s)


def unary(answer: Answer, start_s: float, num_tokens: int) -> Sample:
    """Return the latencies of an answer in one piece: its first token comes with its last.

    Bad: see above.
    """
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
        code, said = _error_in(content)
        raise Bad(f"status {answer.status} {code}", said)


def _error_in(content: Any) -> tuple[str, str]:
    """Return the reason by which failures are counted, and the server's words."""
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict):
        return str(error)[:60], ""
    return str(error.get("code") or error.get("type"))[:60], str(error.get("message") or "")[:200]


def _check_end(reason: str | None, num_said: int, num_tokens: int) -> None:
    if reason is None:
        raise Bad("no finish_reason")
    if num_said != num_tokens:
        raise Bad(f"{num_said} tokens instead of {num_tokens}")


FIGURES: Final[dict[str, Callable[[Sample], Sequence[float]]]] = {
    "ttft": lambda sample: (sample.ttft_s,),
    "tpot": lambda sample: () if sample.tpot_s is None else (sample.tpot_s,),
    "itl": lambda sample: sample.gaps_s,
    "tbt": lambda sample: () if sample.tbt_s is None else (sample.tbt_s,),
    "e2el": lambda sample: (sample.e2el_s,),
}


class Run(NamedTuple):
    """The result of one load: answers that count, and the reasons of others."""

    samples: list[Sample]
    failures: list[str]
    duration_s: float
    slo: Slo = Slo()
    max_lag_s: float = 0.0  # the most by which the client sent a request late
    said: str = ""  # the server's words about the first failure
    cpu_s: float = 0.0  # of the server's processes; 0: not known

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        return len(self.samples) / self.duration_s

    @property
    def goodput(self) -> float | None:
        """Answers a second that met the SLO; None: there is no SLO."""
        return sum(map(self.slo.is_met, self.samples)) / self.duration_s if self.slo.is_any else None

    def values_s(self, figure: str) -> list[float]:
        """Return the values of one of FIGURES."""
        return [value for sample in self.samples for value in FIGURES[figure](sample)]

    def as_json(self) -> dict[str, object]:
        """Return the figures by the names that the JSON has."""
        values_s = {figure: self.values_s(figure) for figure in FIGURES}
        return {
            "num_ok": len(self.samples),
            "failures": dict(Counter(self.failures)),
            "duration_s": self.duration_s,
            "out_tokens_per_s": self.tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "goodput_requests_per_s": self.goodput,
            **{
                f"{figure}_p{percent}_ms": 1e3 * percentile(values, percent)
                for figure, values in values_s.items()
                if values
                for percent in PERCENTILES
            },
        }


AIPERF_PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def aiperf_export(runs: Sequence[Run]) -> dict[str, object]:
    """Return the figures of all rounds together as AIPerf's `profile_export_aiperf.json` has them.

    Source: `JsonExportData` and docs/tutorials/working-with-profile-exports.md of
    github.com/ai-dynamo/aiperf. AIPerf's inter_token_latency is our TPOT, its inter_chunk_latency our ITL.
    Lengths of prompts, which the samples do not have, and telemetry of GPUs are left out.
    """
    duration_s = sum(run.duration_s for run in runs)
    samples = [sample for run in runs for sample in run.samples]
    failures = Counter(failure for run in runs for failure in run.failures)
    num_tokens = sum(sample.num_tokens for sample in samples)
    metrics: dict[str, object] = {
        "request_throughput": {"unit": "requests/sec", "avg": len(samples) / duration_s},
        "output_token_throughput": {"unit": "tokens/sec", "avg": num_tokens / duration_s},
        "request_count": {"unit": "requests", "avg": float(len(samples))},
        "benchmark_duration": {"unit": "sec", "avg": duration_s},
        "total_osl": {"unit": "tokens", "avg": float(num_tokens)},
    }
    distributions = {
        "request_latency": ("ms", [1e3 * sample.e2el_s for sample in samples]),
        "time_to_first_token": ("ms", [1e3 * sample.ttft_s for sample in samples if sample.gaps_s]),
        "inter_token_latency": ("ms", [1e3 * each for run in runs for each in run.values_s("tpot")]),
        "inter_chunk_latency": ("ms", [1e3 * each for run in runs for each in run.values_s("itl")]),
        "output_sequence_length": ("tokens", [float(sample.num_tokens) for sample in samples]),
    }
    metrics |= {name: _distribution(unit, values) for name, (unit, values) in distributions.items() if values}
    if failures:
        metrics["error_request_count"] = {"unit": "requests", "avg": float(failures.total())}
    if any(run.slo.is_any for run in runs):
        num_good = sum(run.slo.is_met(sample) for run in runs for sample in run.samples)
        metrics["good_request_count"] = {"unit": "requests", "avg": float(num_good)}
        metrics["goodput"] = {"unit": "requests/sec", "avg": num_good / duration_s}
    errors = ({"code": None, "type": "BadAnswer", "message": each} for each in failures)
    summary = [{"error_details": error, "count": failures[error["message"] or ""]} for error in errors]
    return {**metrics, "was_cancelled": False, "error_summary": summary}


def _distribution(unit: str, values: Sequence[float]) -> dict[str, float | str]:
    percentiles = {f"p{percent}": percentile(values, percent) for percent in AIPERF_PERCENTILES}
    spread = {"min": min(values), "max": max(values), "std": pstdev(values)}
    return {"unit": unit, "avg": fmean(values), **percentiles, **spread}
