from baton.cluster.supervisor import FIRST_S, LONGEST_S, WELL_AFTER_S, BackOff


def test_pauses_double_up_to_the_longest() -> None:
    back_off = BackOff()
    pauses = [back_off.after(1.0) for _ in range(8)]
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses == sorted(pauses)
    assert pauses[-2:] == [LONGEST_S, LONGEST_S]


def test_a_long_life_is_no_crash_loop() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.after(1.0)
    assert back_off.after(WELL_AFTER_S) == FIRST_S
    assert back_off.after(WELL_AFTER_S - 1) == 2 * FIRST_S
