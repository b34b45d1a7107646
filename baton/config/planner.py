"""The settings of the planner, which sizes the cluster of one `baton serve`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.messages.bounds import MAX_WORKERS
from baton.tenants import Milliseconds

PlannerMode = Literal["off", "advise", "apply"]


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the planner acts, on which objectives, within which bounds."""

    mode: PlannerMode = "off"  # advise: log plans; apply: also add, remove and flip workers
    interval_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0  # between two plans
    ttft_ms: Milliseconds | None = None  # objective of the time to first token; None: there is none
    tpot_ms: Milliseconds | None = None  # objective of the mean time a token; None: there is none
    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.99  # share of requests that shall meet both
    min_prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS // 2)] = 1  # prefill workers
    min_decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS // 2)] = 1  # decode workers
    # Workers of both roles; None: as many as the cluster started with, so workers only change their role.
    max_workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None = None
    # Workers that one plan adds, removes or flips.
    max_change: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 4
    startup_s: Annotated[float, Meta(ge=0, le=86_400)] = 120.0  # of a worker, assumed until one was measured
    # Without a change after an operator's change.
    manual_hold_s: Annotated[float, Meta(ge=0, le=86_400)] = 1800.0
    times: str | None = None  # file of `baton calibrate`, with the times of the model's workers
    log: str | None = None  # file for plans, a JSON line each; None: plans-PORT.jsonl in Baton's cache folder

    def __post_init__(self) -> None:
        if self.mode != "off" and self.ttft_ms is None and self.tpot_ms is None:
            raise ConfigError("planner.mode: needs an objective: give planner.ttft_ms or planner.tpot_ms")
        if self.mode != "off" and self.times is None:
            raise ConfigError("planner.times: the planner needs a file of `baton calibrate`")
        if self.max_workers is not None and self.max_workers < self.min_prefill + self.min_decode:
            raise ConfigError("planner.max_workers: less than min_prefill and min_decode together")
