from hypothesis import given
from hypothesis import strategies as st

from baton.router.in_flight import NewPrompt, SchedulingClass, WaitingPrompts

A, B = SchedulingClass("a"), SchedulingClass("b")
PARTIES = st.builds(
    SchedulingClass, st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 2)
)


def ahead(*prompts: tuple[SchedulingClass, int]) -> WaitingPrompts:
    found = WaitingPrompts()
    for scheduling_class, num_tokens in prompts:
        found.add(scheduling_class, num_tokens, num_tokens)
    return found


def test_prompts_of_the_same_tenant_come_first() -> None:
    assert ahead((A, 100), (A, 50)).share_ahead_of(NewPrompt(A, 10)) == 1.0
    assert ahead().share_ahead_of(NewPrompt(A, 10)) == 1.0


def test_prompts_of_another_tenant_come_first_up_to_its_share() -> None:
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100)) == 0.1
    assert ahead((B, 1000), (A, 100)).share_ahead_of(NewPrompt(A, 100)) == 300 / 1100
    assert ahead((SchedulingClass("b", 3.0), 1000)).share_ahead_of(NewPrompt(A, 100)) == 0.3
    assert ahead((B, 50)).share_ahead_of(NewPrompt(A, 100)) == 1.0


def test_lead_of_the_tenant_changes_the_share_of_others() -> None:
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lead=-40.0)) == 0.06
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lead=-400.0)) == 0.0
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lead=40.0)) == 0.14
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(SchedulingClass("a", 4.0), 100, lead=10.0)) == 0.035
    assert ahead((B, 1000), (A, 100)).share_ahead_of(NewPrompt(A, 100, lead=100.0)) == 300 / 1100


def test_higher_ranks_come_first_and_lower_ranks_later() -> None:
    high, low = SchedulingClass("h", 1.0, 0), SchedulingClass("l", 1.0, 2)
    assert (
        ahead((high, 100), (low, 300)).share_ahead_of(NewPrompt(SchedulingClass("m", 1.0, 1), 1000)) == 0.25
    )


def test_lead_of_another_tenant_delays_its_prompts() -> None:
    """Prompts that wait here are charged already, so only the rest of a lead delays them."""

    def part(lead_of_b: float, lead: float = 0.0, weight: float = 1.0) -> float:
        other = SchedulingClass("b", weight)
        return ahead((other, 1000)).share_ahead_of(NewPrompt(A, 100, lead, {other: lead_of_b}.__getitem__))

    assert part(1000.0) == ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, 0.0)) == 0.1
    assert part(1040.0) == 0.06
    assert part(500.0) == 0.6
    assert part(2000.0) == 0.0
    assert part(0.0) == part(-500.0) == 1.0
    assert part(400.0, weight=2.0) == 0.4
    assert part(500.0, lead=-300.0) == 0.3
    assert part(500.0, lead=-700.0) == 0.0
    assert part(1000.0, lead=200.0) == 0.3


def test_leads_of_the_own_tenant_and_of_other_ranks_are_not_read() -> None:
    scheduling_class = SchedulingClass("m", 1.0, 1)
    found = ahead(
        (SchedulingClass("h", 1.0, 0), 100),
        (SchedulingClass("l", 1.0, 2), 300),
        (scheduling_class, 50),
        (SchedulingClass("b", 1.0, 1), 50),
    )
    asked: list[SchedulingClass] = []

    def lead_of(other: SchedulingClass) -> float:
        asked.append(other)
        return 9000.0

    assert found.share_ahead_of(NewPrompt(scheduling_class, 100, 0.0, lead_of)) == 150 / 500
    assert asked == [SchedulingClass("b", 1.0, 1)]


@given(prompts=st.lists(st.tuples(PARTIES, st.integers(0, 100)), max_size=20), leads=st.data())
def test_less_comes_first_the_larger_the_leads_of_others(
    prompts: list[tuple[SchedulingClass, int]], leads: st.DataObject
) -> None:
    found, amounts = ahead(*prompts), st.floats(-1e3, 1e3)
    had = {scheduling_class: leads.draw(amounts) for scheduling_class, _ in prompts}
    more = {scheduling_class: lead + leads.draw(st.floats(0, 1e3)) for scheduling_class, lead in had.items()}
    lead = leads.draw(amounts)
    parts = [found.share_ahead_of(NewPrompt(A, 10, lead, each.__getitem__)) for each in (more, had)]
    assert 0.0 <= parts[0] <= parts[1] <= 1.0


@given(
    prompts=st.lists(st.tuples(PARTIES, st.integers(0, 100)), max_size=20),
    scheduling_class=PARTIES,
    lead=st.none() | st.floats(-1e6, 1e6),
)
def test_share_is_between_0_and_1_and_removed_prompts_leave_nothing(
    prompts: list[tuple[SchedulingClass, int]], scheduling_class: SchedulingClass, lead: float | None
) -> None:
    found = ahead(*prompts)
    assert 0.0 <= found.share_ahead_of(NewPrompt(scheduling_class, 10, lead)) <= 1.0
    for each, num_tokens in prompts:
        found.remove(each, num_tokens, num_tokens)
    assert found.share_ahead_of(NewPrompt(scheduling_class, 10)) == 1.0 and not found._num
