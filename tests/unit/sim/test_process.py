"""Turns, timers, pauses and death of a simulated process."""

import pytest

from baton.sim.process import Crash, Events, SimProcess


class Working(SimProcess):
    """Its turns take `turn_s`, and send when each began."""

    def __init__(self, events: Events, turn_s: float) -> None:
        super().__init__("p", events)
        self.turn = self.work
        self.sent: list[tuple[float, float]] = []  # when it left, what it says
        self._turn_s = turn_s
        self._now = events

    def work(self) -> None:
        self.hear()
        self.spend(self._turn_s)
        began_s = self._now.now_s
        self.send(lambda: self.sent.append((self._now.now_s, began_s)))


def test_what_a_turn_sends_leaves_when_it_is_over_and_the_next_begins_then() -> None:
    events = Events()
    process = Working(events, 0.5)
    process.post(lambda: None)
    events.after(0.1, lambda: process.post(lambda: None))
    events.run_until(2.0)
    assert process.sent == [(0.5, 0.0), (1.0, 0.5)]


def test_one_turn_hears_everything_that_has_come_meanwhile() -> None:
    events = Events()
    process, heard = Working(events, 0.5), list[int]()
    for number in range(3):
        events.after(0.1 * number, lambda number=number: process.post(lambda: heard.append(number)))  # type: ignore[misc]
    events.run_until(0.6)
    assert heard == [0, 1, 2]
    assert process.num_unheard == 0


def test_dead_process_sends_nothing_more_and_hears_nothing() -> None:
    events = Events()
    process, heard, deaths = Working(events, 0.5), list[int](), list[int]()
    process.on_death.append(lambda: deaths.append(1))
    process.post(lambda: heard.append(1))
    process.later(0.4, lambda: heard.append(2))
    events.run_until(0.1)
    process.die()
    process.die()
    process.post(lambda: heard.append(3))
    events.run_until(2.0)
    assert (heard, process.sent, deaths) == ([1], [], [1])


def test_paused_process_does_everything_when_it_resumes() -> None:
    events = Events()
    process, done = SimProcess("p", events), list[tuple[str, float]]()
    process.pause()
    process.post(lambda: done.append(("heard", events.now_s)))
    process.later(0.2, lambda: done.append(("timer", events.now_s)))
    events.run_until(1.0)
    assert done == []
    process.resume()
    events.run_until(1.0)
    assert sorted(done) == [("heard", 1.0), ("timer", 1.0)]


def test_turn_that_was_asked_for_before_a_pause_comes_after_it() -> None:
    events = Events()
    process = Working(events, 0.5)
    process.post(lambda: None)
    process.post(lambda: None)
    process.pause()
    events.run_until(1.0)
    process.resume()
    events.run_until(2.0)
    assert process.sent == [(1.5, 1.0)]


def test_crash_names_its_culprit() -> None:
    events = Events()
    process = SimProcess("p", events)

    def crash() -> None:
        raise Crash("r.0")

    process.post(crash)
    events.run_until(0.0)
    assert process.is_dead and process.killed_by == "r.0"


def test_bug_in_a_turn_is_no_crash() -> None:
    events = Events()
    process = SimProcess("p", events)

    def fail() -> None:
        raise ValueError("a bug of ours")

    process.post(fail)
    with pytest.raises(ValueError, match="a bug of ours"):
        events.run_until(0.0)
