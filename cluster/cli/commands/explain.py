"""Show why a request went to its workers: the predicted cost of each pair, and the time that it really took.

REQUEST_ID is the `id` of the answer, such as chatcmpl-4f0c..., or its 32 hex digits.
"""

import argparse
import re
from operator import attrgetter
from typing import Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cli.routers import add_router_options, ask
from baton.cluster.operator_node import Operator
from baton.errors import ConfigError
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Status

MAX_SHOWN: Final = 16  # pairs, the cheapest first


def _add_options(parser: Parser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID")
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="the router's whole record, as JSON")


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    request_id = arguments.request_id.rpartition("-")[2]
    if not re.fullmatch("[0-9a-f]{32}", request_id):
        raise ConfigError(f"request_id: expected 32 hex digits, got {arguments.request_id!r}")

    async def explain(operator: Operator) -> tuple[tuple[Decision, ...], Status]:
        return await operator.explain(request_id), await operator.status()

    decisions, status = ask(arguments, explain)
    if arguments.json:
        output.write(f"{msgspec.json.encode(decisions).decode()}\n")
        return
    names = {entry.worker.id: entry.worker.name for entry in status.workers}
    shown = [part for decision in decisions for part in (*parts_of(decision, names), "")]
    output.show(*(shown[:-1] or ["the router does not know that request"]))


def parts_of(decision: Decision, names: dict[str, str]) -> list[output.Part]:
    """Return the lines and the table of one attempt. names: id -> name of a worker."""
    head = (
        f"attempt {decision.attempt}: {decision.num_tokens} tokens, {decision.age_s:.1f} s ago, "
        f"by {decision.reason}: {_pair(decision.chosen, names)}"
    )
    cheapest = sorted(decision.weighed, key=attrgetter("total_s"))[:MAX_SHOWN]
    if not cheapest:
        return [head, *_truth(decision)]
    terms = list(cheapest[0].terms)
    rows = []
    for each in cheapest:
        costs = [f"{each.terms.get(name, 0.0):.4f}" for name in terms]
        mark = "*" if each == decision.chosen else ""
        rows.append((mark, _pair(each, names), str(each.num_held_tokens), *costs, f"{each.total_s:.4f}"))
    columns = ("", "pair", "held", *(name.removesuffix("_s") for name in terms), "total s")
    return [head, output.table(columns, rows), *_truth(decision)]


def _truth(decision: Decision) -> list[str]:
    lines = []
    if decision.first_token_s is not None:
        expected = f", {decision.chosen.ttft_s:.4f} s expected" if decision.chosen.terms else ""
        lines.append(f"first token after {decision.first_token_s:.4f} s{expected}")
    if decision.regret_s is not None:
        lines.append(f"regret {decision.regret_s:+.4f} s, against the best other pair as it was predicted")
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


explain = CliCommand(__doc__, _add_options, _run)
