import hashlib
import os
import socket
from pathlib import Path

import msgspec
import pytest

from baton.cluster import cluster_record
from baton.cluster.cluster_record import ClusterRecord, find_record, recorded, url
from baton.cluster.files import write_secret
from baton.cluster.runtimes.base import started_at
from baton.errors import ConfigError
from baton.messages.workers import Address

RECORD = ClusterRecord(host="127.0.0.1", port=8000, routers=(Address("127.0.0.1", 7000),), keys=(b"k" * 16,))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the records of this machine, empty."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    with recorded() as record:
        record(RECORD)
        (machine,) = (tmp_path / "clusters").iterdir()
    return machine


def name_of(pid: int) -> str:
    return f"{pid}-{started_at(pid)}.json"


def test_a_cluster_is_found_while_it_runs(directory: Path) -> None:
    with recorded() as record:
        record(RECORD)
        assert find_record() == find_record(8000) == RECORD
        (path,) = directory.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(directory.iterdir()) == []
    with pytest.raises(ConfigError, match="no cluster of yours runs on this machine: start one"):
        find_record()


def test_one_of_several_is_chosen_by_its_port(directory: Path) -> None:
    write_secret(directory / name_of(os.getppid()), msgspec.json.encode(RECORD))
    with recorded() as record:
        record(msgspec.structs.replace(RECORD, port=9000))
        assert find_record(9000).port == 9000
        with pytest.raises(ConfigError, match=r"several clusters run .*--port (8000, 9000|9000, 8000)$"):
            find_record()
        with pytest.raises(ConfigError, match="with its API at port 1 runs on this machine"):
            find_record(1)


@pytest.mark.parametrize("pid", [2**22 + 1, None], ids=["beyond the largest id", "of another process now"])
def test_record_of_a_killed_serve_is_removed(directory: Path, pid: int | None) -> None:
    stale = directory / f"{os.getpid() if pid is None else pid}-7.json"
    write_secret(stale, msgspec.json.encode(RECORD))
    with pytest.raises(ConfigError, match="no cluster"):
        find_record()
    assert not stale.exists()


def test_record_of_another_machine_is_left_alone(directory: Path) -> None:
    """They share the cache, as over NFS. Its processes cannot be seen here."""
    elsewhere = directory.with_name("another") / name_of(os.getpid())
    write_secret(elsewhere, msgspec.json.encode(RECORD))
    with pytest.raises(ConfigError, match="no cluster"):
        find_record()
    assert elsewhere.exists()


def test_cluster_is_found_after_its_machine_got_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded() as record:
        record(RECORD)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert find_record() == RECORD


def test_folders_of_earlier_boots_of_the_machine_are_removed(directory: Path) -> None:
    machine, boot, container = directory.name.split("-")
    earlier, other_container, other_machine = others = [
        directory.with_name("-".join(parts))
        for parts in ((machine, "0", container), (machine, boot, "0"), ("0", "0", container))
    ]
    namesake = directory.with_name(f"{machine}-1-{container}")  # another machine: its folder is of this boot
    for folder in (namesake, *others):
        write_secret(folder / "1-7.json", msgspec.json.encode(RECORD))
    for folder in others:
        os.utime(folder, (0, 0))
    with recorded():
        assert not earlier.exists()
        assert other_container.exists() and other_machine.exists() and namesake.exists()


@pytest.mark.parametrize("content", [None, b"", b"uninitialized\n"])
def test_machine_without_an_id_removes_no_folder_of_a_machine_of_its_name(
    content: bytes | None, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_id = tmp_path / "machine-id"
    if content is not None:
        machine_id.write_bytes(content)
    monkeypatch.setattr(cluster_record, "MACHINE_ID", machine_id)
    with recorded() as record:
        record(RECORD)
        (own,) = (path.parent for path in directory.parent.glob("*/*.json"))
    container = own.name.rpartition("-")[2]
    named = hashlib.blake2b((content or b"") + socket.gethostname().encode(), digest_size=6).hexdigest()
    others = [directory.with_name(f"{each}-0-{container}") for each in {named, directory.name.split("-")[0]}]
    for folder in others:
        write_secret(folder / "1-7.json", msgspec.json.encode(RECORD))
        os.utime(folder, (0, 0))
    with recorded():
        assert all(folder.exists() for folder in others)


def test_folder_that_cannot_be_made_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="file/clusters/.*: the folder cannot be made: Not a directory"):
        recorded().__enter__()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("127.0.0.2", "127.0.0.2")],
)
def test_the_url_can_be_connected_to(host: str, expected: str) -> None:
    assert url(host, 80) == f"http://{expected}:80"


def test_damaged_record_is_skipped(directory: Path) -> None:
    write_secret(directory / name_of(os.getpid()), b"{")
    with pytest.raises(ConfigError, match="no cluster"):
        find_record()
