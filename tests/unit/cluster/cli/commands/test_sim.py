"""`baton sim`: one line a seed, a trace, and what did not hold with the command that shows it again."""

import pytest

from baton.cluster.cli.main import main
from baton.request import AttemptKey
from baton.router.in_flight import InFlight


def test_quiet_run_says_how_requests_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "3", "--seeds", "2", "--quiet"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 3: ") and second.startswith("seed 4: ")
    assert "workers" in first and "faults" in first


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--models", "0"], ["--models", "27"]])
def test_number_that_runs_no_seed_or_has_no_name_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *options]) == 2
    assert "expected --seeds of 1 or more, and --models of 1 to 26" in capsys.readouterr().err


def test_trace_has_messages_with_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "3", "--trouble", "none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = {line.split()[4] for line in lines if " -> " in line}
    assert {"Members", "Submit", "Routed", "Dispatch", "Tokens", "Ended"} <= kinds
    times_s = [float(line.split()[0]) for line in lines[:-1]]
    assert times_s == sorted(times_s)


def test_violation_names_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, kept = InFlight.ended, set[AttemptKey]()

    def ended(books: InFlight, key: AttemptKey) -> None:
        """The first that ends stays."""
        kept.update(() if kept else (key,))
        if key not in kept:
            end(books, key)

    monkeypatch.setattr(InFlight, "ended", ended)
    assert main(["sim", "--seed", "3", "--trouble", "none", "--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "replay: baton sim --seed 3 --trouble none"
    assert any("attempts in flight" in line for line in lines)
