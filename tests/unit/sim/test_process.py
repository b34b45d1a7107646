from baton.sim.process import Crash, Events, OffsetClock, SimProcess


def test_calls_are_made_by_time_then_in_order_of_asking() -> None:
    events, made = Events(), list[str]()
    events.after(2.0, lambda: made.append("late"))
    events.after(1.0, lambda: made.append("first"))
    events.after(1.0, lambda: made.append("second"))
    events.run_until(1.5)
    assert (made, events.now_s) == (["first", "second"], 1.5)
    events.run_until(2.0)
    assert made == ["first", "second", "late"]


def test_call_for_a_past_time_is_made_now() -> None:
    events, made = Events(), list[float]()
    events.run_until(3.0)
    events.at(1.0, lambda: made.append(events.now_s))
    events.run_until(3.0)
    assert made == [3.0]


def test_clocks_have_offsets_and_may_jump() -> None:
    events = Events()
    one, other = OffsetClock(events, 0.0), OffsetClock(events, 500.0)
    events.run_until(2.0)
    other.jump(-3600.0)
    assert (one.now_s(), other.now_s()) == (2.0, -3098.0)


class Working(SimProcess):
    """Each turn takes `turn_s` and sends the time at which it began."""

    def __init__(self, events: Events, turn_s: float) -> None:
        super().__init__("p", events)
        self.turn = self.work
        self.sent: list[tuple[float, float]] = []  # time of departure, message
        self._turn_s = turn_s
        self._now = events

    def work(self) -> None:
        self.hear()
        self.spend(self._turn_s)
        began_s = self._now.now_s
        self.send(lambda: self.sent.append((self._now.now_s, began_s)))


def test_messages_of_a_turn_leave_at_its_end_and_the_next_turn_begins_then() -> None:
    events = Events()
    process = Working(events, 0.5)
    process.post(lambda: None)
    events.after(0.1, lambda: process.post(lambda: None))
    events.run_until(2.0)
    assert process.sent == [(0.5, 0.0), (1.0, 0.5)]


def test_one_turn_takes_the_whole_inbox() -> None:
    events = Events()
    process, heard = Working(events, 0.5), list[int]()
    for number in range(3):
        events.after(0.1 * number, lambda number=number: process.post(lambda: heard.append(number)))  # type: ignore[misc]
    events.run_until(0.6)
    assert heard == [0, 1, 2]
    assert process.num_unheard == 0


def test_dead_process_neither_sends_nor_receives() -> None:
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


def test_resumed_process_catches_up() -> None:
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


def test_turn_scheduled_before_a_pause_comes_after_the_pause() -> None:
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
