"""Rivals of the KV bench are commands: the work that they are given, and the rates that they print."""

import shlex
import sys
from pathlib import Path

import pytest

from baton.bench.kv import other_library
from baton.bench.kv.limits import PageMoves, Rival
from baton.errors import ConfigError

MOVES = PageMoves(4096, 8, [0, 1, 2], [3, 4, 5])
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


def rival_of(script: str, *arguments: str) -> Rival:
    """Return a rival that has run twice."""
    return has_run(shlex.join([sys.executable, "-c", script, *arguments]))


def has_run(command: str) -> Rival:
    rival = Rival(f"tcp:other={command}")
    for _ in range(2):
        rival.run(MOVES)
    return rival


@pytest.mark.parametrize(
    "text", ["other=move", "tcp:other", "tcp:=move", "udp:other=move", "tcp:other= ", ""]
)
def test_rival_without_transport_name_or_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TRANSPORT:NAME=COMMAND"):
        Rival(text)


def test_rival_is_given_the_work_and_its_last_line_counts() -> None:
    script = 'import sys; print("ready"); print(\'{"write": %s, "read": %s}\' % tuple(sys.argv[1:]))'
    assert rival_of(script, "{page_bytes}", "{num_pages}").gbps == {"write": 4096.0, "read": 3.0}


@pytest.mark.parametrize(
    "script",
    [
        "print('fast')",
        "print([1])",
        "print({})",
        'print(\'{"write": "fast"}\')',
        "print('{\"write\": -1}')",
        "print('{\"write\": 1}'); raise SystemExit(3)",
        "raise SystemExit('it broke')",
    ],
)
def test_output_without_rates_is_a_failure_that_quotes_it(script: str) -> None:
    rival = rival_of(script)
    assert not rival.gbps and "no rates in its last line" in rival.failure


def test_missing_command_is_a_failure() -> None:
    assert "/nonexistent/command" in has_run("/nonexistent/command").failure


def library(name: str, modules: Path) -> str:
    runner = Path(other_library.__file__).resolve()
    return f"env PYTHONPATH={modules} {sys.executable} {runner} {name} {{page_bytes}} {{num_pages}}"


def test_runner_for_mooncake_times_each_operation(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(ENGINE)
    gbps = has_run(library("mooncake", tmp_path)).gbps
    assert set(gbps) == {"write", "read"} and min(gbps.values()) > 0


def test_missing_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ModuleNotFoundError('no nixl for tests')")
    assert "no nixl for tests" in has_run(library("nixl", tmp_path)).failure
