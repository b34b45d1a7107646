"""Other libraries that move pages, in the same rounds as Baton's transports.

A rival is a command that moves a batch of pages between two processes of its own. `{page_bytes}` and
`{num_pages}` in it are replaced by the work of bench/kv/limits.py, and the last line that it prints is
a JSON object with its rates in GB/s: {"write": 9.3, "read": 15.9}.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple, Self

from baton.bench.kv.limits import PageMoves
from baton.errors import ConfigError

TIMEOUT_S: Final = 300.0
SHOWN_CHARACTERS: Final = 300  # of what a command that failed had to say


class Rival(NamedTuple):
    """One of them, and the transport of ours that does what it does."""

    transport: str
    name: str
    command: str

    @classmethod
    def parsed(cls, text: str, transports: Sequence[str]) -> Self:
        """Of TRANSPORT:NAME=COMMAND; ConfigError says what is missing."""
        title, equals, command = text.partition("=")
        transport, _, name = title.partition(":")
        if not equals or not name or not command.strip() or transport not in transports:
            known = ", ".join(transports)
            raise ConfigError(f"rival: expected TRANSPORT:NAME=COMMAND, TRANSPORT of {known}; got {text!r}")
        return cls(transport, name, command)


class RivalRates(NamedTuple):
    """Medians over the rounds, GB/s by operation; or why there are none."""

    transport: str
    name: str
    gbps: Mapping[str, float]
    failure: str = ""


class Contest:
    """Some rivals at one kind of work. One that fails once is not asked again."""

    def __init__(self, rivals: Sequence[Rival], moves: PageMoves) -> None:
        self._moves = moves
        self._rivals = rivals
        self._rounds: dict[Rival, list[Mapping[str, float]]] = {rival: [] for rival in rivals}
        self._failures: dict[Rival, str] = {}

    def run(self) -> None:
        """One round of each."""
        for rival in self._rivals:
            if rival in self._failures:
                continue
            try:
                self._rounds[rival].append(rates_of(rival.command, self._moves))
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                self._failures[rival] = str(error)

    def rates(self) -> list[RivalRates]:
        return [self._rates_of(rival) for rival in self._rivals]

    def _rates_of(self, rival: Rival) -> RivalRates:
        if rival in self._failures:
            return RivalRates(rival.transport, rival.name, {}, self._failures[rival])
        rounds = self._rounds[rival]
        operations = rounds[0] if rounds else ()
        gbps = {operation: median(rates[operation] for rates in rounds) for operation in operations}
        return RivalRates(rival.transport, rival.name, gbps)


def rates_of(command: str, moves: PageMoves) -> dict[str, float]:
    """Run it once. RuntimeError with what it said when its last line is not what was agreed."""
    filled = command.replace("{page_bytes}", str(moves.page_bytes)).replace(
        "{num_pages}", str(len(moves.source_pages))
    )
    result = subprocess.run(
        shlex.split(filled), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    said = (result.stdout + result.stderr).strip()[-SHOWN_CHARACTERS:]
    rates = _rates_in(result.stdout)
    if result.returncode or not rates:
        raise RuntimeError(f"it ended with {result.returncode}, and no rates in its last line: {said}")
    return rates


def _rates_in(output: str) -> dict[str, float]:
    """By operation; none where the last line is not what was agreed."""
    lines = output.strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return {}
    if not isinstance(found, dict) or not all(_is_rate(rate) for rate in found.values()):
        return {}
    return {operation: float(rate) for operation, rate in found.items()}


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
