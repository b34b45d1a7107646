"""Show why a request went to its workers, and where its time went: predicted costs, then the timeline.

REQUEST_ID is the `id` of the answer, such as chatcmpl-4f0c... or msg_4f0c..., or its 32 hex digits.
`baton explain plan` shows the latest plans of the planner instead.
"""

import argparse
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.connections import add_router_options, ask
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import Operator
from baton.errors import ConfigError
from baton.messages.bounds import request_id_in, short_id
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Status
from baton.messages.timeline import RequestTimeline, TimelinePart

if TYPE_CHECKING:
    from baton.planner.planner import ScalingPlan

MAX_SHOWN: Final = 16  # pairs, the cheapest first
BAR_WIDTH: Final = 50
MAX_CAUSES: Final = 3  # tenants of one plan, that with the most growth first


def _add_options(parser: Parser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="or plan: the planner's latest plans")
    parser.add_argument("--log", type=Path, metavar="FILE", help="of plans (the one of the cluster here)")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="plans (10)")
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="the whole record, as JSON")


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    if arguments.request_id == "plan":
        _show_plans(arguments)
        return
    request_id = request_id_in(arguments.request_id)
    if request_id is None:
        raise ConfigError(f"request_id: expected 32 hex digits, got {arguments.request_id!r}")

    async def explain(operator: Operator) -> tuple[tuple[Decision, ...], Status, RequestTimeline | None]:
        decisions, status = await operator.explain(request_id), await operator.status()
        return decisions, status, await operator.timeline(request_id)

    decisions, status, timeline = ask(arguments, explain)
    if arguments.json:
        record = {"decisions": decisions, "timeline": timeline}
        output.write(f"{msgspec.json.encode(record).decode()}\n")
        return
    names = {entry.worker.id: entry.worker.name for entry in status.workers}
    shown = [part for decision in decisions for part in (*parts_of(decision, names), "")]
    if timeline is not None:
        shown += [*waterfall(timeline), ""]
    output.show(*(shown[:-1] or ["the router does not know that request"]))


def _show_plans(arguments: argparse.Namespace) -> None:
    from baton.cluster.planning import log_path, read_plans  # loads the simulator

    path = arguments.log
    if path is None:
        record = find_record(arguments.port)
        path = log_path(record.settings.get("planner", {}).get("log"), record.port)
    if arguments.last < 1:
        raise ConfigError(f"--last: expected a number of plans, 1 or more, got {arguments.last}")
    lines = read_plans(path, arguments.last)
    if arguments.json:
        output.write("".join(f"{msgspec.json.encode(plan).decode()}\n" for plan in lines))
        return
    columns = ("plan", "outcome", "workers", "requests/s", "attained", "unchanged", "why", "caused by")
    output.show(output.table(columns, [plan_row(plan) for plan in lines]))


def plan_row(plan: "ScalingPlan") -> tuple[str, ...]:
    """Return the row of one plan: the predictions with and without its actions, and what caused it."""
    attained = [
        "" if each is None else f"{each.attainment:.1%}" for each in (plan.prediction, plan.counterfactual)
    ]
    rate = plan.inputs.rates.get("all")
    shown = "" if rate is None else f"{rate:.2f}"
    causes = sorted(plan.causes.items(), key=lambda cause: -cause[1])[:MAX_CAUSES]
    caused = ", ".join(f"{name.strip('/') or 'all'} {share:.0%}" for name, share in causes)
    return plan.decision_id, plan.outcome, plan.target.name, shown, *attained, plan.reason, caused


def parts_of(decision: Decision, names: dict[str, str]) -> list[output.Part]:
    """Return the lines and the table of one attempt. names: id -> name of a worker."""
    head = (
        f"attempt {decision.attempt}: {decision.num_tokens} tokens, {decision.age_s:.1f} s ago, "
        f"by {decision.reason}: {_pair(decision.chosen, names)}"
    )
    cheapest = sorted(decision.weighed, key=attrgetter("total_s"))[:MAX_SHOWN]
    if not cheapest:
        return [head, *_measured_lines(decision)]
    terms = list(cheapest[0].terms)
    rows = []
    for each in cheapest:
        costs = [f"{each.terms.get(name, 0.0):.4f}" for name in terms]
        mark = "*" if each == decision.chosen else ""
        rows.append((mark, _pair(each, names), str(each.num_held_tokens), *costs, f"{each.total_s:.4f}"))
    columns = ("", "pair", "held", *(name.removesuffix("_s") for name in terms), "total s")
    return [head, output.table(columns, rows), *_measured_lines(decision)]


def waterfall(timeline: RequestTimeline) -> list[output.Part]:
    """Return the lines and the table of a timeline: a row and a bar for each part."""
    total_s = timeline.total_s or 1.0
    tenant = f", tenant {timeline.tenant}" if timeline.tenant else ""
    ahead = f", behind {timeline.num_ahead} in the queue" if timeline.num_ahead else ""
    whom = f", most of {timeline.ahead_tenant}" if timeline.num_ahead and timeline.ahead_tenant else ""
    first = "" if timeline.first_token_s is None else f", first token after {timeline.first_token_s:.4f} s"
    head = f"{timeline.outcome} in {timeline.total_s:.4f} s{first}{tenant}{ahead}{whom}"
    rows = [
        (part.name, part.process, f"{part.seconds:.4f}", _share(part.seconds / total_s), _bar(part, total_s))
        for part in timeline.parts
    ]
    rest_s = timeline.unaccounted_s
    rows.append(("unaccounted", "", f"{rest_s:.4f}", _share(rest_s / total_s), ""))
    rows.append(("sum", "", f"{timeline.total_s:.4f}", _share(1.0), ""))
    table = output.table(("part", "process", "s", "share", ""), rows)
    hidden_s, error_s = timeline.hidden_transfer_s, timeline.clock_error_s
    note = f"pages sent while computing: {hidden_s:.4f} s; clocks agree within {1e6 * error_s:.0f} us"
    if timeline.num_draft_tokens:
        note += f"; {timeline.num_accepted_tokens} of {timeline.num_draft_tokens} draft tokens accepted"
    return [head, table, note]


def _share(share: float) -> str:
    return f"{100 * share:5.1f}%"


def _bar(part: TimelinePart, total_s: float) -> str:
    """Return a bar of BAR_WIDTH columns for the whole request; a part takes a column at least."""
    begin = min(round(BAR_WIDTH * part.begin_s / total_s), BAR_WIDTH - 1)
    width = max(1, round(BAR_WIDTH * (part.begin_s + part.seconds) / total_s) - begin)
    return " " * begin + "█" * width


def _measured_lines(decision: Decision) -> list[str]:
    lines = []
    if decision.first_token_s is not None:
        expected = f", {decision.chosen.ttft_s:.4f} s expected" if decision.chosen.terms else ""
        lines.append(f"first token after {decision.first_token_s:.4f} s{expected}")
    if decision.regret_s is not None:
        lines.append(f"regret {decision.regret_s:+.4f} s, against the predicted cost of the best other pair")
    times = decision.measured
    if times is not None:
        lines.append(
            f"measured: waited {times.waited_s:.4f} s, "
            f"computed {times.num_new_tokens} of {times.num_tokens} tokens in {times.computed_s:.4f} s, "
            f"{times.used_s:.4f} s of it its own, "
            f"pulled {times.pulled_bytes} bytes in {times.pulled_s:.4f} s, "
            f"hand-off exposed {times.exposed_s:.4f} s"
        )
    return lines


def _pair(weighed: Weighed, names: dict[str, str]) -> str:
    decode = names.get(weighed.decode, short_id(weighed.decode))
    prefill = names.get(weighed.prefill, short_id(weighed.prefill)) if weighed.prefill else "itself"
    source = f" pulls from {names.get(weighed.source, short_id(weighed.source))}" if weighed.source else ""
    return f"{decode} < {prefill}{source}"


explain = CliCommand(__doc__, _add_options, _run)
