import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.errors import Overloaded
from baton.fair_queue import CREDIT_AGES
from baton.gateway.text.work import MAX_WAITING, TextTurns

Order = list[str]


def run(scene: Callable[[TextTurns, Order], Awaitable[None]], num_places: int = 1) -> Order:
    """Names, in the order in which they had their turn."""
    order: Order = []

    async def play() -> None:
        await scene(TextTurns(num_places), order)

    asyncio.run(play())
    return order


def asking(
    turns: TextTurns, order: Order, tenant: str, name: str, num_chars: int = 10
) -> "asyncio.Task[None]":
    async def ask() -> None:
        await turns.take(tenant, num_chars)
        order.append(name)

    return asyncio.create_task(ask())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def leave_all(turns: TextTurns, times: int) -> None:
    for _ in range(times):
        turns.leave()
        await settle()


def test_one_with_many_texts_does_not_delay_one_with_few() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        asked = [asking(turns, order, "noisy", f"n{number}", 1000) for number in range(20)]
        await settle()
        asked.append(asking(turns, order, "quiet", "q"))
        await settle()
        await leave_all(turns, 20)
        await asyncio.gather(*asked)

    order = run(scene)
    assert order.index("q") <= 2 and len(order) == 21


def test_a_tenants_own_come_in_their_order() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        asked = [asking(turns, order, "a", f"a{number}") for number in range(5)]
        await settle()
        await leave_all(turns, 5)
        await asyncio.gather(*asked)

    assert run(scene) == [f"a{number}" for number in range(5)]


def test_who_comes_after_a_long_time_does_not_have_all_of_it() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        asked = [asking(turns, order, "a", "a") for _ in range(80)]
        await settle()
        await leave_all(turns, 40)
        asked += [asking(turns, order, "b", "b") for _ in range(30)]
        await settle()
        await leave_all(turns, 70)
        await asyncio.gather(*asked)

    later = run(scene)[41:81]
    assert CREDIT_AGES <= later.count("b") - later.count("a") + 1 <= 2 * CREDIT_AGES


def test_those_who_leave_while_they_wait_are_passed() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        first, second, third = (asking(turns, order, "a", name) for name in ("first", "second", "third"))
        await settle()
        second.cancel()
        await settle()
        await leave_all(turns, 1)
        assert order == ["first", "third"]
        await asyncio.gather(first, second, third, return_exceptions=True)

    run(scene)


def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        first, second, third = (asking(turns, order, "a", name) for name in ("first", "second", "third"))
        await settle()
        turns.leave()  # the second's turn
        second.cancel()
        await settle()
        assert order == ["first", "third"]
        turns.leave()
        await turns.take("b", 1)
        await asyncio.gather(first, second, third, return_exceptions=True)

    run(scene)


@pytest.mark.parametrize("tenant_of_next", ["a", "b"])
def test_a_place_goes_past_one_that_was_cancelled_in_that_moment(tenant_of_next: str) -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        await turns.take("a", 1)
        gone = asking(turns, order, "a", "gone")
        await settle()
        after = asking(turns, order, tenant_of_next, "after")
        await settle()
        gone.cancel()
        turns.leave()  # before the cancelled one's task has run
        await settle()
        assert gone.cancelled() and order == ["after"]
        turns.leave()
        await turns.take("c", 1)
        await asyncio.gather(gone, after, return_exceptions=True)

    run(scene)


def test_who_sends_many_texts_is_sent_away_before_others_are() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        noisy = [asking(turns, order, "noisy", "n") for _ in range(2 * MAX_WAITING)]
        await settle()
        sent_away = sum(task.done() and isinstance(task.exception(), Overloaded) for task in noisy)
        assert len(noisy) - sent_away == 1 + 4 * MAX_WAITING // 5 + 1
        quiet = asking(turns, order, "quiet", "q")
        await settle()
        assert not quiet.done()
        for task in (quiet, *noisy):
            task.cancel()
        await asyncio.gather(quiet, *noisy, return_exceptions=True)

    run(scene)


def test_without_tenants_all_may_wait() -> None:
    async def scene(turns: TextTurns, order: Order) -> None:
        asked = [asking(turns, order, "", "x") for _ in range(1 + MAX_WAITING)]
        await settle()
        with pytest.raises(Overloaded, match=f"{MAX_WAITING} texts wait"):
            await turns.take("", 1)
        await leave_all(turns, MAX_WAITING + 1)
        await asyncio.gather(*asked)

    assert len(run(scene)) == MAX_WAITING + 1
