"""Why a request went where it went: what it was expected to cost at each pair of workers, and what it took.

REQUEST_ID is the `id` of the answer, such as chatcmpl-4f0c..., or its 32 hex digits.
"""

import argparse
import asyncio
import re
from typing import Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.serve_options import add_router_options, routers_of, spelled
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import connected
from baton.errors import ConfigError, PeerGone, WorkerLost
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Status
from baton.messages.workers import Routers
from baton.router.decisions import regret_s, total_s, ttft_s

MAX_SHOWN: Final = 16  # of the pairs that were weighed, the cheapest


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID")
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="everything that the router knows of it, as JSON")


def run(arguments: argparse.Namespace) -> None:
    output.check()
    request_id = arguments.request_id.rpartition("-")[2]
    if not re.fullmatch("[0-9a-f]{32}", request_id):
        raise ConfigError(f"request_id: expected 32 hex digits, got {arguments.request_id!r}")
    decisions, status = asyncio.run(_ask(*routers_of(arguments), request_id))
    if arguments.json:
        output.write(f"{msgspec.json.encode(decisions).decode()}\n")
        return
    names = {entry.worker.id: entry.worker.name for entry in status.workers}
    shown = [told(decision, names) for decision in decisions]
    output.write("\n\n".join(shown) + "\n" if shown else "the router does not know that request\n")


def told(decision: Decision, names: dict[str, str]) -> str:
    """names: of workers, by id."""
    lines = [
        f"attempt {decision.attempt}: {decision.num_tokens} tokens, {decision.age_s:.1f} s ago, "
        f"by {decision.reason}: {_pair(decision.chosen, names)}"
    ]
    cheapest = sorted(decision.weighed, key=total_s)[:MAX_SHOWN]
    if cheapest:
        lines += _table(cheapest, decision.chosen, names)
    return "\n".join([*lines, *_truth(decision)])


def _table(cheapest: list[Weighed], chosen: Weighed, names: dict[str, str]) -> list[str]:
    terms = list(cheapest[0].terms)
    heads = ["", "pair", "held", *(name.removesuffix("_s") for name in terms), "total s"]
    rows = [heads]
    for each in cheapest:
        costs = [f"{each.terms.get(name, 0.0):.4f}" for name in terms]
        mark = "*" if each == chosen else ""
        rows.append([mark, _pair(each, names), str(each.num_held_tokens), *costs, f"{total_s(each):.4f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _truth(decision: Decision) -> list[str]:
    lines = []
    if decision.first_token_s is not None:
        expected = f", {ttft_s(decision.chosen):.4f} s expected" if decision.chosen.terms else ""
        lines.append(f"first token after {decision.first_token_s:.4f} s{expected}")
    regretted_s = regret_s(decision)
    if regretted_s is not None:
        lines.append(f"regret {regretted_s:+.4f} s, against the best other pair as it was predicted")
    times = decision.measured
    if times is not None:
        lines.append(
            f"measured: waited {times.waited_s:.4f} s, "
            f"computed {times.num_new_tokens} of {times.num_tokens} tokens in {times.computed_s:.4f} s, "
            f"{times.own_s or times.computed_s:.4f} s of it its own, "
            f"pulled {times.pulled_bytes} bytes in {times.pulled_s:.4f} s, "
            f"hand-off exposed {times.exposed_s:.4f} s"
        )
    return lines


def _pair(weighed: Weighed, names: dict[str, str]) -> str:
    decode = names.get(weighed.decode, weighed.decode[:8])
    filled = names.get(weighed.prefill, weighed.prefill[:8]) if weighed.prefill else "itself"
    source = f" pulls from {names.get(weighed.source, weighed.source[:8])}" if weighed.source else ""
    return f"{decode} < {filled}{source}"


async def _ask(routers: Routers, keys: Keys, request_id: str) -> tuple[tuple[Decision, ...], Status]:
    try:
        async with connected(routers, keys) as operator:
            return await operator.explain(request_id), await operator.status()
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer; is the key right?") from None
