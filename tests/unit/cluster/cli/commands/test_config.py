import json
from pathlib import Path

import pytest

from tests.unit.cluster.conftest import Baton


def test_show_prints_every_setting_and_its_origin(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "9000")
    status, out, _ = baton("config", "show", "tiny", "--decode", "3", "--origin")
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    assert status == 0
    assert lines["port"].split() == ["port:", "9000", "#", "BATON_PORT"]
    assert lines["decode.num_workers"].split() == ["decode.num_workers:", "3", "#", "--decode"]
    assert lines["engine.seed"].endswith("# default; BATON_ENGINE_SEED")


def test_output_of_show_is_a_file_with_the_same_settings(tmp_path: Path, baton: Baton) -> None:
    _, out, _ = baton("config", "show", "tiny", "--prefill-tp", "2")
    file = tmp_path / "baton.yaml"
    file.write_text(out)
    assert baton("config", "show", "--config", str(file))[1] == out


def test_the_schema_describes_the_settings(baton: Baton) -> None:
    status, out, _ = baton("config", "schema")
    schema = json.loads(out)
    assert status == 0
    assert schema["$defs"]["ServeConfig"]["properties"]["port"]["maximum"] == 65_535
    assert schema["$defs"]["ServeConfig"]["required"] == ["model"]
    assert json.loads(baton("config", "schema", "tenants").out)["$ref"] == "#/$defs/TenantsFile"


def test_validate_names_the_error(tmp_path: Path, baton: Baton) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("model: tiny\nport: 80000\n")
    assert baton("config", "validate", str(file))[::2] == (
        2,
        f"baton: error: {file}: port: expected int, at least 0, at most 65535, got 80000 (int)\n",
    )
    file.write_text("model: tiny\nport: 8001\ntenants: tenants.yaml\n")
    assert baton("config", "validate", str(file))[:2] == (0, f"{file}: all well, settings: 3\n")


def test_validate_knows_a_file_of_tenants(tmp_path: Path, baton: Baton) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {keys: [], weight: 2}, zeta: {keys: []}}")
    assert baton("config", "validate", str(file))[:2] == (0, f"{file}: all well, tenants: 2\n")
    file.write_text("tenants: {acme: {keys: [], wieght: 2}}")
    status, _, complaint = baton("config", "validate", str(file))
    assert status == 2 and "weight" in complaint
