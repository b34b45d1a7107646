"""What requests notice when Redis or a router is hurt: real processes on this machine, under load.

python -m baton.bench.router_faults [--rest 8] [--json FILE]

Two prefill and two decode workers of the tiny model, by the policy `cost`. Redis is killed and stays away,
stands still for 10 s, is set back to nothing and to what it held before the load; then a router is killed,
beside another and alone. Every answer is compared with what one engine says. How long routing takes is the
routers' own count: the bound within which 99 of 100 were routed.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final, TypeAlias

import msgspec

from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_least, at_most, print_table, write_json
from baton.bench.router_faults_world import HurtRedis, Prompt, World, make_prompts, open_world
from baton.errors import PeerGone
from baton.router.redis_server import PrivateRedis
from baton.router_status import RouterStatus

TITLE: Final = "Faults of Redis and routers under load"
ROUTING_MS: Final = 20.0
REWARMED_S: Final = 30.0
DISPATCHED_S: Final = 3.0
BLIND_PERCENT: Final = 1.0
STANDS_STILL_S: Final = 10.0
AWAY_S: Final = 3.0

Act: TypeAlias = Callable[[HurtRedis], Awaitable[None]]


async def away(redis: HurtRedis) -> None:
    await redis.kill()
    await asyncio.sleep(AWAY_S)
    await redis.start_empty()


async def restarted_empty(redis: HurtRedis) -> None:
    await redis.kill()
    await redis.start_empty()


async def set_back(redis: HurtRedis) -> None:
    await redis.kill()
    await redis.start_old()


async def stopped(redis: HurtRedis) -> None:
    await redis.stand_still(STANDS_STILL_S)


ACTS: Final[dict[str, Act]] = {
    f"Redis killed, back in {AWAY_S:g} s": away,
    f"Redis stopped {STANDS_STILL_S:g} s": stopped,
    "Redis restarted empty": restarted_empty,
    "Redis set back": set_back,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rest", type=float, default=8.0, help="seconds of load after each fault (8)")
    parser.add_argument("--json", type=Path, default=RESULTS / "router_faults.json", metavar="FILE")
    options = parser.parse_args()
    print(one_line(machine_description()), flush=True)
    rows = asyncio.run(_measure(make_prompts(seed=1), options.rest))
    print_table(TITLE, rows)
    write_json(options.json, TITLE, rows, {})


async def _measure(prompts: Sequence[Prompt], rest_s: float) -> list[Row]:
    rows: list[Row] = []
    async with PrivateRedis() as server:
        redis = HurtRedis(server)
        async with open_world(redis.url, num_routers=2) as world:
            await redis.remember()
            for name, act in ACTS.items():
                rows += await _hurt(world, redis, prompts, name, act, rest_s)
            rows += await _kill_router(world, prompts, "one router of two killed", rest_s)
        async with open_world(redis.url, num_routers=1) as world:
            rows += await _kill_router(world, prompts, "the only router killed", rest_s)
    return rows


async def _hurt(
    world: World, redis: HurtRedis, prompts: Sequence[Prompt], name: str, act: Act, rest_s: float
) -> list[Row]:
    num_before = world.num_answered, world.num_failed, world.num_wrong
    async with world.load(prompts):
        await asyncio.sleep(rest_s)  # everybody knows what workers hold, and Redis too
        num_pages, before = await redis.num_pages(), await world.statuses()
        await act(redis)
        begun_s = perf_counter()
        while await redis.num_pages() < num_pages:
            if perf_counter() - begun_s > 2 * REWARMED_S:
                break
            await asyncio.sleep(0.02)
        rewarmed_s = perf_counter() - begun_s
        await asyncio.sleep(rest_s)
        routing = _difference(before, await world.statuses())
    return [
        *_answer_rows(world, name, num_before),
        at_most(f"{name}: routing p99", 1000 * routing.routing_quantile_s(0.99), "ms", ROUTING_MS),
        at_most(f"{name}: rewarmed after", rewarmed_s, "s", REWARMED_S, f"{num_pages} pages"),
    ]


async def _kill_router(world: World, prompts: Sequence[Prompt], name: str, rest_s: float) -> list[Row]:
    num_before = world.num_answered, world.num_failed, world.num_wrong
    async with world.load(prompts):
        await asyncio.sleep(rest_s)
        before = {router.id for router in await world.statuses()}
        killed_s = perf_counter()
        world.kill_router(0)
        answer = await world.ask(prompts[0])
        new = await _new_router(world, before)
        await asyncio.sleep(rest_s)
        after = await world.statuses()
    asked = [router for router in after if router.counters.get("decisions")]
    blind = max((router.blind_share for router in asked if router.id == new or len(after) > 1), default=0.0)
    num_decisions = sum(router.counters["decisions"] for router in asked)
    return [
        *_answer_rows(world, name, num_before),
        at_most(f"{name}: next first token after", answer.first_s - killed_s, "s", DISPATCHED_S),
        at_most(f"{name}: blind decisions", 100 * blind, "%", BLIND_PERCENT, f"of {num_decisions}"),
    ]


def _answer_rows(world: World, name: str, num_before: tuple[int, int, int]) -> list[Row]:
    num_answered = world.num_answered - num_before[0]
    return [
        at_least(f"{name}: requests", num_answered, "", 100),
        at_most(f"{name}: failed", world.num_failed - num_before[1], "", 0),
        at_most(f"{name}: with wrong tokens", world.num_wrong - num_before[2], "", 0),
    ]


async def _new_router(world: World, before: set[str]) -> str:
    """Its id, once one answers that was not there before."""
    while True:
        try:
            for router in await world.statuses():
                if router.id not in before:
                    return router.id
        except (PeerGone, TimeoutError):
            pass
        await asyncio.sleep(0.05)


def _difference(before: Sequence[RouterStatus], after: Sequence[RouterStatus]) -> RouterStatus:
    """What all have routed in between."""
    was = [sum(counts) for counts in zip(*(each.routing_counts for each in before), strict=True)]
    now = [sum(counts) for counts in zip(*(each.routing_counts for each in after), strict=True)]
    counts = tuple(late - early for early, late in zip(was, now, strict=True))
    return msgspec.structs.replace(after[0], routing_counts=counts)


if __name__ == "__main__":
    main()
