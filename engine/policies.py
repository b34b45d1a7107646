"""Who says what a step computes."""

from typing import Protocol

from baton.config import SchedulerConfig
from baton.engine.batch_policies import DynamicPolicy, StaticPolicy
from baton.engine.continuous import ContinuousPolicy
from baton.engine.plan_draft import PlanDraft
from baton.engine.queue_window import QueueWindow


class BatchPolicy(Protocol):
    def fill(self, draft: PlanDraft, now_s: float) -> float | None:
        """Schedule the step; return the seconds until the queue window opens if something waits for it."""


def policy_of(config: SchedulerConfig) -> BatchPolicy:
    window = QueueWindow(config.max_queue_delay_ms / 1e3, config.preferred_batch_sizes)
    if config.policy == "static":
        return StaticPolicy()
    if config.policy == "dynamic":
        return DynamicPolicy(window)
    return ContinuousPolicy(window)
