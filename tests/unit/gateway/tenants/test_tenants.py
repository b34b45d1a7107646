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


def test_keys_find_their_tenant(tmp_path: Path) -> None:
    found = tenants(
        tmp_path, f'tenants: {{acme: {{keys: ["{GOOD}"]}}, zeta: {{keys: ["{OTHER}"], models: [tiny]}}}}'
    )
    acme, zeta = found.find("good"), found.find("other")
    assert acme is not None and acme.name == "acme" and acme.may_use("anything")
    assert zeta is not None and zeta.may_use("tiny") and not zeta.may_use("large")
    assert acme.cache_salt != zeta.cache_salt
    for wrong in ("", "goo", "good ", "Good", "\udcff", GOOD):
        assert found.find(wrong) is None


def test_admins_are_named(tmp_path: Path) -> None:
    found = tenants(
        tmp_path, f'tenants: {{acme: {{keys: ["{GOOD}"]}}, root: {{keys: ["{OTHER}"], admin: true}}}}'
    )
    acme, root = found.find("good"), found.find("other")
    assert acme is not None and not acme.is_admin and root is not None and root.is_admin


def test_without_a_file_everybody_is_the_same() -> None:
    found = Tenants.from_file(None, KEY)
    assert not found.need_keys
    assert found.find("") == found.find("anything") is not None


def test_salts_depend_on_the_clusters_key() -> None:
    assert cache_salt(KEY, "a") != cache_salt(b"x" * 32, "a")
    assert len(cache_salt(KEY, "a")) == 16


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a mapping"),
        ("[]", "expected a mapping"),
        ("tenants: []", "tenants: expected a mapping"),
        ("tenants: {}", "at least one tenant"),
        ("tenants: {a: {keys: []}}", "at least one tenant"),
        ("tennants: {}", "did you mean 'tenants'"),
        (f'tenants: {{a: {{key: ["{GOOD}"]}}}}', "did you mean 'tenants.a.keys'"),
        ("tenants: {a: {keys: [my-secret-key]}}", r"keys\[0\]: expected 'sha256:'"),
        (f"tenants: {{a: {{keys: {GOOD}}}}}", "tenants.a"),
        ("tenants: {a: {}}", "tenants.a"),
        ("tenants: {a: 1}", "tenants.a: expected a mapping"),
        (f'tenants: {{"a b": {{keys: ["{GOOD}"]}}}}', "a name matches"),
        (f'tenants: {{1: {{keys: ["{GOOD}"]}}}}', "a name matches"),
        (f'tenants: {{a: {{keys: ["{GOOD}"]}}, b: {{keys: ["{GOOD}"]}}}}', "belongs to two"),
        ("tenants: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        tenants(tmp_path, text)
    assert "my-secret-key" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants.from_file(tmp_path / "none.yaml", KEY)


def test_after_a_rotation_the_salts_are_those_of_the_new_key(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f'tenants: {{acme: {{keys: ["{GOOD}"]}}}}')
    ring = KeyRing.of(KEY, Kind.GATEWAY)
    found = [Tenants.from_file(tmp_path / "tenants.yaml", ring), Tenants.from_file(None, ring)]
    before = [salt_of(each) for each in found]
    ring.replace(KeyRing.of((NEW_KEY, KEY), Kind.GATEWAY).generations)
    after = [salt_of(each) for each in found]
    ring.replace(KeyRing.of(NEW_KEY, Kind.GATEWAY).generations)
    assert [salt_of(each) for each in found] == after
    assert not {*before} & {*after}
