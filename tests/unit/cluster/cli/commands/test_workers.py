"""Orders about workers that are refused before any router is asked."""

import pytest

from baton.cluster.cli.main import main
from baton.errors import USER_ERROR


@pytest.mark.parametrize("layout", ["2P", "P2D", "1P0D", "2p-1d", "1P1D1D"])
def test_layout_without_numbers_of_both_roles_is_refused(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", layout]) == USER_ERROR
    assert "layout: expected such as 2P3D" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["0" * 32, "--from", "decode-0"]])
def test_requests_to_migrate_are_named_in_one_way(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", *options]) == USER_ERROR
    assert "give one of REQUEST and --from WORKER" in capsys.readouterr().err
