"""Processes that suites start."""

import pytest

from baton.bench.processes import Child, ProcessEnded


def test_a_child_is_read_line_by_line_until_it_has_ended() -> None:
    with Child("-c", "print('one'); print(); raise SystemExit(3)") as child:
        assert [child.read(), child.read()] == ["one", ""]
        with pytest.raises(ProcessEnded, match="SystemExit.*has ended with status 3"):
            child.read()


def test_a_silent_child_is_killed_when_its_time_is_over() -> None:
    with (
        Child("-c", "import time; time.sleep(60)") as child,
        pytest.raises(ProcessEnded, match="has ended with status -9"),
    ):
        child.read(0.05)
