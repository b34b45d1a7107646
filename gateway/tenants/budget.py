"""Slots and bytes of one gateway, which its tenants share: one tenant cannot take all
(`baton.tenants.has_slots`).
"""

from collections import Counter
from typing import Final

from baton.errors import Overloaded, Refused
from baton.gateway.metrics.metrics import Metrics
from baton.tenants import Quotas, Refusal, has_slots

FULL_RETRY_S: Final = 1.0  # the end of a call cannot be predicted


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
