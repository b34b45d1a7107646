import logging
import os
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.errors import ConfigError
from baton.gateway.tenants.tenants import (
    SETTLE_S,
    Tenants,
    TenantsWatch,
    cache_salt,
    key_digest,
)
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing
from tests.fakes import JumpingClock

KEY, NEW_KEY = b"k" * 32, b"n" * 32
GOOD = f"sha256:{key_digest('good').hex()}"
OTHER = f"sha256:{key_digest('other').hex()}"


def tenants(path: Path, text: str) -> Tenants:
    (path / "tenants.yaml").write_text(text)
    return Tenants.from_file(path / "tenants.yaml", KEY)


def salt_of(found: Tenants) -> bytes:
    tenant = found.find("good")
    assert tenant is not None
    return tenant.cache_salt


def test_key_finds_its_tenant(tmp_path: Path) -> None:
    found = tenants(
        tmp_path, f'tenants: {{acme: {{keys: ["{GOOD}"]}}, zeta: {{keys: ["{OTHER}"], models: [tiny]}}}}'
    )
    acme, zeta = found.find("good"), found.find("other")
    assert acme is not None and acme.name == "acme" and acme.may_use("anything")
    assert zeta is not None and zeta.may_use("tiny") and not zeta.may_use("large")
    assert acme.cache_salt != zeta.cache_salt
    for wrong in ("", "goo", "good ", "Good", "\udcff", GOOD):
        assert found.find(wrong) is None


def test_without_a_file_every_client_is_one_tenant() -> None:
    found = Tenants(KEY)
    assert not found.need_keys
    assert found.find("") == found.find("anything") is not None


def test_salts_depend_on_the_cluster_key() -> None:
    assert cache_salt(KEY, "a") != cache_salt(b"x" * 32, "a")
    assert len(cache_salt(KEY, "a")) == 16


@pytest.mark.parametrize("text", ["tenants: {}", "tenants: {a: {keys: []}}"])
def test_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="at least one tenant"):
        tenants(tmp_path, text)


def test_rotation_of_the_cluster_key_changes_the_salts(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f'tenants: {{acme: {{keys: ["{GOOD}"]}}}}')
    ring = KeyRing.of(KEY, Kind.GATEWAY)
    found = [Tenants.from_file(tmp_path / "tenants.yaml", ring), Tenants(ring)]
    before = [salt_of(each) for each in found]
    ring.replace(KeyRing.of((NEW_KEY, KEY), Kind.GATEWAY).generations)
    after = [salt_of(each) for each in found]
    ring.replace(KeyRing.of(NEW_KEY, Kind.GATEWAY).generations)
    assert [salt_of(each) for each in found] == after
    assert not {*before} & {*after}


# The tenants file that changes.


def text(**keys: str) -> str:
    """Return the text of a tenants file in which each tenant has one key."""
    tenants = "".join(
        f"  {name}:\n    keys: ['sha256:{key_digest(key).hex()}']\n" for name, key in keys.items()
    )
    return f"tenants:\n{tenants}"


class Watched:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.yaml"
        self.num_writes = 0
        self.write(text(acme="old"))
        self.clock = JumpingClock(1000.0)
        self.watch = TenantsWatch(self.path, KEY, self.clock)

    def write(self, content: str) -> None:
        """In place, each a second after the one before: a file system may tell no finer times apart."""
        self.path.write_text(content)
        self.num_writes += 1
        os.utime(self.path, (self.num_writes, self.num_writes))

    def settle(self) -> bool:
        """Look at the file twice, SETTLE_S apart."""
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
    watched.clock.jump(-500)
    assert not watched.watch.look()
    watched.clock.advance(2 * SETTLE_S)
    assert watched.watch.look() and watched.lets_in("new")


def test_missing_file_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantsWatch(tmp_path / "none.yaml", KEY, ManualClock())
