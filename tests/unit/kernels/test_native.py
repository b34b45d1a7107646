"""Builds of the C kernels: once, whole or not at all; without a build only speed is lost."""

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.kernels import native
from tests.remote import Remote

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
#include "number.h"
#define EXPORT __attribute__((visibility("default")))
EXPORT int number(void) { return NUMBER; }
EXPORT void baton_set_num_threads(int count) { (void)count; }
"""
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "no compiler"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, and one small source to build."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(native, "_builds_folder", None)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "number.c").write_text(SOURCE)
    write_header(sources, 1)
    monkeypatch.setattr(native, "SOURCES", sources)
    return tmp_path


def write_header(folder: Path, number: int) -> None:
    (folder / "number.h").write_text(f"#define NUMBER {number}\n")


def write_source(home: Path, source: str) -> None:
    (home / "sources" / "number.c").write_text(source)


def load() -> ctypes.CDLL | None:
    """As at the first use in a process, whatever this one has loaded already."""
    library: ctypes.CDLL | None = native.library.__wrapped__()
    return library


def built(home: Path) -> dict[str, int]:
    """Name -> time of each file in the cache."""
    return {path.name: path.stat().st_mtime_ns for path in (home / ".cache" / "baton").iterdir()}


def put_compiler(home: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The only `cc` in the PATH; it may call on COMPILER."""
    folder = home / "bin"
    folder.mkdir()
    (folder / "cc").write_text(f"#!{shutil.which('sh')}\n{script}\n")
    (folder / "cc").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_build_is_kept_and_used_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = load()
    assert first is not None and first.number() == 1
    files = built(home)
    assert load() is not None and built(home) == files and len(files) == 1
    assert not warnings_of(caplog)
    folder = home / ".cache" / "baton"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # what is loaded from it runs as this user


def test_changed_source_or_header_is_built_anew(home: Path) -> None:
    load()
    write_header(home / "sources", 2)
    second = load()
    assert second is not None and second.number() == 2
    write_source(home, SOURCE.replace("return", "return 10 *"))
    third = load()
    assert third is not None and third.number() == 20
    assert len(built(home)) == 3


def forge(library: Path) -> None:
    library.unlink()  # this process has the contents mapped
    library.write_bytes(b"forged")


@pytest.mark.parametrize("mode", [0o722, 0o702, 0o720])
def test_library_that_others_may_write_is_built_anew(
    home: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    load()
    folder = home / ".cache" / "baton"
    (library,) = folder.iterdir()
    forge(library)
    library.chmod(mode)
    again = load()
    assert again is not None and again.number() == 1
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    assert "is not loaded" in warnings_of(caplog)[0]


def test_link_in_place_of_the_library_is_replaced(home: Path, tmp_path: Path) -> None:
    load()
    (library,) = (home / ".cache" / "baton").iterdir()
    forged = tmp_path / "forged.so"
    forged.write_bytes(b"forged")
    library.unlink()
    library.symlink_to(forged)
    again = load()
    assert again is not None and again.number() == 1 and not library.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_library_of_another_user_is_not_loaded(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    load()
    folder = home / ".cache" / "baton"
    (library,) = folder.iterdir()
    forge(library)
    os.chown(library, 12345, 12345)
    again = load()
    assert again is not None and again.number() == 1 and library.stat().st_uid == 0
    os.chown(folder, 12345, 12345)
    assert load() is None
    assert "user 12345 could replace" in warnings_of(caplog)[-1]
    assert "set BATON_CACHE_DIR" in warnings_of(caplog)[-1]


def test_lenient_folder_and_umask_are_closed_to_others(home: Path) -> None:
    folder = home / ".cache" / "baton"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    before = os.umask(0)
    try:
        assert load() is not None
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o700]


TROUBLES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "no compiler": (lambda home, patch: patch.setenv("PATH", str(home)), "no C compiler found"),
    "compiler fails": (
        lambda home, patch: put_compiler(home, patch, "echo 'unknown machine' >&2; exit 1"),
        "failed: unknown machine",
    ),
    "source does not compile": (
        lambda home, patch: write_source(home, "int number(void) { return nothing; }"),
        "nothing",
    ),
    "home takes no files": (
        lambda home, patch: patch.setenv("HOME", str(home / "sources" / "number.c")),
        "not built",
    ),
    "library cannot be loaded": (
        lambda home, patch: put_compiler(
            home, patch, 'while [ "$1" != -o ]; do shift; done; echo ELF > "$2"'
        ),
        "not built",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_missing_library_costs_speed_only_and_one_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    make, message = TROUBLES[trouble]
    make(home, monkeypatch)
    assert load() is None
    (warning,) = warnings_of(caplog)
    assert message in warning
    folder = home / ".cache" / "baton"
    assert not list(folder.glob("compiling-*")), "no temporary folder is left behind"


class Builder:
    """A process that has not used the library yet."""

    def __init__(self, sources: Path, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        vars(native).update(SOURCES=sources, _builds_folder=None)

    def has_started(self) -> bool:
        return True

    def number(self) -> int:
        library = load()
        assert library is not None
        return int(library.number())

    def close(self) -> None:
        """Do nothing: the library stays loaded."""


def test_one_of_the_processes_that_start_at_once_builds_for_all(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = home / "links"
    script = f'case "$*" in *-lm) echo >> {links};; esac; sleep 0.2; exec {COMPILER} "$@"'
    put_compiler(home, monkeypatch, script)
    given = home / "sources", {name: os.environ[name] for name in ("HOME", "PATH")}
    with Remote(Builder, *given) as first, Remote(Builder, *given) as second:
        assert first.has_started() and second.has_started()
        for process in (first, second):
            process.start_call("number")
        assert [process.result() for process in (first, second)] == [1, 1]
    assert len(built(home)) == 1, "no temporary folder is left behind"
    assert links.read_text() == "\n"


FALLBACK = """
import torch
from baton.kernels import native
from baton.kernels.linear import linear, pack_linear
from baton.kernels.rms_norm import rms_norm
from baton.kernels.gated import gated
from baton.kernels.store_kv import store_kv
from baton.kernels.store_kv import rope
from baton.kernels.sample import SamplingTensors, sample
from baton.kernels.ragged_attention import RaggedBatch, ragged_attention

x = torch.ones(2, 16)
assert native.library() is None
assert linear(x, pack_linear(torch.ones(3, 16)), num_splits=2).tolist() == [[16.0] * 3] * 2
assert rms_norm(x, x[0], 0.0).tolist() == x.tolist()
assert rms_norm(x, x[0], 0.0, x.clone()).tolist() == x.tolist()
assert gated(torch.zeros(2, 16)).tolist() == [[0.0] * 8] * 2
pages = torch.zeros(1, 2, 1, 4, 16)
heads = x[:, None]
rope(heads, heads.clone(), torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), 1), torch.tensor([0, 1]))
store_kv(heads, heads, pages, torch.tensor([0, 1]))
int32 = torch.int32
batch = RaggedBatch(
    cu_seqlens_B1=torch.tensor([0, 2], dtype=int32), context_lens_B=torch.tensor([2], dtype=int32),
    page_table_BP=torch.tensor([[0]], dtype=int32), num_decodes=0, max_seqlen_q=2)
assert ragged_attention(heads, pages, batch, scale=1.0).tolist() == heads.tolist()
one = torch.zeros(1)
sampling = SamplingTensors(one, one.int(), one + 1, one, one.long(), one.int(), one.long())
assert sample(torch.tensor([[0.0, 2.0]]), sampling).tolist() == [1]
"""


def test_every_op_runs_without_a_compiler_and_warns_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no C compiler found") == 1, result.stderr


def test_missing_library_names_the_check_to_make_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(RuntimeError, match=r"baton_nothing: the native kernels are not built"):
        native.function.__wrapped__("baton_nothing", "p")
    assert not native.handles(torch.float32)
