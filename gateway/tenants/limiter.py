"""Admits each call of a tenant or refuses it, and counts it to its end.

Quotas hold for the whole cluster, and the router keeps them. One gateway has no more open than the cluster: a
call over the quota here is over the quota everywhere, and the router need not be asked.

A gateway has slots for a number of choices. One tenant cannot take all slots (`baton.tenants.has_slots`).
The same holds for bytes of memory: of bodies and prompts, charged as they come and before they are parsed,
and of answers that are kept until they are whole.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from baton.config.gateway import GatewaySettings
from baton.errors import Overloaded, Refused
from baton.gateway.api.call import Call
from baton.gateway.api.errors import invalid
from baton.gateway.metrics.metrics import OTHERS, Metrics
from baton.messages.status import MAX_STREAMS, StreamCounts
from baton.tenants import Quotas, Refusal, Sla, has_slots

FULL_RETRY_S: Final = 1.0  # the end of a call cannot be predicted
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


class Charge:
    """The amount of a Budget that one call holds, until its `with` ends."""

    __slots__ = ("_budget", "_is_counted", "_quota", "_tenant", "amount")

    def __init__(self, budget: "Budget", tenant: str, quota: int | None, *, is_counted: bool) -> None:
        self._budget = budget
        self._is_counted = is_counted
        self._tenant = tenant
        self._quota = quota
        self.amount = 0

    def add(self, amount: int) -> None:
        """Hold more. Raises Refused for the tenant's quota, Overloaded when the gateway has no room."""
        self._budget.take(self._tenant, amount, self._quota, is_counted=self._is_counted)
        self.amount += amount

    def set(self, amount: int) -> None:
        """Hold this amount from now on. Raises the errors of `add`."""
        if amount > self.amount:
            self.add(amount - self.amount)
        else:
            self._budget.give_back(self._tenant, self.amount - amount)
            self.amount = amount

    def release(self) -> None:
        """Hold nothing from now on."""
        self.set(0)

    def __enter__(self) -> "Charge":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Budget:
    """Slots or bytes of one gateway, shared among tenants."""

    def __init__(self, metrics: Metrics, total: int, refusal: Refusal, unit: str = "bytes") -> None:
        """refusal: the quota of that name bounds a tenant's part."""
        self._metrics = metrics
        self._total = total
        self._refusal = refusal
        self._quota_name = refusal.value
        self._unit = unit
        self.num_taken = 0
        self._taken: Counter[str] = Counter()  # by the tenant's name; none of 0

    def charge(self, tenant: str, quotas: Quotas, *, is_counted: bool = True) -> Charge:
        """Return an empty charge, for a `with`. is_counted: False when a Permit counts the refusal."""
        return Charge(self, tenant, getattr(quotas, self._quota_name), is_counted=is_counted)

    def take(self, tenant: str, amount: int, quota: int | None, *, is_counted: bool) -> None:
        """See Charge.add."""
        num_own, num_free = self._taken[tenant], self._total - self.num_taken
        refused: Overloaded | None = None
        if quota is not None and num_own + amount > quota:
            refused = Refused(
                f"{quota} {self._unit} at once, {num_own} are taken and {amount} more are needed",
                refusal=self._refusal,
                retry_after_s=FULL_RETRY_S if amount <= quota else 0.0,
            )
        elif not has_slots(tenant, amount, num_own, num_free):
            refused = Overloaded(
                f"its tenant has {num_own} of this gateway's {self._total} {self._unit}, "
                f"{num_free} are free, {amount} are needed ({self._refusal.value})",
                retry_after_s=FULL_RETRY_S,
            )
        if refused is not None:
            if is_counted:
                refusal = refused.refusal if isinstance(refused, Refused) else Refusal.NO_ROOM
                self._metrics.tenant(tenant).calls[refusal.value] += 1
            raise refused
        self.num_taken += amount
        self._taken[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Release an amount of a charge."""
        self.num_taken -= amount
        self._taken[tenant] -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]


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
