"""Rivals of the KV bench are commands: what they are told, and what becomes of what they say."""

import shlex
import sys
from pathlib import Path

import pytest

from baton.bench.kv import other_library as kv_other_library
from baton.bench.kv.limits import Contest, PageMoves, Rival, rates_of
from baton.errors import ConfigError

MOVES = PageMoves(4096, 8, [0, 1, 2], [3, 4, 5])
TRANSPORTS = ("shm", "tcp")


# Takes the calls that Mooncake's engine takes, and moves nothing.
ENGINE = """
class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        return 0 if (host, metadata, protocol) == ("127.0.0.1", "P2PHANDSHAKE", "tcp") else 1

    def register_memory(self, address, num_bytes):
        self.pool = range(address, address + num_bytes)
        return 0

    def get_rpc_port(self):
        return 17

    def batch_transfer_sync_write(self, peer, here, there, lengths):
        is_within = all(page in self.pool for page in here) and lengths == [4096] * len(here)
        return 0 if peer == "127.0.0.1:17" and is_within and len(here) == len(there) == 3 else 1

    batch_transfer_sync_read = batch_transfer_sync_write
"""


def command(script: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", script, *arguments])


SPEAKING = """
import json, sys
print("ready")
print(json.dumps({"write": int(sys.argv[1]), "read": int(sys.argv[2])}))
"""


def test_a_rival_is_named_with_the_transport_it_is_set_against() -> None:
    rival = Rival.parsed("tcp:other=env A=1 move {page_bytes}", TRANSPORTS)
    assert rival == ("tcp", "other", "env A=1 move {page_bytes}")


@pytest.mark.parametrize(
    "text", ["other=move", "tcp:other", "tcp:=move", "udp:other=move", "tcp:other= ", ""]
)
def test_a_rival_that_is_not_named_so_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TRANSPORT:NAME=COMMAND"):
        Rival.parsed(text, TRANSPORTS)


def test_a_rival_is_told_the_work_and_its_last_line_counts() -> None:
    assert rates_of(command(SPEAKING, "{page_bytes}", "{num_pages}"), MOVES) == {"write": 4096.0, "read": 3.0}


@pytest.mark.parametrize(
    "script",
    [
        "print('fast')",
        "print([1])",
        "print({})",
        "print('{}')",
        'print(\'{"write": "fast"}\')',
        "print('{\"write\": -1}')",
        "print('{\"write\": true}')",
        "print('{\"write\": 1}'); raise SystemExit(3)",
        "raise SystemExit('it broke')",
    ],
)
def test_what_is_no_rate_is_an_error_that_quotes_it(script: str) -> None:
    with pytest.raises(RuntimeError, match="no rates in its last line"):
        rates_of(command(script), MOVES)


def other_library(name: str, modules: Path) -> str:
    runner = Path(kv_other_library.__file__).resolve()
    return f"env PYTHONPATH={modules} {sys.executable} {runner} {name} {{page_bytes}} {{num_pages}}"


def test_the_runner_for_mooncake_times_each_operation(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(ENGINE)
    rates = rates_of(other_library("mooncake", tmp_path), MOVES)
    assert set(rates) == {"write", "read"} and min(rates.values()) > 0


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ModuleNotFoundError('no nixl for tests')")
    with pytest.raises(RuntimeError, match="no nixl for tests"):
        rates_of(other_library("nixl", tmp_path), MOVES)


def test_rounds_of_a_rival_have_a_median_and_a_failure_is_told_once() -> None:
    rivals = [
        Rival("shm", "steady", command(SPEAKING, "5", "6")),
        Rival("tcp", "broken", command("raise SystemExit('it broke')")),
        Rival("tcp", "absent", "/nonexistent/command"),
    ]
    contest = Contest(rivals, MOVES)
    for _ in range(2):
        contest.run()
    steady, broken, absent = contest.rates()
    assert steady == ("shm", "steady", {"write": 5.0, "read": 6.0}, "")
    assert not broken.gbps and "it broke" in broken.failure
    assert not absent.gbps and "/nonexistent/command" in absent.failure
