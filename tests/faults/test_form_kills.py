"""Answers with forms have the tokens of an undisturbed run although decode and prefill workers are killed."""

from pathlib import Path
from typing import Final

import pytest

from baton.bench.report import Report
from baton.bench.structured.answers import VICTIMS, form_questions, run_with_kills
from baton.bench.structured.masks import own_cases
from tests.event_loop import on_loop

NUM_QUESTIONS: Final = 60
NUM_ANSWERS: Final = 300


@pytest.mark.slow  # test_kills.py has a form among its answers
@on_loop
async def test_killed_workers_change_no_answer_with_a_form(tmp_path: Path) -> None:
    report = Report("structured", "", tmp_path)
    questions = form_questions(own_cases(), NUM_QUESTIONS, report)
    clients, num_kills = await run_with_kills(questions, NUM_ANSWERS, report)
    assert clients.num_compared >= NUM_ANSWERS and num_kills.keys() == set(VICTIMS)
    assert (clients.outcomes["wrong"], clients.outcomes["lost"]) == (0, 0), clients.complaints
