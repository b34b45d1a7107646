"""Orders to sleep and wake: numbered, repeated by their givers, kept by routers, followed by workers.

1. The gateway or the command that receives an order numbers it (`numbered`), and sends it to every router.
2. A router passes it on to the workers of the model, unless a later order holds. It keeps the latest order of
   each model and gives it to workers that join.
3. A worker drains and falls asleep, or wakes, and joins again. It describes the order that it follows, so a
   router that starts learns the orders from its workers (`followed_order`).
4. The giver repeats the order until all workers have followed (`not_followed`), or until a later order to do
   the opposite holds (`is_superseded`).
"""

from collections.abc import Collection, Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.messages.bounds import Count, Message, Name
from baton.messages.workers import Worker

OrderT = TypeVar("OrderT", bound="ModelOrder")


class ModelOrder(Message, frozen=True):
    """Operator or gateway to every router, router to the workers of the model.

    The order with the highest number holds: routers and workers ignore earlier ones, and repeated ones change
    nothing. A router answers operators with its Status, as for Drain.
    """

    model: Name = ""  # "": the model of a cluster that has one
    number: Count = 0  # a later order has a higher one: microseconds since 1970, see `numbered`

    @property
    def precedence(self) -> tuple[int, bool]:
        """Sort key: the order with the highest precedence holds.

        Of two orders with one number, the order to sleep holds.
        """
        return self.number, isinstance(self, Sleep)


class Sleep(ModelOrder, frozen=True):
    """Drain, then give the memory back.

    The worker joins again under another id (`Worker.is_asleep`), with no weights and no pages. A worker that
    sleeps already does nothing.
    """

    # 1: a worker with a GPU keeps the weights in host memory; 2: no weights are kept. Without a GPU both
    # levels are the same.
    level: Annotated[int, Meta(ge=1, le=2)] = 1


class Wake(ModelOrder, frozen=True):
    """Load the model and serve again.

    A worker that is about to sleep wakes as soon as it sleeps. A worker that serves does nothing.
    """


def numbered(order: OrderT, orders: Iterable[Sleep | Wake], date_s: float | None = None) -> OrderT:
    """Return a new order with its number, which is higher than those of `orders`.

    date_s: seconds since 1970; None: the lowest number that is higher than those of `orders`.
    """
    number = max((1 + each.number for each in orders), default=0)
    if date_s is not None:
        number = max(number, round(1e6 * date_s))
    return msgspec.structs.replace(order, number=number)


def latest_order(orders: Iterable[Sleep | Wake], model: str) -> Sleep | Wake | None:
    """Return the order that holds for a model; None without any. model: as in `Worker.serves`."""
    found = (each for each in orders if not model or each.model in ("", model))
    return max(found, key=lambda each: each.precedence, default=None)


def is_superseded(order: Sleep | Wake, orders: Iterable[Sleep | Wake]) -> bool:
    """Return whether a later order, to do the opposite, holds for the model."""
    latest = latest_order(orders, order.model)
    return latest is not None and latest.precedence > order.precedence and type(latest) is not type(order)


def not_followed(
    order: Sleep | Wake, names: Iterable[str], workers: Iterable[Worker], draining: Collection[str]
) -> frozenset[str]:
    """Return the names of which no worker, or not every worker, has followed the order.

    A worker that falls asleep, or wakes, joins again: for a moment it may be listed twice.
    workers: of the model. draining: the ids of those that drain.
    """
    following, others = set[str](), set[str]()
    for worker in workers:
        (following if _has_followed(order, worker, draining) else others).add(worker.name)
    return frozenset(names) - (following - others)


def _has_followed(order: Sleep | Wake, worker: Worker, draining: Collection[str]) -> bool:
    """Return whether the worker sleeps; or serves, and is not about to sleep."""
    if isinstance(order, Sleep):
        return worker.is_asleep
    return not worker.is_asleep and worker.id not in draining


def followed_order(worker: Worker) -> Sleep | Wake:
    """Return the latest order that a worker has followed; number 0: none yet."""
    if worker.is_asleep:
        return Sleep(model=worker.model, number=worker.order_number, level=worker.sleep_level or 1)
    return Wake(model=worker.model, number=worker.order_number)


class FollowedOrders:
    """The orders that a worker receives in one life. `latest`: the order that holds."""

    def __init__(self, worker: Worker | None) -> None:
        """worker: as its process describes itself."""
        assert worker is not None, "a worker describes itself"
        self.latest = followed_order(worker)

    @property
    def is_to_wake(self) -> bool:
        """True when the latest order is to wake, or no order was given."""
        return isinstance(self.latest, Wake)

    def take(self, order: Sleep | Wake) -> bool:
        """Keep an order; return False when it is known or a later one holds."""
        if order.precedence <= self.latest.precedence:
            return False
        self.latest = order
        return True
