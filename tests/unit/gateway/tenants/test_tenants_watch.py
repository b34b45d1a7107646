import logging
import os
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.errors import ConfigError
from baton.gateway.tenants.tenants import SETTLE_S, TenantsWatch, key_digest

KEY = b"k" * 32


def text(**keys: str) -> str:
    """Of tenants, each with one key."""
    tenants = "".join(
        f"  {name}:\n    keys: ['sha256:{key_digest(key).hex()}']\n" for name, key in keys.items()
    )
    return f"tenants:\n{tenants}"


class JumpingClock:
    def __init__(self) -> None:
        self.at_s = 1000.0

    def now_s(self) -> float:
        return self.at_s

    def advance(self, seconds: float) -> None:
        self.at_s += seconds


class Watched:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.yaml"
        self.num_writes = 0
        self.write(text(acme="old"))
        self.clock = JumpingClock()
        self.watch = TenantsWatch(self.path, KEY, self.clock)

    def write(self, content: str) -> None:
        """In place, each a second after the one before: a file system may tell no finer times apart."""
        self.path.write_text(content)
        self.num_writes += 1
        os.utime(self.path, (self.num_writes, self.num_writes))

    def settle(self) -> bool:
        """Look at the file as it is, and once more when it has not changed for long enough."""
        self.watch.look()
        self.clock.advance(SETTLE_S)
        return self.watch.look()

    def lets_in(self, key: str) -> bool:
        return self.watch.tenants.find(key) is not None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_changed_file_is_taken_once_it_has_settled(watched: Watched) -> None:
    watched.write(text(acme="new"))
    assert not watched.watch.look(), "it may be half written"
    assert watched.lets_in("old")
    watched.clock.advance(SETTLE_S)
    assert watched.watch.look()
    assert watched.lets_in("new") and not watched.lets_in("old")
    assert not watched.settle() and watched.watch.counters["taken"] == 1


def test_file_that_keeps_changing_is_not_taken(watched: Watched) -> None:
    whole = text(acme="new", zeta="other")
    for end in range(10, len(whole) - 1, 10):
        watched.write(whole[:end])
        watched.clock.advance(SETTLE_S)
        assert not watched.watch.look()
    assert watched.lets_in("old") and not watched.watch.counters["refused"]


def test_replaced_file_is_taken(watched: Watched) -> None:
    other = watched.path.with_suffix(".new")
    other.write_text(text(acme="new"))
    os.replace(other, watched.path)
    assert watched.settle() and watched.lets_in("new")


def test_wrong_file_changes_nothing_and_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.write(text(acme="new")[:-5])
    with caplog.at_level(logging.WARNING):
        assert not watched.settle() and not watched.settle()
    assert watched.lets_in("old") and not watched.lets_in("new")
    (record,) = caplog.records
    assert "stay what they were" in record.getMessage() and "tenants.yaml" in record.getMessage()
    watched.write(text(acme="new"))
    assert watched.settle() and watched.lets_in("new")


def test_missing_file_changes_nothing(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.path.unlink()
    assert not watched.settle() and not watched.settle()
    assert watched.lets_in("old") and len(caplog.records) == 1
    watched.write(text(acme="new"))
    assert watched.settle() and watched.lets_in("new")


def test_last_key_can_be_revoked(watched: Watched) -> None:
    watched.write("tenants: {acme: {keys: []}}")
    assert watched.settle()
    assert watched.watch.tenants.need_keys and not watched.lets_in("old") and not watched.lets_in("")


def test_clock_that_jumps_back_only_delays(watched: Watched) -> None:
    watched.write(text(acme="new"))
    watched.watch.look()
    watched.clock.advance(-500)
    assert not watched.watch.look()
    watched.clock.advance(2 * SETTLE_S)
    assert watched.watch.look() and watched.lets_in("new")


def test_missing_file_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantsWatch(tmp_path / "none.yaml", KEY, ManualClock())
