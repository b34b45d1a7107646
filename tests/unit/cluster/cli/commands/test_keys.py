import functools
import hashlib
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster.cli.main import main
from baton.gateway.tenants.file import read_tenants
from baton.gateway.tenants.tenants import Tenants
from tests.unit.cluster.conftest import Baton, Result

Run = Callable[..., Result]


@pytest.fixture
def run(baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BATON_TENANTS", raising=False)

    return functools.partial(baton, "keys")


def lets_in(key: str) -> bool:
    return Tenants(b"k" * 32, read_tenants(Path("tenants.yaml"))).find(key) is not None


def id_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def test_a_key_is_shown_once_and_kept_as_a_digest(run: Run) -> None:
    status, out, err = run("add", "acme")
    key = out.strip()
    assert status == 0 and key.startswith("sk-baton-") and len(key) > 40
    assert lets_in(key) and key not in Path("tenants.yaml").read_text()
    assert key not in err and id_of(key) in err
    assert stat.S_IMODE(Path("tenants.yaml").stat().st_mode) == 0o600
    assert key not in "".join(run("list")[1:]) and id_of(key) in run("list")[1]


def test_a_revoked_key_opens_nothing(run: Run) -> None:
    first, second = run("add", "acme")[1].strip(), run("add", "acme")[1].strip()
    status, _, err = run("revoke", id_of(first))
    assert status == 0 and id_of(first) in err and "warning" not in err
    assert not lets_in(first) and lets_in(second)
    status, _, err = run("revoke", "sha256:" + hashlib.sha256(second.encode()).hexdigest())
    assert status == 0 and "no key is left" in err and not lets_in(second)
    assert run("list")[1].splitlines()[1].split() == ["acme", "-", "default", "1"]


def test_key_of_a_new_admin_opens_the_paths_of_operators(run: Run) -> None:
    assert run("add", "acme").status == run("add", "ops", "--admin").status == 0
    assert run("add", "ops", "--admin").status == 0
    entries = read_tenants(Path("tenants.yaml")).tenants
    assert (entries["ops"].admin, len(entries["ops"].keys), entries["acme"].admin) == (True, 2, False)
    status, out, err = run("add", "acme", "--admin")
    assert status == 2 and "tenants.acme is no admin: write `admin: true` there" in err and not out


def test_all_keys_of_a_tenant_go(run: Run) -> None:
    keys = [run("add", tenant)[1].strip() for tenant in ("acme", "zeta", "acme")]
    assert run("revoke", "acme/all")[0] == 0
    assert [lets_in(key) for key in keys] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("revoke", "0000"), "expected 8 digits or more of one key"),
        (("revoke", "000000000000"), "no key has that id"),
        (("revoke", "nobody/all"), "there is no tenant 'nobody'; known are acme"),
        (("revoke",), "the following arguments are required: ID"),
        (("add", "a b"), "a name matches"),
        (("add",), "the following arguments are required: TENANT"),
        (("remove", "x"), "invalid choice"),
        (("list", "--tenant", "x"), "did you mean --tenants?"),
        (("list", "--tenants", "none.yaml"), "none.yaml: cannot be read"),
        (("revoke", "0" * 8, "--tenants", "none.yaml"), "none.yaml: cannot be read"),
        (("add", "acme", "--tenants", "no/such/tenants.yaml"), "no/such: cannot be opened"),
    ],
)
def test_error_is_one_line(run: Run, arguments: tuple[str, ...], complaint: str) -> None:
    run("add", "acme")
    before = Path("tenants.yaml").read_text()
    status, out, err = run(*arguments)
    assert status == 2 and complaint in err and err.count("\n") == 1 and not out
    assert Path("tenants.yaml").read_text() == before


def test_invalid_file_is_not_changed(run: Run) -> None:
    Path("tenants.yaml").write_text("tenants: {acme: {keys: [], weight: -1}}")
    status, out, err = run("add", "acme")
    assert status == 2 and "tenants.acme.weight" in err and not out
    assert Path("tenants.yaml").read_text() == "tenants: {acme: {keys: [], weight: -1}}"


def test_the_files_mode_and_its_link_stay(run: Run) -> None:
    run("add", "acme")
    Path("tenants.yaml").chmod(0o640)
    Path("link.yaml").symlink_to("tenants.yaml")
    assert run("add", "zeta", "--tenants", "link.yaml")[0] == 0
    assert Path("link.yaml").is_symlink() and stat.S_IMODE(Path("tenants.yaml").stat().st_mode) == 0o640
    assert set(read_tenants(Path("tenants.yaml")).tenants) == {"acme", "zeta"}
    assert sorted(path.name for path in Path().iterdir()) == ["link.yaml", "tenants.yaml"]


def test_the_file_may_be_named_by_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TENANTS", "other.yaml")
    assert run("add", "acme")[0] == 0
    assert Path("other.yaml").exists() and not Path("tenants.yaml").exists()


def test_keys_added_at_the_same_time_are_all_there(run: Run) -> None:
    adding = [threading.Thread(target=main, args=(["keys", "add", f"t{n % 3}"],)) for n in range(12)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert sum(len(entry.keys) for entry in read_tenants(Path("tenants.yaml")).tenants.values()) == 12
