"""Which layout of workers a load needs: a search by rehearsals.

1. `layouts` lists the candidates: workers without roles, and every split into prefill and decode workers, up
   to a number of devices; ranks of either role, and tokens of a step, as far as the time model has them.
2. The first MAX_LAYOUTS, which have few and many devices, are rehearsed in the fast mode, or in the full one
   where workers have pipeline stages. Those that meet the objectives are ranked by devices, then by
   headroom: the multiple of the load under which they still do.
3. The first few sets of workers, and the first of the other kind, are rehearsed in the full mode. The
   cheapest that still meets the objectives is the advice: also not to disaggregate, or that nothing does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from baton.errors import ConfigError
from baton.sim.rehearsal import Layout, Rehearsal, RehearsalSettings, rehearse
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import TraceRequest, at_speed
from baton.tenants import Sla

NUM_FINALISTS: Final = 3
SPEEDS: Final = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # multiples of the load that headroom tries
NUM_WITH_HEADROOM: Final = 10
TRIED_STEP_TOKENS: Final = (256, 512, 1024, 2048, 4096, 8192)
MAX_LAYOUTS: Final = 40
NUM_COUNTS: Final = 20  # of devices, that are tried first where more are allowed
MOST_FULL: Final = 2000  # requests of a full rehearsal

RunAll: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]  # as the builtin map


class Search(NamedTuple):
    """The parts that all rehearsals of a search have in common."""

    trace: Sequence[TraceRequest]
    times: TimeModel
    settings: RehearsalSettings
    attainment: float  # share of requests that must meet the objectives


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: its fast rehearsal, its headroom, and its full rehearsal if it had one."""

    fast: Rehearsal
    headroom: float = 0.0  # 0: it does not meet the objectives
    full: Rehearsal | None = None

    @property
    def layout(self) -> Layout:
        """The candidate's workers."""
        return self.fast.layout

    @property
    def best_known(self) -> Rehearsal:
        """The full rehearsal, or the fast one."""
        return self.full or self.fast


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search."""

    options: tuple[Option, ...]  # in order of merit
    chosen: Option | None  # None: nothing meets the objectives
    runner_up: Option | None
    reasons: tuple[str, ...]


def layouts(times: TimeModel, max_ranks: int) -> list[Layout]:
    """Return the candidates of up to so many devices, in the order in which they are worth a rehearsal.

    Among layouts of one number of devices, those without roles come first, then even splits. Smaller
    steps come last.
    """
    sizes = sorted(times.replicas)
    ranks = {size: size * times.replicas[size].num_stages for size in sizes}
    most = min(each.steps.most["num_new"] for each in times.replicas.values())
    usual = max([each for each in TRIED_STEP_TOKENS if each <= most], default=int(most))
    base = [
        Layout(num_prefill=0, num_decode=number, decode_tp=size)
        for size in sizes
        for number in range(1, max_ranks // ranks[size] + 1)
    ]
    base += [
        Layout(num_prefill=prefill, num_decode=decode, prefill_tp=prefill_tp, decode_tp=decode_tp)
        for prefill_tp in sizes
        for decode_tp in sizes
        for prefill in range(1, max_ranks // ranks[prefill_tp] + 1)
        for decode in range(1, (max_ranks - prefill * ranks[prefill_tp]) // ranks[decode_tp] + 1)
    ]
    base = _spread([each.with_stages(times) for each in base])
    steps = [each for each in TRIED_STEP_TOKENS if each < usual][::-2][:2]
    found = [msgspec.structs.replace(each, step_tokens=usual) for each in base]
    found += [msgspec.structs.replace(each, step_tokens=tokens) for tokens in steps for each in base]
    return found


def _spread(given: Sequence[Layout]) -> list[Layout]:
    """Return the layouts so that the first ones have few and many devices, and are of both kinds."""
    counts = sorted({each.num_ranks for each in given})
    first = set(counts)
    if len(counts) > NUM_COUNTS:
        wanted = np.geomspace(counts[0], counts[-1], NUM_COUNTS).tolist()
        first = {min(counts, key=lambda count: abs(count - each)) for each in wanted}
    places = dict.fromkeys(counts, 0)  # number of devices -> layouts so far
    order: list[tuple[bool, int, int, Layout]] = []
    for each in sorted(
        given, key=lambda each: (each.num_prefill > 0, abs(each.num_prefill - each.num_decode))
    ):
        count = each.num_ranks
        order.append((count not in first, places[count], count, each))
        places[count] += 1
    return [each for *_, each in sorted(order, key=lambda entry: entry[:3])]


def meets(result: Rehearsal, attainment: float) -> bool:
    """Return whether so many requests meet the objectives."""
    return result.is_valid and result.figures["attainment"].value >= attainment


def advise(
    search: Search,
    candidates: Sequence[Layout],
    run_all: RunAll = map,
    tell: Callable[[str], object] = lambda text: None,
) -> Advice:
    """Search the first MAX_LAYOUTS candidates.

    run_all: maps functions over values, perhaps in several processes.
    ConfigError: there are no objectives or no candidates, or every candidate leaves the calibrated ranges.
    """
    if search.settings.sla == Sla():
        raise ConfigError("--slo: expected objectives such as ttft=0.5,tpot=0.05")
    if not candidates:
        raise ConfigError("--devices: a worker has more ranks than that")
    rehearsed = candidates[:MAX_LAYOUTS]
    tell(f"{len(rehearsed)} layouts")
    fast = list(run_all(_rehearse_fast, [(search, each) for each in rehearsed]))
    if not any(each.is_valid for each in fast):
        raise ConfigError(f"no layout stays within the calibrated ranges: {'; '.join(fast[0].complaints)}")
    able = [each for each in fast if meets(each, search.attainment)]
    able.sort(key=lambda each: (each.layout.num_ranks, -each.figures["attainment"].value))
    tell("headroom")
    tried = able[:NUM_WITH_HEADROOM]
    headrooms = dict(
        zip(
            (each.layout.name for each in tried),
            run_all(_headroom, [(search, each.layout) for each in tried]),
            strict=True,
        )
    )
    options = [Option(fast=each, headroom=headrooms.get(each.layout.name, 0.0)) for each in fast]
    options.sort(key=lambda option: _merit(option, search.attainment))
    finalists = _finalists([each for each in options if meets(each.fast, search.attainment)] or options)
    tell(f"{len(finalists)} finalists")
    full = run_all(_rehearse_full, [(search, each.layout) for each in finalists])
    done = {each.layout.name: each for each in full}
    options = [msgspec.structs.replace(each, full=done.get(each.layout.name)) for each in options]
    options.sort(key=lambda option: _merit(option, search.attainment))
    good = [each for each in options if each.full is not None and meets(each.full, search.attainment)]
    chosen = good[0] if good else None
    others = [each for each in options if each is not chosen and each.full is not None]
    runner_up = others[0] if others else None
    reasons = (
        *_reasons(chosen, runner_up, options, search),
        *_left_out(len(candidates) - len(rehearsed), search),
    )
    return Advice(options=tuple(options), chosen=chosen, runner_up=runner_up, reasons=reasons)


def _merit(option: Option, attainment: float) -> tuple[bool, bool, int, float, float]:
    known = option.best_known
    if not known.is_valid:
        return True, True, option.layout.num_ranks, 0.0, 0.0
    reached = known.figures["attainment"].value
    is_able = meets(known, attainment)
    ranks = option.layout.num_ranks if is_able else 0
    return False, not is_able, ranks, -option.headroom, -reached


def _workers(option: Option) -> tuple[int, ...]:
    layout = option.layout
    return layout.num_prefill, layout.num_decode, layout.prefill_tp, layout.decode_tp


def _finalists(options: Sequence[Option]) -> list[Option]:
    """Return the first option of each of the first few sets of workers, and the first of the other kind."""
    firsts = list({_workers(each): each for each in reversed(options)}.values())[::-1]
    kept = firsts[:NUM_FINALISTS]
    is_split = bool(kept[0].layout.num_prefill)
    other = next((each for each in firsts if bool(each.layout.num_prefill) is not is_split), None)
    return kept if other is None or other in kept else [*kept, other]


def _rehearse_fast(given: tuple[Search, Layout]) -> Rehearsal:
    search, layout = given
    settings = msgspec.structs.replace(search.settings, mode="fast", has_intervals=False)
    most = MOST_FULL if layout.has_stages else None
    return rehearse(search.trace[:most], layout, search.times, settings)


def _rehearse_full(given: tuple[Search, Layout]) -> Rehearsal:
    search, layout = given
    settings = msgspec.structs.replace(search.settings, mode="full", has_intervals=True)
    return rehearse(search.trace[:MOST_FULL], layout, search.times, settings)


def _headroom(given: tuple[Search, Layout]) -> float:
    """Return the largest of SPEEDS at which a layout still meets the objectives."""
    search, layout = given
    reached = 1.0
    for speed in SPEEDS[1:]:
        faster = search._replace(trace=at_speed(search.trace, speed))
        if not meets(_rehearse_fast((faster, layout)), search.attainment):
            break
        reached = speed
    return reached


def _reasons(
    chosen: Option | None, runner_up: Option | None, options: Sequence[Option], search: Search
) -> Iterator[str]:
    if chosen is None:
        best = options[0]
        reached = best.best_known.figures["attainment"].value
        yield (
            f"infeasible: no rehearsed layout keeps the objectives for {search.attainment:.0%} of the "
            f"requests; {best.layout.name} comes nearest with {reached:.1%}"
        )
        return
    yield f"{chosen.layout.name} is the cheapest that keeps the objectives: {_told(chosen)}"
    if not chosen.layout.num_prefill:
        yield "do not disaggregate: workers without roles serve this load with the fewest devices"
    low = chosen.best_known.figures["attainment"].low
    if low < search.attainment:
        yield f"it may miss them: the interval of its attainment begins at {low:.1%}"
    if runner_up is not None:
        yield f"runner-up {runner_up.layout.name}: {_why_not(runner_up, chosen, search)}; {_told(runner_up)}"


def _left_out(num_layouts: int, search: Search) -> Iterator[str]:
    """Yield what the rehearsals have left out."""
    if num_layouts:
        yield f"{num_layouts} other layouts were not rehearsed"
    if len(search.trace) > MOST_FULL:
        yield f"full rehearsals have the first {MOST_FULL:,} of {len(search.trace):,} requests"


def _told(option: Option) -> str:
    figures = option.best_known.figures
    if not figures:
        return "outside of the calibrated ranges"
    return (
        f"{figures['attainment'].value:.1%} attained, TTFT p90 {figures['ttft_p90_ms'].value:,.0f} ms, "
        f"TPOT p90 {figures['tpot_p90_ms'].value:,.1f} ms, headroom {option.headroom:g}x"
    )


def _why_not(option: Option, chosen: Option, search: Search) -> str:
    if not meets(option.best_known, search.attainment):
        return "misses the objectives"
    more = option.layout.num_ranks - chosen.layout.num_ranks
    if more:
        return f"takes {more} more device{'s' * (more > 1)}"
    if option.headroom < chosen.headroom:
        return "as many devices, less headroom"
    return "as many devices and as much headroom, and attains less"
