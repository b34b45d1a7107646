"""What a whole decision of the policy `cost` takes: the look-up, the comparison and the choice.

python -m baton.bench.router.decision [--pages 10000000] [--workers 1000] [--decisions 2000] [--json FILE]

Half of the workers compute prompts, half decode. Prompts have 752 pages, of which some worker holds all, and
their pages' names are made beforehand. What follows a decision, as what is expected where, is not in it: the
dispatch has left by then. Times are of this process's CPU, as other processes share the machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import thread_time_ns
from typing import Final

import msgspec
import numpy as np

from baton.bench.machine import machine_description, one_line
from baton.bench.report import Row, at_most, print_table, write_json
from baton.bench.router.prefix_index import PROMPT_PAGES, Loaded, load
from baton.clock import ManualClock
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Hello
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams
from baton.router.in_flight import InFlight
from baton.router.index.prompt_keys import Family, PromptKeys
from baton.router.membership import Member
from baton.router.policies.base import ClusterView, KnownWorkers, PolicyContext
from baton.router.policies.cost import CostPolicy
from baton.router.policies.cost_model import CostModel
from baton.router.policies.costs import WorkerPool

SMALL: Final = 4  # workers of the cluster that is timed besides
BAR_US: Final = (100.0, 500.0)  # p50, p99


class Nobody:
    """The other end of a connection that nothing is said over."""

    silence_s = 0.0

    def __init__(self, hello: Hello) -> None:
        self.hello = hello

    def send(self, message: AnyMessage) -> None:
        raise AssertionError(message)

    def close(self) -> None:
        raise AssertionError("a decision closes nothing")


class KnownKeys(PromptKeys):
    """Of one prompt, made beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.now = b""

    def keys(self, family: Family, request: Request) -> bytes:
        return self.now


def decision_times_us(loaded: Loaded, num_decisions: int, rng: np.random.Generator) -> list[float]:
    """Followed as a router follows them, 100 a second by the virtual clock."""
    clock, keys = ManualClock(1.0), KnownKeys()
    cost_policy = CostPolicy(
        PolicyContext(clock, KnownWorkers(InFlight(clock), loaded.index, CostModel(), keys), Random(0))
    )
    members = []
    for number, worker in enumerate(loaded.workers):
        role = WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE
        worker = msgspec.structs.replace(worker, role=role)
        hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
        members.append(Member(worker, Nobody(hello), 0.0))
    decoders, fillers = (
        WorkerPool([member for member in members if member.worker.role is role])
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
    )
    everyone = frozenset(member.id for member in fillers.members)
    field = ClusterView(decoders, fillers, {member.id: everyone for member in decoders.members})
    prompt, sampling = tuple(range(PROMPT_PAGES * 16)), SamplingParams(max_tokens=100)
    request = Request(request_id="0" * 32, token_ids=prompt, sampling=sampling)
    times_us = []
    for number in rng.integers(0, len(loaded.prompts), num_decisions).tolist():
        keys.now = loaded.prompts[number]
        begun_ns = thread_time_ns()
        choice = cost_policy.choose(request, field)
        times_us.append((thread_time_ns() - begun_ns) / 1e3)
        cost_policy.expect(choice, request.num_tokens)
        clock.advance(0.01)
        loaded.index.tick()
    return times_us


def rows_of(num_workers: int, num_pages: int, num_decisions: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for workers, pages in ((num_workers, num_pages), (SMALL, num_pages // 50)):
        loaded = load(workers, pages, rng)
        times_us = decision_times_us(loaded, num_decisions, rng)
        name, note = f"decision, {workers:,} workers", f"{loaded.index.num_pages:,} pages"
        rows.append(at_most(f"{name}: p50", median(times_us), "us", BAR_US[0], note))
        rows.append(at_most(f"{name}: p99", quantiles(times_us, n=100)[98], "us", BAR_US[1]))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=10_000_000, metavar="N")
    parser.add_argument("--workers", type=int, default=1000, metavar="N")
    parser.add_argument("--decisions", type=int, default=2000, metavar="N", help="timed (2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    arguments = parser.parse_args(words)
    rows = rows_of(arguments.workers, arguments.pages, arguments.decisions)
    print(one_line(machine_description()))
    print_table("a decision of the policy cost", rows)
    if arguments.json is not None:
        write_json(arguments.json, "a decision of the policy cost", rows, {})


if __name__ == "__main__":
    main()
