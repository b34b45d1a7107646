from baton.sim.process import Events, ProcessClock


def test_calls_are_made_by_time_then_in_order_of_asking() -> None:
    events, made = Events(), list[str]()
    events.after(2.0, lambda: made.append("late"))
    events.after(1.0, lambda: made.append("first"))
    events.after(1.0, lambda: made.append("second"))
    events.run_until(1.5)
    assert (made, events.now_s) == (["first", "second"], 1.5)
    events.run_until(2.0)
    assert made == ["first", "second", "late"]


def test_call_that_was_due_before_is_made_now() -> None:
    events, made = Events(), list[float]()
    events.run_until(3.0)
    events.at(1.0, lambda: made.append(events.now_s))
    events.run_until(3.0)
    assert made == [3.0]


def test_calls_may_ask_for_more_of_them() -> None:
    events, made = Events(), list[float]()

    def again() -> None:
        made.append(events.now_s)
        events.after(1.0, again)

    again()
    events.run_until(2.5)
    assert made == [0.0, 1.0, 2.0]


def test_clocks_of_processes_run_alike_and_begin_anywhere() -> None:
    events = Events()
    one, other = ProcessClock(events, 0.0), ProcessClock(events, 500.0)
    events.run_until(2.0)
    assert (one.now_s(), other.now_s()) == (2.0, 502.0)
