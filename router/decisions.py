"""Why attempts went where they went, kept for a while: predictions, and what was measured afterwards."""

import base64
import io
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from baton.clock import Clock
from baton.errors import ConfigError
from baton.messages.bounds import Attempt, Count, Id, Seconds
from baton.messages.control import Decision, Weighed
from baton.messages.workers import PrefillTimes
from baton.router.in_flight import Key
from baton.router.index.prompt_keys import SHORT_KEY_BYTES, first_halves
from baton.router.policies.costs import PairCandidate

MAX_DECISIONS: Final = 4096
MAX_ATTEMPTS: Final = 64  # told of one request
_DAY_S: Final = 86_400.0


def weighed(candidate: PairCandidate) -> Weighed:
    return Weighed(
        decode=candidate.decode,
        prefill=candidate.prefill,
        source=candidate.source,
        num_held_tokens=candidate.num_held_tokens,
        terms={name: min(max(value, 0.0), _DAY_S) for name, value in asdict(candidate.terms).items()},
    )


def total_s(weighed: Weighed) -> float:
    return sum(weighed.terms.values())


def regret_s(decision: Decision) -> float | None:
    """What the first token took longer than the best other pair was expected to take; None: not known."""
    others = [ttft_s(each) for each in decision.weighed if each != decision.chosen]
    if decision.first_token_s is None or not others:
        return None
    return decision.first_token_s - min(others)


def ttft_s(weighed: Weighed) -> float:
    return sum(weighed.terms.get(name, 0.0) for name in ("queue_s", "pull_s", "compute_s"))


class KeptDecision(NamedTuple):
    decided_s: float
    decision: Decision  # less what was weighed: that is written out for who asks
    candidates: Sequence[PairCandidate]


class DecisionHistory:
    """The last MAX_DECISIONS."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, KeptDecision] = OrderedDict()
        self._attempts: dict[str, list[Key]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision, candidates: Sequence[PairCandidate] = ()) -> None:
        """A key that is there already is decided anew. candidates: all, to be told to whoever asks."""
        key = (decision.request_id, decision.attempt)
        self._forget(key)
        self._kept[key] = KeptDecision(self._clock.now_s(), decision, candidates)
        self._attempts.setdefault(decision.request_id, []).append(key)
        if len(self._kept) > MAX_DECISIONS:
            self._forget(next(iter(self._kept)))

    def get(self, key: Key) -> Decision | None:
        """Without what else was weighed."""
        kept = self._kept.get(key)
        return None if kept is None else kept.decision

    def full(self, key: Key) -> Decision:
        """Of one that is kept."""
        now_s, kept = self._clock.now_s(), self._kept[key]
        age_s, others = min(now_s - kept.decided_s, _DAY_S), tuple(map(weighed, kept.candidates))
        return msgspec.structs.replace(kept.decision, age_s=age_s, weighed=others)

    def started(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept.decision.first_token_s is None:
            taken_s = min(self._clock.now_s() - kept.decided_s, _DAY_S)
            decision = msgspec.structs.replace(kept.decision, first_token_s=taken_s)
            self._kept[key] = kept._replace(decision=decision)

    def measured(self, times: PrefillTimes) -> None:
        key = (times.request_id, times.attempt)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept[key] = kept._replace(decision=msgspec.structs.replace(kept.decision, measured=times))

    def of(self, request_id: str) -> Iterator[Decision]:
        for key in self._attempts.get(request_id, ())[-MAX_ATTEMPTS:]:
            yield self.full(key)

    def _forget(self, key: Key) -> None:
        if self._kept.pop(key, None) is None:
            return
        keys = self._attempts[key[0]]
        keys.remove(key)
        if not keys:
            del self._attempts[key[0]]


# What a router has decided, line by line, for later: bench/router/suite.py replays it under another policy.
#
# A line is a JSON object: one when an attempt is sent out, one when it has ended. Of a prompt there is
# nothing but its length and the first 64 bits of its pages' names, which nobody can make without prompt and
# salt. Several routers of one machine may share a file: a line is one write, and their clock is one.

logger = logging.getLogger(__name__)
Moment: TypeAlias = Annotated[float, Meta(ge=0)]  # seconds, by the router's clock


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    at_s: Moment


class DispatchedLine(_Line, frozen=True):
    decision: Decision
    page_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_output_tokens: Count  # expected, as the request's limit allows
    keys: str  # base64


class EndedLine(_Line, frozen=True):
    request_id: Id
    attempt: Attempt
    first_token_s: Seconds | None = None  # after it was sent out
    measured: PrefillTimes | None = None  # by who computed the prompt, if that has come by now


AnyLine: TypeAlias = DispatchedLine | EndedLine


class DecisionLog:
    """Lines are appended until that fails once: a full disk is no reason to route nothing.

    A new file is this user's alone. Where an earlier log ends in the middle of a line, it begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError when it cannot be written to."""
        self._path = path
        self._is_well = True
        try:
            is_cut = _ends_within_a_line(path)
            # Without a buffer: what has been said is there, whatever ends the process.
            self._file = io.FileIO(path, "a", opener=_open_for_this_user)
        except OSError as error:
            raise ConfigError(f"router.decision_log: {path} cannot be written to: {error}") from error
        if is_cut:
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        if self._is_well:
            self._try(lambda: self._write_all(line))

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:  # a disk that is almost full takes the beginning
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
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
    return _ENCODER.encode(line) + b"\n"


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[AnyLine]:
    """Without lines that were cut off. name: of the file. ConfigError names the line that cannot be read."""
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
    """Whether the line is only the beginning of one, because the disk was full or its writer was killed."""
    return line.startswith(b"{") and ("truncated" in str(error) or not line.rstrip().endswith(b"}"))


def keys_as_text(keys: bytes) -> str:
    """Of a prompt's keys, as a line has them."""
    return base64.b64encode(first_halves(keys)).decode()


def keys_in(line: DispatchedLine) -> list[bytes]:
    """ConfigError when they are no keys."""
    try:
        joined = base64.b64decode(line.keys, validate=True)
    except ValueError as error:
        raise ConfigError(f"the keys of request {line.decision.request_id}: {error}") from error
    return [joined[at : at + SHORT_KEY_BYTES] for at in range(0, len(joined), SHORT_KEY_BYTES)]
