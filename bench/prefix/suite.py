"""What reuse of prefixes is worth between real processes: two prefill and two decode workers on this machine.

    baton bench prefix            a minute or two
    baton bench prefix --quick    few rounds: whether it runs

Questions about long documents and growing conversations, with the policy that knows what workers hold and
again, in turns, with nothing kept anywhere; and a prefix that a busy worker holds, pulled by another one,
beside what the router expected of that. All answers are compared. Columns are explained in bench/README.md.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeAlias

from baton.bench.machine import machine_description, one_line
from baton.bench.prefix.world import (
    ANSWER_TOKENS,
    DOCUMENT_TOKENS,
    PAGE_SIZE,
    QUESTION_TOKENS,
    Answer,
    Plan,
    Told,
    Wish,
    World,
    conversations,
    engine_of,
    open_world,
    questions,
    tokens,
    warm_up,
    write_model,
)
from baton.bench.report import RESULTS, Row, at_least, at_most, can_plot, print_table, write_json
from baton.engine.loading import load_engine
from baton.messages.control import Decision
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams

# A prefix that one prefill worker has computed, asked for while that worker is busy: another one pulls it.
#
# A trial: the first prefill worker computes a document, and is then kept busy with other prompts. A question
# about the document goes to the second one, which holds none of it; whether it pulls or computes is the
# router's to choose. Then it computes a prompt of that length which nobody holds, in the same circumstances.
# Decode workers keep nothing, so the document is the first worker's alone.

PLAN: Final = Plan(policy="cost", caching=(WorkerRole.PREFILL,))
BUSY_PROMPTS: Final = 2
NUM_LESSONS: Final = 3
FIRST, SECOND = "prefill-0", "prefill-1"


class Costs(NamedTuple):
    """Of one prompt's KV at the second worker, in seconds, until the first token."""

    expected_s: float  # by the router, when it chose
    measured_s: float  # by the worker
    pulled_bytes: int
    pulled_s: float

    @classmethod
    def of(cls, decision: Decision) -> "Costs":
        terms, measured = decision.chosen.terms, decision.measured
        assert measured is not None
        return cls(
            terms["pull_s"] + terms["compute_s"],
            measured.pulled_s + measured.computed_s,
            measured.pulled_bytes,
            measured.pulled_s,
        )


class Trial(NamedTuple):
    pulled: Costs
    computed: Costs
    queue_s: float  # that the busy worker was expected to have
    is_from_busy_worker: bool
    prompt: list[int]
    token_ids: list[int]  # of the answer after the pull

    @property
    def expected_margin_s(self) -> float:
        return self.computed.expected_s - self.pulled.expected_s

    @property
    def measured_margin_s(self) -> float:
        return self.computed.measured_s - self.pulled.measured_s


async def trials(world: World, num_trials: int, seed: int) -> list[Trial]:
    """The first ones teach the router what a pull takes, and are left out."""
    random = Random(seed)
    found = [await _trial(world, random) for _ in range(num_trials + NUM_LESSONS)]
    return found[NUM_LESSONS:]


def median_ratio(trials: Sequence[Trial]) -> float | None:
    """Expected to measured margin; None where pulling was no faster."""
    expected_s = statistics.median(trial.expected_margin_s for trial in trials)
    measured_s = statistics.median(trial.measured_margin_s for trial in trials)
    return expected_s / measured_s if measured_s > 0 else None


async def _trial(world: World, random: Random) -> Trial:
    document = tokens(random, DOCUMENT_TOKENS)
    at_first, at_second = _at(world, FIRST), _at(world, SECOND)
    question = [*document, *tokens(random, QUESTION_TOKENS)]
    num_told = world.num_told(FIRST)
    await (await world.ask([*document, *tokens(random, QUESTION_TOKENS)], 1, at_first)).end()
    await world.publisher(FIRST, num_told + DOCUMENT_TOKENS // PAGE_SIZE)
    busy = await _keep_busy(world, random, at_first)
    queue_s = world.router.in_flight.wait_s(world.worker_id(FIRST))
    answer = await world.ask(question, ANSWER_TOKENS, at_second)
    pulled = await world.told(await answer.end())
    for each in busy:
        await each.end()
    busy = await _keep_busy(world, random, at_first)
    cold = await world.ask(tokens(random, len(question)), ANSWER_TOKENS, at_second)
    computed = await world.told(await cold.end())
    for each in busy:
        await each.end()
    is_from_first = pulled.chosen.source == world.worker_id(FIRST)
    return Trial(
        Costs.of(pulled), Costs.of(computed), queue_s, is_from_first, question, list(answer.token_ids)
    )


async def _keep_busy(world: World, random: Random, wish: Wish) -> list[Answer]:
    return [await world.ask(tokens(random, DOCUMENT_TOKENS), 1, wish) for _ in range(BUSY_PROMPTS)]


def _at(world: World, name: str) -> Wish:
    worker_id = world.worker_id(name)
    return lambda candidate: candidate.prefill == worker_id


# Plots of what bench/prefix/suite.py measured.


def plot_prefix(
    workloads: Mapping[str, tuple[Sequence[float], Sequence[float]]], pulls: Sequence[Trial], path: Path
) -> None:
    """Times to first token, with and without reuse, as shares of all requests; and each pull's costs.

    workloads: by name, seconds with and without. path: of the JSON, beside which the picture goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * (len(workloads) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(workloads) + 1, squeeze=False)[0]
    for axes, (name, times) in zip(panels, workloads.items(), strict=True):
        for label, seconds in zip(("with reuse", "without"), times, strict=True):
            shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
            axes.step(sorted(each * 1e3 for each in seconds), shares, where="post", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("ms to the first token")
        axes.set_ylabel("share of requests")
        axes.set_title(name)
        axes.legend(fontsize="small")
    for label, costs in (("pulled", [t.pulled for t in pulls]), ("computed", [t.computed for t in pulls])):
        expected, measured = ([getattr(each, field) * 1e3 for each in costs] for field in _COSTS)
        last.plot(measured, expected, "o", label=label)
    most = max(1e3 * max(*trial.computed[:2]) for trial in pulls)
    last.plot([0, most], [0, most], color="grey", linestyle="--", linewidth=0.8, label="as expected")
    last.set_xlabel("measured, ms")
    last.set_ylabel("expected, ms")
    last.set_title("a prefix that a busy worker holds")
    last.legend(fontsize="small")
    figure.savefig(path.with_suffix(".png"), dpi=150)


_COSTS = ("measured_s", "expected_s")

TITLE: Final = "Prefix reuse between processes"
WITH: Final = Plan(policy="cost")
WITHOUT: Final = Plan(policy="least-loaded", caching=())
MOST_TTFT_SHARE: Final = 0.4
MOST_ERROR: Final = 0.3
Workload: TypeAlias = Callable[[World, int], Awaitable[list[Told]]]
WORKLOADS: Final[dict[str, Workload]] = {"documents": questions, "conversations": conversations}


class Compared(NamedTuple):
    """One workload, round by round the same prompts in both worlds."""

    name: str
    reused_s: list[float]  # times to first token
    computed_s: list[float]
    num_different: int  # answers

    @property
    def share(self) -> float:
        return statistics.median(self.reused_s) / statistics.median(self.computed_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="of each workload (3)")
    parser.add_argument("--trials", type=int, default=8, help="of a pull (8)")
    parser.add_argument("--quick", action="store_true", help="one round, two trials: no figures to believe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS / "prefix.json", metavar="PATH")


def run(arguments: argparse.Namespace) -> None:
    """Raises WorkerLost when the workers do not come, TimeoutError when one does not answer."""
    num_rounds, num_trials = (1, 2) if arguments.quick else (arguments.rounds, arguments.trials)
    print(one_line(machine_description()), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model")
        compared = asyncio.run(_compare(model, num_rounds, arguments.seed))
        pulls = asyncio.run(_pull(model, num_trials, arguments.seed))
        num_wrong = _num_wrong(model, pulls)
    rows = [*(row for each in compared for row in rows_of(each)), *rows_of_pulls(pulls, num_wrong)]
    print_table(TITLE, rows)
    extra = {"workloads": [each._asdict() for each in compared], "pulls": [_plain(each) for each in pulls]}
    write_json(arguments.json, TITLE, rows, extra)
    if can_plot():
        plot_prefix({each.name: (each.reused_s, each.computed_s) for each in compared}, pulls, arguments.json)


def rows_of(compared: Compared) -> list[Row]:
    name, share = compared.name, compared.share
    medians = statistics.median(compared.reused_s) * 1e3, statistics.median(compared.computed_s) * 1e3
    return [
        Row(f"{name}: TTFT p50 with reuse", medians[0], "ms", note=f"{len(compared.reused_s)} requests"),
        Row(f"{name}: TTFT p50 without", medians[1], "ms", note="no prefix is kept; least-loaded"),
        at_most(f"{name}: with / without", share, "x", MOST_TTFT_SHARE),
        at_most(f"{name}: answers that differ", compared.num_different, "", 0),
    ]


def rows_of_pulls(pulls: Sequence[Trial], num_wrong: int) -> list[Row]:
    ratio, num_pulled = median_ratio(pulls), sum(trial.is_from_busy_worker for trial in pulls)
    margins = [
        statistics.median(each) * 1e3
        for each in ([t.expected_margin_s for t in pulls], [t.measured_margin_s for t in pulls])
    ]
    speeds = [t.pulled.pulled_bytes / t.pulled.pulled_s / 1e9 for t in pulls if t.pulled.pulled_bytes]
    queue_s = min(trial.queue_s for trial in pulls)
    return [
        at_least("pull: from the busy worker", num_pulled, "trials", len(pulls), "chosen by cost"),
        at_most("pull: answers that differ from one engine's", num_wrong, "", 0),
        Row("pull: the busy worker's queue, least", queue_s * 1e3, "ms", note="expected by the router"),
        Row("pull: rate p50", statistics.median(speeds) if speeds else None, "GB/s", met=bool(speeds)),
        Row("pull: faster than computing by, expected", margins[0], "ms", note="p50; the router's decisions"),
        Row("pull: faster than computing by, measured", margins[1], "ms", note="p50; the workers' own times"),
        Row(
            "pull: expected / measured",
            ratio,
            "x",
            f"within {MOST_ERROR:.0%}",
            ratio is not None and abs(ratio - 1) <= MOST_ERROR,
        ),
    ]


async def _compare(model: Path, num_rounds: int, seed: int) -> list[Compared]:
    found = {name: Compared(name, [], [], 0) for name in WORKLOADS}
    async with open_world(model, WITH) as reusing, open_world(model, WITHOUT) as computing:
        for world in (reusing, computing):
            await warm_up(world, seed + 1_000_000)
        for number in range(num_rounds):
            for name, workload in WORKLOADS.items():
                reused = await workload(reusing, seed + number)
                computed = await workload(computing, seed + number)
                before = found[name]
                found[name] = Compared(
                    name,
                    before.reused_s + [each.ttft_s for each in reused],
                    before.computed_s + [each.ttft_s for each in computed],
                    before.num_different + _num_different(reused, computed),
                )
    return list(found.values())


async def _pull(model: Path, num_trials: int, seed: int) -> list[Trial]:
    async with open_world(model, PLAN) as world:
        await warm_up(world, seed + 2_000_000)
        return await trials(world, num_trials, seed + 3_000_000)


def _num_different(one: Sequence[Told], other: Sequence[Told]) -> int:
    return sum(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))


def _num_wrong(model: Path, pulls: Sequence[Trial]) -> int:
    """Answers after a pull that are not what one engine alone says."""
    engine = load_engine(engine_of(model, is_caching=False))
    num_wrong = 0
    for number, trial in enumerate(pulls):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(trial.token_ids), ignore_eos=True)
        request = Request(request_id=f"{number:032x}", token_ids=tuple(trial.prompt), sampling=sampling)
        engine.add(request)
        said = []
        while engine.has_work():
            said += [output.token_id for output in engine.step()]
        num_wrong += said != trial.token_ids
    engine.close()
    return num_wrong


def _plain(trial: Trial) -> dict[str, object]:
    kept = ("queue_s", "is_from_busy_worker", "expected_margin_s", "measured_margin_s")
    costs = {"pulled": trial.pulled._asdict(), "computed": trial.computed._asdict()}
    return {**costs, **{name: getattr(trial, name) for name in kept}}
