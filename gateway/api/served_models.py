"""The models that a gateway serves, by name: the reader of each model's bodies, its workers, its adapters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton.adapters import NamedAdapter
from baton.gateway.api.body import early_text
from baton.gateway.api.body_reader import BodyReader
from baton.gateway.api.prompt_reader import ReadPolicy
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Worker, WorkerRole, are_asleep
from baton.request import SamplingParams


class ModelView(NamedTuple):
    """The workers of one model."""

    workers: Sequence[Worker]
    is_asleep: bool  # all decode workers of the model sleep
    # The shortest context length of the workers, so that any worker may be chosen. Without workers the last
    # known length holds: a restarted worker takes as many tokens.
    max_model_len: int | None


class OpenOrder(msgspec.Struct, frozen=True):
    """An operator's order that not all workers of a model have followed."""

    order: Sleep | Wake
    workers: frozenset[str]  # names; one that falls asleep, or wakes, is absent for a while


class ServedModel(msgspec.Struct, kw_only=True):
    """A model that a gateway serves: its name, the reader of its bodies, its limits."""

    name: str
    key: str = ""  # `Request.model` of its requests: its name, or "" where the gateway serves one model
    open_order: OpenOrder | None = None  # the latest of this gateway
    bodies: BodyReader
    service: Service
    created_s: int  # start of serving, in seconds since 1970
    defaults: SamplingParams = SamplingParams(max_tokens=None)  # max_tokens caps every answer
    adapters: dict[str, NamedAdapter] = msgspec.field(default_factory=dict)  # by name
    _viewed: Sequence[Worker] | None = None  # the workers of the service that `_view` was made of
    _view: ModelView = ModelView((), is_asleep=False, max_model_len=None)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights; several while workers are being replaced."""
        return " ".join(sorted({worker.fingerprint for worker in self.view.workers}))

    @property
    def view(self) -> ModelView:
        """The workers of the model.

        The view is cached until the list of workers changes: each call asks several times, and there may be a
        thousand workers.
        """
        listed = self.service.workers
        if listed is not self._viewed:
            workers = [worker for worker in listed if worker.serves(self.key)]
            length = min((each.max_model_len for each in workers), default=self._view.max_model_len)
            self._view = ModelView(workers, are_asleep(listed, self.key), length)
            self._viewed = listed
        return self._view

    @property
    def orders(self) -> list[Sleep | Wake]:
        """The orders that this gateway has given, or has heard of from the routers."""
        status = self.service.status
        own = () if self.open_order is None else (self.open_order.order,)
        return [*own, *(() if status is None else status.orders)]

    @property
    def is_changing(self) -> bool:
        """True while the model falls asleep, sleeps or wakes by order: no decode worker takes requests."""
        workers, draining = self.view.workers, self.service.draining
        awake = [each for each in workers if not each.is_asleep and each.id not in draining]
        takes_requests = any(each.role is WorkerRole.DECODE for each in awake)
        return self.open_order is not None or (not takes_requests and any(each.is_asleep for each in workers))

    def read_policy(
        self,
        tenant: Tenant,
        *,
        is_strict: bool = False,
        may_store: bool = False,
    ) -> ReadPolicy:
        """Return the limits for a body of the tenant. may_store: responses are stored."""
        return ReadPolicy(
            model=self.name,
            may_use=tenant.may_use(self.name),
            adapters={name: tenant.may_use(name) for name in self.adapters},
            max_model_len=self.view.max_model_len,
            is_strict=is_strict,
            may_store=may_store,
            defaults=self.defaults,
        )


class ServedModels:
    """The models that a gateway serves, by name. A request that names no model gets the first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self.first = models[0]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def names(self) -> list[str]:
        """The names of the models, the first model's first."""
        return list(self._models)

    def find(self, name: str) -> ServedModel | None:
        """Return the model of this name, or with an adapter of this name."""
        return self._models.get(name) or next((each for each in self if name in each.adapters), None)

    def of(self, name: str | None) -> ServedModel:
        """Return the model of this name.

        None and an unknown name give the first model; its policy refuses unknown names.
        """
        return (None if name is None else self.find(name)) or self.first

    def of_body(self, data: bytes) -> ServedModel:
        """Return the model that a body names."""
        return self.first if len(self._models) == 1 else self.of(early_text(data, "model"))
