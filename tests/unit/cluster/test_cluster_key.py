from pathlib import Path

import pytest

from baton.cluster.cluster_key import cluster_key, read_key, write_secret
from baton.errors import ConfigError


def test_a_key_that_is_written_is_ours_alone_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    write_secret(path, b"0123456789abcdef")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == b"0123456789abcdef"


def test_nobody_is_given_the_same_key_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CLUSTER_KEY_FILE", raising=False)
    assert cluster_key(None) != cluster_key(None)
    assert len(cluster_key(None)) == 64


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secret(tmp_path / "key", b"from the environment\n")
    monkeypatch.setenv("BATON_CLUSTER_KEY_FILE", str(tmp_path / "key"))
    assert cluster_key(None) == b"from the environment"


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"can be read by others of this machine: chmod 600 {path}"):
        read_key(path)


def test_a_short_key_and_no_file_are_refused(tmp_path: Path) -> None:
    write_secret(tmp_path / "short", b"short")
    with pytest.raises(ConfigError, match="expected 16 to 1024 bytes, got 5"):
        read_key(tmp_path / "short")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key(tmp_path / "none")
