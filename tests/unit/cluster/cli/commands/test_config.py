import json
from pathlib import Path

import pytest

from baton.cluster.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(["config", *arguments])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_prints_every_setting_and_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_PORT", "9000")
    status, out, _ = run(capsys, "show", "tiny", "--decode", "3", "--origin")
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    assert status == 0
    assert lines["port"].split() == ["port:", "9000", "#", "BATON_PORT"]
    assert lines["decode.num_workers"].split() == ["decode.num_workers:", "3", "#", "--decode"]
    assert lines["engine.seed"].endswith("# default; BATON_ENGINE_SEED")


def test_what_show_prints_without_origins_is_a_file_that_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "show", "tiny", "--prefill-tp", "2")
    file = tmp_path / "baton.yaml"
    file.write_text(out)
    assert run(capsys, "show", "--config", str(file))[1] == out


def test_the_schema_describes_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "schema")
    schema = json.loads(out)
    assert status == 0
    assert schema["$defs"]["ServeConfig"]["properties"]["port"]["maximum"] == 65_535
    assert schema["$defs"]["ServeConfig"]["required"] == ["model"]


def test_validate_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("model: tiny\nport: 80000\n")
    assert run(capsys, "validate", str(file))[::2] == (
        2,
        f"baton: error: {file}: port: expected int, at least 0, at most 65535, got 80000 (int)\n",
    )
    file.write_text("model: tiny\nport: 8001\ntenants: tenants.yaml\n")
    assert run(capsys, "validate", str(file))[:2] == (0, f"{file}: 3 settings, all well\n")


def test_validate_knows_a_file_of_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {keys: [], weight: 2}, zeta: {keys: []}}")
    assert run(capsys, "validate", str(file))[:2] == (0, f"{file}: 2 tenants, all well\n")
    file.write_text("tenants: {acme: {keys: [], wieght: 2}}")
    status, _, complaint = run(capsys, "validate", str(file))
    assert status == 2 and "weight" in complaint


def test_an_unknown_option_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "show", "tiny", "--prefil", "2")
    assert (status, "unknown option '--prefil'; did you mean --prefill?" in err) == (2, True)
