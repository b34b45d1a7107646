"""Routing decisions: the recent ones for `baton explain`, a log for later replay, and how good they were.

A decision has the compared pairs with their predicted costs, and afterwards the measured times.

The log has a line, a JSON object, for each dispatch and each end; `baton rehearse` replays it under
another policy. A line has the length of the prompt and the first 64 bits of its page keys, never tokens; the
keys cannot be computed without the prompt and the salt. Several routers of one machine may share a file: each
line is one write, and all use the same clock.
"""

import base64
import io
import logging
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from baton.clock import Clock
from baton.errors import ConfigError
from baton.messages.bounds import MAX_SECONDS, SHORT_KEY_BYTES, Attempt, Count, Id, Moment, Seconds
from baton.messages.control import Decision, Weighed
from baton.messages.status import Times
from baton.messages.workers import PrefillTimes
from baton.pages import split_keys
from baton.request import AttemptKey
from baton.router.checkpoint import attributes_of
from baton.router.policies.candidates import PairCandidate

MAX_DECISIONS: Final = 4096
MAX_ATTEMPTS: Final = 64  # of one request, in an answer

logger = logging.getLogger(__name__)


def weighed(candidate: PairCandidate) -> Weighed:
    """A compared pair as a message."""
    return Weighed(
        decode=candidate.decode,
        prefill=candidate.prefill,
        source=candidate.source,
        num_held_tokens=candidate.num_held_tokens,
        terms={name: min(max(value, 0.0), MAX_SECONDS) for name, value in asdict(candidate.terms).items()},
    )


class _Kept(msgspec.Struct):
    decided_s: float
    decision: Decision  # with the outcome so far, without the compared pairs
    candidates: Sequence[PairCandidate]


class DecisionHistory:
    """The last MAX_DECISIONS decisions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[AttemptKey, _Kept] = OrderedDict()  # the oldest first

    def __getstate__(self) -> dict[str, object]:
        """The decisions without the other compared pairs, which no later decision reads."""
        bare = ((key, replace(kept, candidates=())) for key, kept in self._kept.items())
        return attributes_of(self) | {"_kept": OrderedDict(bare)}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision, candidates: Sequence[PairCandidate] = ()) -> None:
        """Add a decision; it replaces one of the same attempt. candidates: all compared pairs."""
        key = (decision.request_id, decision.attempt)
        self._kept.pop(key, None)
        self._kept[key] = _Kept(self._clock.now_s(), decision, candidates)
        if len(self._kept) > MAX_DECISIONS:
            self._kept.popitem(last=False)

    def get(self, key: AttemptKey) -> Decision | None:
        """The decision without the other compared pairs; None when it is not kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept.decision

    def full(self, key: AttemptKey) -> Decision:
        """A kept decision with all compared pairs."""
        now_s, kept = self._clock.now_s(), self._kept[key]
        age_s, others = min(now_s - kept.decided_s, MAX_SECONDS), tuple(map(weighed, kept.candidates))
        return replace(kept.decision, age_s=age_s, weighed=others)

    def started(self, key: AttemptKey) -> None:
        """Note the time of the first token."""
        kept = self._kept.get(key)
        if kept is not None and kept.decision.first_token_s is None:
            first_token_s = min(self._clock.now_s() - kept.decided_s, MAX_SECONDS)
            kept.decision = replace(kept.decision, first_token_s=first_token_s)

    def measured(
        self, worker_id: str, times: PrefillTimes
    ) -> tuple[Decision, Sequence[PairCandidate]] | None:
        """Note the times of a prefill, measured by one of its workers; return the decision and all pairs.

        None: the decision is not kept, names other workers, or has its times already.
        """
        kept = self._kept.get((times.request_id, times.attempt))
        if kept is None or kept.decision.measured is not None:
            return None
        if worker_id not in (kept.decision.chosen.prefill, kept.decision.chosen.decode):
            return None
        kept.decision = replace(kept.decision, measured=times)
        return kept.decision, kept.candidates

    def of(self, request_id: str) -> Iterator[Decision]:
        """The decisions of a request's last MAX_ATTEMPTS attempts, with all compared pairs."""
        for key in [key for key in self._kept if key[0] == request_id][-MAX_ATTEMPTS:]:
            yield self.full(key)


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    at_s: Moment  # by the router's clock


class DispatchedLine(_Line, frozen=True):
    """An attempt was dispatched."""

    decision: Decision
    page_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_output_tokens: Count  # expected, as the request's limit allows
    keys: str  # base64


class EndedLine(_Line, frozen=True):
    """An attempt has ended."""

    request_id: Id
    attempt: Attempt
    num_tokens: Count | None = None  # of the attempt's answer; None: its gateway was lost
    first_token_s: Seconds | None = None  # after the dispatch
    measured: PrefillTimes | None = None  # by the worker that computed the prompt, if it has reported


AnyLine: TypeAlias = DispatchedLine | EndedLine


class DecisionLog:
    """Appends lines to a file until a write fails; then it logs a warning and stops, and routing goes on.

    A new file is readable by this user alone. When the file ends in the middle of a line, a new line is
    begun.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written to."""
        self._path = path
        self._is_well = True
        try:
            is_cut = _ends_within_a_line(path)
            # Without a buffer: a written line survives the end of the process.
            self._file = io.FileIO(path, "a", opener=_open_for_this_user)
        except OSError as error:
            raise ConfigError(f"router.decision_log: {path} cannot be written to: {error}") from error
        if is_cut:
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Append a line."""
        if self._is_well:
            self._try(lambda: self._write_all(line))

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:  # an almost full disk takes only the beginning
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file."""
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._is_well = False
            logger.warning("the decision log ends here", extra={"path": str(self._path), "error": str(error)})


def _open_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[AnyLine]] = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    """A line of the log, with its end."""
    return _ENCODER.encode(line) + b"\n"


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[AnyLine]:
    """The lines of a log without those that were cut off. Raises ConfigError with `name` and the unreadable
    line.
    """
    unread: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, start=1):
        if unread is not None:
            raise ConfigError(f"{name}, line {unread[0]}: {unread[1]}")
        try:
            decoded = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            if _is_cut(line, error):
                logger.warning("a line was cut off", extra={"log": name, "line": number})
            else:
                unread = number, error
            continue
        yield decoded


def _is_cut(line: bytes, error: Exception) -> bool:
    """True for the beginning of a line, as a full disk or a killed writer leaves it."""
    return line.startswith(b"{") and ("truncated" in str(error) or not line.rstrip().endswith(b"}"))


def keys_as_text(keys: bytes) -> str:
    """A prompt's page keys as a line has them."""
    return base64.b64encode(keys).decode()


def keys_in(line: DispatchedLine) -> list[bytes]:
    """The keys of the prompt's pages. Raises ConfigError when they cannot be decoded."""
    try:
        joined = base64.b64decode(line.keys, validate=True)
    except ValueError as error:
        raise ConfigError(f"the keys of request {line.decision.request_id}: {error}") from error
    return split_keys(joined)


MAX_PREFIXES: Final = 2**14  # that are remembered, about ten a prompt


class Hindsight:
    """Counts what the router predicted of a prompt, against what the workers measured.

    `times` has the histograms, by name, for the router's status. For each prompt that the policy predicted
    and a worker measured:

    - Terms: the predicted and the measured seconds of the wait (the queue, and a pull that the queue does not
      hide), of the computation, of the hand-off and until the first token, and the size of each error.
    - Prefix: the tokens that the router expected in the worker's cache, and the tokens that were not
      computed.
    - Regret: the measured cost of the chosen pair beyond the predicted cost of the best other pair
      (`Decision.regret_s`), 0 when the choice was right. A pair that a wrong prediction made cheap has
      regret. Regret includes the errors of the cost model, which the terms show apart.

    Repeated tokens are counted at dispatch, from the page keys alone: prompts that begin like an earlier one.
    They do not depend on reports of workers: repeats without hits show that a cache, or its reports, do not
    work.
    """

    def __init__(self, counters: Counter[str]) -> None:
        """counters: of the router, shown to operators."""
        self.times: defaultdict[str, Times] = defaultdict(Times)
        self._counters = counters
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()  # keys of pages; least recently seen first

    def dispatched(self, keys: bytes, num_tokens: int, page_size: int) -> None:
        """Count a prompt's tokens, and those of its longest remembered prefix of 1, 2, 4, 8 ... pages.

        keys: of the prompt's pages, of `page_size` tokens each.
        """
        prefixes, num_repeated, num_pages = self._prefixes, 0, 1
        while num_pages * SHORT_KEY_BYTES <= len(keys):
            key = keys[(num_pages - 1) * SHORT_KEY_BYTES : num_pages * SHORT_KEY_BYTES]
            if key in prefixes:
                num_repeated = num_pages
                prefixes.move_to_end(key)
            else:
                prefixes[key] = None
            num_pages *= 2
        while len(prefixes) > MAX_PREFIXES:
            prefixes.popitem(last=False)
        self._counters["routed_prompt_tokens"] += num_tokens
        self._counters["repeated_prompt_tokens"] += num_repeated * page_size

    def measured(self, decision: Decision, candidates: Iterable[PairCandidate]) -> None:
        """Count the outcome of a prompt. candidates: every pair that was compared for it; may be empty."""
        times, terms = decision.measured, decision.chosen.terms
        if times is None or not terms:
            return
        counters = self._counters
        counters["measured_prompt_tokens"] += times.num_tokens
        counters["predicted_prefix_tokens"] += min(decision.chosen.num_held_tokens, times.num_tokens)
        counters["realised_prefix_tokens"] += times.num_tokens - times.num_new_tokens
        self._compare("queue", terms["queue_s"] + terms["pull_s"], times.queued_s)
        self._compare("compute", terms["compute_s"], times.used_s)
        if decision.chosen.prefill:
            self._compare("handoff", terms["handoff_s"], times.exposed_s)
        if decision.first_token_s is not None:
            self._compare("ttft", decision.chosen.ttft_s, decision.first_token_s)
        chosen, taken_s = decision.chosen, decision.measured_s
        pair = chosen.decode, chosen.prefill
        others = [each.total_s for each in candidates if (each.decode, each.prefill) != pair]
        if taken_s is not None:
            self.times["regret"].observe(max(0.0, taken_s - min(others, default=taken_s)))

    def _compare(self, term: str, predicted_s: float, measured_s: float) -> None:
        self.times[f"predicted_{term}"].observe(predicted_s)
        self.times[f"measured_{term}"].observe(measured_s)
        self.times[f"error_{term}"].observe(abs(predicted_s - measured_s))
