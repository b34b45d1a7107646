"""Admits each call of a tenant or refuses it, and counts it to its end.

Quotas hold for the whole cluster, and the router keeps them. A gateway never has more open calls than the
cluster, so a call over the quota here is refused without asking the router.

A gateway has a `Budget` of slots for choices, and of bytes: of bodies and prompts, charged as they come and
before they are parsed, and of answers that are kept until they are whole.
"""

from collections.abc import Iterator
from typing import Final

from baton.config.gateway import GatewaySettings
from baton.gateway.api.call import Call
from baton.gateway.api.errors import invalid
from baton.gateway.metrics.metrics import OTHERS, Metrics
from baton.gateway.tenants.budget import Budget, Charge
from baton.messages.status import MAX_STREAMS, StreamCounts
from baton.tenants import Refusal, Sla

NO_OBJECTIVES: Final = Sla()


class Permit:
    """The admission of one call: report each batch of `tokens`, then `leave` once."""

    __slots__ = (
        *("_adapters", "_all", "_call", "_counts", "_demand", "_first_s", "_last_s", "_metrics"),
        *("_num_prompt_tokens", "_num_tokens", "_slots"),
    )

    def __init__(self, call: Call, metrics: Metrics, slots: "Charge", demand: StreamCounts) -> None:
        """slots: those of the call; they are released when the call ends."""
        self._call = call
        self._demand = demand
        self._metrics = metrics
        self._all = metrics.of_call(call.served)
        self._counts = metrics.tenant(call.tenant.name)
        self._slots = slots
        self._num_prompt_tokens = call.num_prompt_tokens
        self._num_tokens = 0
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}  # of each choice, by its index
        self._adapters = metrics.waiting_adapters
        metrics.num_open += 1
        if call.adapter is not None:
            self._adapters[call.model] += 1
        for each in self._all:
            each.prompt_tokens += self._num_prompt_tokens
        self._counts.num_open += call.num_answers
        self._counts.prompt_tokens += self._num_prompt_tokens

    def tokens(self, choice: int, num_tokens: int, now_s: float) -> None:
        """Count a batch of tokens of a choice."""
        before_s = self._last_s.get(choice)
        if before_s is not None:
            for each in self._all:
                each.itl.observe(now_s - before_s)
        elif self._first_s is None:
            self._first_s = now_s
            if self._call.adapter is not None:
                self._leave_adapters()
                self._adapters = self._metrics.running_adapters
                self._adapters[self._call.model] += 1
            for each in self._all:
                each.ttft.observe(now_s - self._call.arrival_s)
        self._last_s[choice] = now_s
        self._num_tokens += num_tokens
        for each in self._all:
            each.generated_tokens += num_tokens
        self._counts.generated_tokens += num_tokens

    def leave(self, outcome: str, num_cached_tokens: int, now_s: float) -> None:
        """Count the end. outcome: a key of TenantCounts.calls. num_cached_tokens: of the prompts."""
        self._metrics.num_open -= 1
        if self._call.adapter is not None:
            self._leave_adapters()
        self._metrics.cached_tokens += num_cached_tokens
        for each in self._all:
            each.duration.observe(now_s - self._call.arrival_s)
            if self._first_s is not None:
                each.decode.observe(now_s - self._first_s)
        counts = self._counts
        counts.num_open -= self._call.num_answers
        counts.calls[outcome] += 1
        if self._call.sla != NO_OBJECTIVES:
            self._count_objectives(is_over=outcome != "gone")
        if self._num_tokens:
            num_tokens = self._num_tokens // self._call.num_answers
            self._demand.end(self._num_prompt_tokens, num_cached_tokens, num_tokens)
        self._slots.release()

    def _leave_adapters(self) -> None:
        """Count the call's adapter one time less where it is counted."""
        self._adapters[self._call.model] -= 1
        if not self._adapters[self._call.model]:
            del self._adapters[self._call.model]

    def _count_objectives(self, *, is_over: bool) -> None:
        verdicts = dict(self._verdicts(is_over=is_over))
        for objective, is_met in verdicts.items():
            (self._counts.met if is_met else self._counts.missed)[objective] += 1
        if verdicts:
            has_met_all = all(verdicts.values())
            self._demand.num_met += has_met_all
            self._demand.num_missed += not has_met_all

    def _verdicts(self, *, is_over: bool) -> Iterator[tuple[str, bool]]:
        """Yield each objective of the call that was met or missed; a client that left early missed none."""
        sla, first_s = self._call.sla, self._first_s
        if first_s is not None or is_over:
            ttft_ms = (first_s - self._call.arrival_s) * 1000 if first_s is not None else float("inf")
            for objective, limit_ms in (("ttft", sla.ttft_ms), ("deadline", sla.deadline_ms)):
                if limit_ms is not None:
                    yield objective, ttft_ms <= limit_ms
        num_choices = self._call.num_answers
        num_later = self._num_tokens - num_choices
        if sla.tpot_ms is not None and first_s is not None and num_later > 0:
            tpot_ms = (max(self._last_s.values()) - first_s) * 1000 * num_choices / num_later
            yield "tpot", tpot_ms <= sla.tpot_ms


class Limiter:
    """The slots and the bytes of one gateway."""

    def __init__(self, metrics: Metrics, settings: GatewaySettings) -> None:
        self.slots = Budget(metrics, settings.max_open_requests, Refusal.MAX_CONCURRENT_REQUESTS, "slots")
        self.inputs = Budget(metrics, settings.max_input_bytes, Refusal.MAX_INPUT_BYTES)
        self.answers = Budget(metrics, settings.max_answer_bytes, Refusal.MAX_ANSWER_BYTES)
        self._metrics = metrics
        self._demand: dict[tuple[str, str], StreamCounts] = {}  # by tenant and class, for the planner

    def demand(self) -> tuple[StreamCounts, ...]:
        """Return the counts of all requests since the gateway's start, by tenant and class."""
        return tuple(self._demand.values())

    def enter(self, call: Call) -> Permit:
        """Admit a call.

        Raises Refused for a quota, Overloaded when no slot is free, and ApiError 400 for a call that the
        tenant's quota never admits.
        """
        demand = self._demand_of(call)
        demand.arrive(call.num_prompt_tokens)
        quotas = call.scheduling_key.quotas
        most = quotas.max_concurrent_requests
        if most is not None and call.num_answers > most:
            raise invalid("n", f"the call has {call.num_answers} answers, its tenant may have {most} at once")
        slots = self.slots.charge(call.tenant.name, quotas)
        slots.add(call.num_answers)
        return Permit(call, self._metrics, slots, demand)

    def _demand_of(self, call: Call) -> StreamCounts:
        """Return the counts of a call's stream; beyond MAX_STREAMS streams share theirs."""
        classes, rank = call.tenant.classes, call.scheduling_key.rank
        key = call.tenant.name, classes[rank] if rank < len(classes) else str(rank)
        if key not in self._demand and len(self._demand) >= MAX_STREAMS:
            key = OTHERS, ""
        if key not in self._demand:
            self._demand[key] = StreamCounts(tenant=key[0], priority=key[1])
        return self._demand[key]
