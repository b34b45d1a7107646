import pytest

from baton.cluster.cli.options import VLLMS, parser_of


@pytest.mark.parametrize("flag", VLLMS)
def test_flags_of_vllm_are_answered_with_what_to_do(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of("serve", None)
    parser.add_argument("--tensor-parallel-size", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse([f"{flag}=x"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and flag in said and VLLMS[flag] in said


def test_another_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of("serve", None)
    parser.add_argument("--prefill", type=int)
    with pytest.raises(SystemExit):
        parser.parse(["--prefil", "2"])
    assert "unknown option '--prefil'; did you mean --prefill?" in capsys.readouterr().err
