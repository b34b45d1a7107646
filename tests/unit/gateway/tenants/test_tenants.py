from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.gateway.tenants.tenants import Tenants, cache_salt, key_digest
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing

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


def test_admin_tenant_is_marked(tmp_path: Path) -> None:
    found = tenants(
        tmp_path, f'tenants: {{acme: {{keys: ["{GOOD}"]}}, root: {{keys: ["{OTHER}"], admin: true}}}}'
    )
    acme, root = found.find("good"), found.find("other")
    assert acme is not None and not acme.is_admin and root is not None and root.is_admin


def test_without_a_file_every_client_is_one_tenant() -> None:
    found = Tenants.from_file(None, KEY)
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
    found = [Tenants.from_file(tmp_path / "tenants.yaml", ring), Tenants.from_file(None, ring)]
    before = [salt_of(each) for each in found]
    ring.replace(KeyRing.of((NEW_KEY, KEY), Kind.GATEWAY).generations)
    after = [salt_of(each) for each in found]
    ring.replace(KeyRing.of(NEW_KEY, Kind.GATEWAY).generations)
    assert [salt_of(each) for each in found] == after
    assert not {*before} & {*after}
