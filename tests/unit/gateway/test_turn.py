import asyncio

from baton.gateway.turn import Turn


def test_what_is_added_in_a_turn_is_called_once_at_its_end() -> None:
    async def scenario() -> None:
        turn, called = Turn(), list[str]()
        turn.add(lambda: called.append("a"))
        turn.add(lambda: called.append("b"))
        assert not called
        await asyncio.sleep(0)
        assert called == ["a", "b"]
        turn.add(lambda: turn.add(lambda: called.append("d")))
        await asyncio.sleep(0)
        assert called == ["a", "b"]
        await asyncio.sleep(0)
        assert called == ["a", "b", "d"]

    asyncio.run(scenario())
