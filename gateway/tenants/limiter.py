"""Admits each call of a tenant or refuses it, and counts it to its end.

Quotas hold for the whole cluster, and the router keeps them. One gateway has no more open than the cluster: a
call over the quota here is over the quota everywhere, and the router need not be asked.

A gateway has places for a number of choices. One tenant cannot take all places (`baton.tenants.has_slots`).
The same holds for bytes of memory: of bodies and prompts, charged as they come and before they are parsed,
and of answers that are kept until they are whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from baton.errors import Overloaded, Refused
from baton.gateway.api.call import Call
from baton.gateway.api.errors import invalid
from baton.gateway.metrics.metrics import Metrics, TenantCounts
from baton.tenants import Quotas, Refusal, has_slots

FULL_RETRY_S: Final = 1.0  # the end of a call cannot be predicted


class Permit:
    """The admission of one call: report each batch of `tokens`, then `leave` once."""

    __slots__ = ("_call", "_counts", "_first_s", "_last_s", "_left", "_num_choices", "_num_tokens")

    def __init__(self, call: Call, counts: TenantCounts, left: Callable[[], None]) -> None:
        """left: called when the call ends."""
        self._call = call
        self._counts = counts
        self._left = left
        self._num_choices = call.num_answers
        self._num_tokens = 0
        self._first_s: float | None = None
        self._last_s = 0.0
        counts.num_open += self._num_choices
        counts.prompt_tokens += call.num_prompt_tokens

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """Count a batch of tokens."""
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s
        self._num_tokens += num_tokens
        self._counts.generated_tokens += num_tokens

    def leave(self, outcome: str) -> None:
        """Count the end. outcome: a key of TenantCounts.calls."""
        counts = self._counts
        counts.num_open -= self._num_choices
        counts.calls[outcome] += 1
        for objective, is_met in self._verdicts(is_over=outcome != "gone"):
            (counts.met if is_met else counts.missed)[objective] += 1
        self._left()

    def _verdicts(self, *, is_over: bool) -> Iterator[tuple[str, bool]]:
        """Yield each objective of the call that was met or missed; a client that left early missed none."""
        sla, first_s = self._call.sla, self._first_s
        if first_s is not None or is_over:
            ttft_ms = (first_s - self._call.arrival_s) * 1000 if first_s is not None else float("inf")
            for objective, limit_ms in (("ttft", sla.ttft_ms), ("deadline", sla.deadline_ms)):
                if limit_ms is not None:
                    yield objective, ttft_ms <= limit_ms
        num_later = self._num_tokens - self._num_choices
        if sla.tpot_ms is not None and first_s is not None and num_later > 0:
            tpot_ms = (self._last_s - first_s) * 1000 * self._num_choices / num_later
            yield "tpot", tpot_ms <= sla.tpot_ms


class TextCharge:
    """The bytes of a Budget that one call holds, until its `with` ends."""

    __slots__ = ("_budget", "_is_counted", "_quota", "_tenant", "num_bytes")

    def __init__(self, budget: "Budget", tenant: str, quota: int | None, *, is_counted: bool) -> None:
        self._budget = budget
        self._is_counted = is_counted
        self._tenant = tenant
        self._quota = quota
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Hold more bytes. Raises Refused for the tenant's quota, Overloaded when no room is left."""
        try:
            self._budget.take(self._tenant, num_bytes, self._quota)
        except (Refused, Overloaded) as error:
            if self._is_counted:
                self._budget.count(self._tenant, error)
            raise
        self.num_bytes += num_bytes

    def set(self, num_bytes: int) -> None:
        """Hold this many bytes from now on. Raises the errors of `add`."""
        if num_bytes > self.num_bytes:
            self.add(num_bytes - self.num_bytes)
        else:
            self._budget.give_back(self._tenant, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing from now on."""
        self.set(0)

    def __enter__(self) -> "TextCharge":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Budget:
    """Bytes of a gateway's memory, which tenants share as they share places."""

    def __init__(self, metrics: Metrics, num_bytes: int, refusal: Refusal) -> None:
        """refusal: the quota of that name bounds a tenant's part."""
        self._metrics = metrics
        self._num_bytes = num_bytes
        self._refusal = refusal
        self._quota = refusal.value
        self.num_taken = 0
        self._taken: Counter[str] = Counter()  # by the tenant's name; none of 0

    def charge(self, tenant: str, quotas: Quotas, *, is_counted: bool = True) -> TextCharge:
        """Return an empty charge, for a `with`. is_counted: False when a Permit counts the refusal."""
        return TextCharge(self, tenant, getattr(quotas, self._quota), is_counted=is_counted)

    def take(self, tenant: str, num_bytes: int, quota: int | None) -> None:
        """See TextCharge.add."""
        num_own, num_free = self._taken[tenant], self._num_bytes - self.num_taken
        if quota is not None and num_own + num_bytes > quota:
            raise Refused(
                f"{quota} bytes at once, {num_own} are taken and {num_bytes} more are needed",
                refusal=self._refusal,
                retry_after_s=FULL_RETRY_S if num_bytes <= quota else 0.0,
            )
        if not has_slots(tenant, num_bytes, num_own, num_free):
            raise Overloaded(
                f"{self._refusal.value}: its tenant has {num_own} of this gateway's {self._num_bytes} bytes, "
                f"{num_free} are free, {num_bytes} are needed",
                retry_after_s=FULL_RETRY_S,
            )
        self.num_taken += num_bytes
        self._taken[tenant] += num_bytes

    def count(self, tenant: str, error: Refused | Overloaded) -> None:
        """Count a call that was refused."""
        refusal = error.refusal if isinstance(error, Refused) else Refusal.NO_ROOM
        self._metrics.tenant(tenant).calls[refusal.value] += 1

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Release bytes of a charge."""
        self.num_taken -= num_bytes
        self._taken[tenant] -= num_bytes
        if not self._taken[tenant]:
            del self._taken[tenant]


class Limiter:
    """The places and the bytes of one gateway."""

    def __init__(
        self,
        metrics: Metrics,
        num_places: int,
        *,
        max_input_bytes: int = 2**50,
        max_answer_bytes: int = 2**50,
    ) -> None:
        """num_places: of choices that are answered at once. For the bytes see GatewayConfig."""
        self.inputs = Budget(metrics, max_input_bytes, Refusal.MAX_INPUT_BYTES)
        self.answers = Budget(metrics, max_answer_bytes, Refusal.MAX_ANSWER_BYTES)
        self._metrics = metrics
        self._num_places = num_places
        self._num_taken = 0
        self._num_open: Counter[str] = Counter()  # choices, by the tenant's name; none of 0

    def enter(self, call: Call) -> Permit:
        """Admit a call.

        Raises Refused for a quota, Overloaded when no place is free, and ApiError 400 for a call that the
        tenant's quota never admits.
        """
        name, num_choices = call.tenant.name, call.num_answers
        counts = self._metrics.tenant(name)
        self._check_quota(call, num_choices, counts)
        self._check_places(name, num_choices, counts)
        self._num_open[name] += num_choices
        self._num_taken += num_choices

        def left() -> None:
            self._num_taken -= num_choices
            self._num_open[name] -= num_choices
            if not self._num_open[name]:
                del self._num_open[name]

        return Permit(call, counts, left)

    def _check_quota(self, call: Call, num_choices: int, counts: TenantCounts) -> None:
        most = call.scheduling_key.quotas.max_concurrent_requests
        if most is None:
            return
        if num_choices > most:
            raise invalid(f"n: the call has {num_choices} answers, its tenant may have {most} at once")
        if self._num_open[call.tenant.name] + num_choices > most:
            counts.calls[Refusal.MAX_CONCURRENT_REQUESTS.value] += 1
            raise Refused(
                f"{most} at most",
                refusal=Refusal.MAX_CONCURRENT_REQUESTS,
                retry_after_s=FULL_RETRY_S,
            )

    def _check_places(self, tenant: str, num_choices: int, counts: TenantCounts) -> None:
        num_own, num_free = self._num_open[tenant], self._num_places - self._num_taken
        if not has_slots(tenant, num_choices, num_own, num_free):
            counts.calls[Refusal.NO_ROOM.value] += 1
            raise Overloaded(
                f"its tenant has {num_own} of this gateway's {self._num_places} places, {num_free} are free",
                retry_after_s=FULL_RETRY_S,
            )

    def num_open(self, tenant: str) -> int:
        """Return the tenant's choices that are being answered."""
        return self._num_open.get(tenant, 0)
