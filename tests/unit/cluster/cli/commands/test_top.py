import sys

import pytest

from tests.unit.cluster.conftest import Baton


def test_without_textual_the_command_says_how_to_install_it(
    baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "baton.cluster.cli.commands.top", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    result = baton("top", "--url", "http://127.0.0.1:1")
    assert (result.status, result.err) == (
        2,
        "baton: error: textual is not installed: pip install '.[top]', in Baton's checkout\n",
    )


def test_gateway_that_does_not_answer_is_told_before_the_screen_is_taken(baton: Baton) -> None:
    pytest.importorskip("textual", reason="textual is not installed")
    result = baton("top", "--url", "http://127.0.0.1:1")
    assert result.status != 0 and "127.0.0.1:1 does not answer" in result.err
