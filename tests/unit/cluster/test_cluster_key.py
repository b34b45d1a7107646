from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.cluster.cli.main import main
from baton.cluster.cluster_key import USE_AFTER_S, Keys, KeyWatch, new_key, read_keys
from baton.cluster.files import write_secret
from baton.errors import ConfigError

OLD, NEW, THIRD = (name * 16 for name in (b"o", b"n", b"t"))


def test_a_key_that_is_written_is_ours_alone_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    write_secret(path, b"0123456789abcdef")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == (b"0123456789abcdef",)


def test_a_secret_that_is_written_again_is_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o644)
    write_secret(tmp_path / "key", OLD)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_no_two_new_keys_are_the_same() -> None:
    assert new_key() != new_key()
    assert len(new_key()) == 64


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"can be read by others of this machine: chmod 600 {path}"):
        read_keys(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"short", "expected 16 to 1024 bytes, got 5"),
        (b"", "expected 16 to 1024 bytes, got 0"),
        (b"\n".join((OLD, b"short")), "expected 16 to 1024 bytes, got 5"),
        (b"\n".join((OLD, NEW, THIRD)), "expected one or two keys, a line each, got 3"),
    ],
)
def test_a_file_with_a_short_key_or_too_many_is_refused(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    write_secret(tmp_path / "key", content)
    with pytest.raises(ConfigError, match=complaint):
        read_keys(tmp_path / "key")


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file .*: make it with `baton cluster-key new"):
        read_keys(tmp_path / "none")


class Watched:
    """A watch of keys that a test changes."""

    def __init__(self, *keys: bytes) -> None:
        self.now: Keys | None = keys
        self.clock = ManualClock()
        self.watch = KeyWatch(self._read, self.clock)

    def _read(self) -> Keys:
        if self.now is None:
            raise ConfigError("no file")
        return self.now

    def after(self, seconds: float, *keys: bytes) -> Keys:
        """Return the keys in use after the file has had `keys` for so long."""
        if keys:
            self.now = keys
            self.watch.look()
        self.clock.advance(seconds)
        before = self.watch.keys
        assert self.watch.look() is (self.watch.keys != before)
        return self.watch.keys


def test_a_new_key_is_accepted_at_once_and_used_when_others_know_it() -> None:
    watched = Watched(OLD)
    assert watched.after(0.0) == (OLD,)
    assert watched.after(USE_AFTER_S / 2, NEW, OLD) == (OLD, NEW)
    assert watched.after(USE_AFTER_S) == (NEW, OLD)
    assert watched.after(0.0, NEW) == (NEW,)


def test_a_file_that_has_the_new_key_alone_is_followed_in_two_steps_as_well() -> None:
    watched = Watched(OLD)
    assert watched.after(0.0, NEW) == (OLD, NEW)
    assert watched.after(USE_AFTER_S) == (NEW,)


def test_a_key_that_was_accepted_already_is_used_at_once() -> None:
    watched = Watched(OLD)
    assert watched.after(0.0, OLD, NEW) == (OLD, NEW)
    assert watched.after(0.0, NEW, OLD) == (NEW, OLD)


def test_a_file_that_cannot_be_read_changes_nothing_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(OLD)
    watched.now = None
    assert [watched.after(1.0) for _ in range(3)] == [(OLD,)] * 3
    assert caplog.messages == ["the cluster keys stay the same: no file"]
    assert watched.after(USE_AFTER_S, NEW, OLD) == (NEW, OLD)


def test_file_that_cannot_be_read_once_more_is_told_once_more(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(OLD)
    for _ in range(2):
        watched.now = None
        watched.after(1.0)
        watched.after(1.0, OLD)
    assert caplog.messages == ["the cluster keys stay the same: no file"] * 2


def test_new_makes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster-key", "new", "--cluster-key-file", str(tmp_path / "cluster.key")]
    assert main(command) == 0
    keys = read_keys(tmp_path / "cluster.key")
    assert len(keys) == 1
    assert main(command) == 2 and "exists already" in capsys.readouterr().err
    assert read_keys(tmp_path / "cluster.key") == keys


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    command = ["cluster-key", "new", "--cluster-key-file", str(tmp_path / "file" / "folder" / "key")]
    assert main(command) == 2
    assert f"{tmp_path}/file/folder: the folder cannot be made: Not a directory" in capsys.readouterr().err


def test_rotate_puts_a_new_key_first_and_retire_drops_the_old(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_secret(path, OLD)
    command = ["--cluster-key-file", str(path)]
    assert main(["cluster-key", "rotate", *command]) == 0
    new, old = read_keys(path)
    assert old == OLD != new
    assert main(["cluster-key", "rotate", *command]) == 2
    assert main(["cluster-key", "retire", *command]) == 0
    assert read_keys(path) == (new,)
    assert main(["cluster-key", "retire", *command]) == 2
    assert path.stat().st_mode & 0o777 == 0o600
