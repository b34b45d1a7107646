"""The model that a gateway serves: its name, its text, its limits."""

import msgspec

from baton.gateway.model_files import SamplingDefaults
from baton.gateway.prompt_reader import ReadTerms
from baton.gateway.service import Service
from baton.gateway.tenants import Tenant
from baton.gateway.text_work import TextWork


class ServedModel(msgspec.Struct, kw_only=True):
    name: str
    text: TextWork
    service: Service
    created_s: int  # when it began to be served, by the calendar
    defaults: SamplingDefaults = SamplingDefaults()  # of sampling, for requests that give none
    known_length: int | None = None  # tokens that workers took when there last were any

    def terms(self, tenant: Tenant, *, is_strict: bool = False) -> ReadTerms:
        """What a body of the tenant is checked against."""
        return ReadTerms(
            model=self.name,
            may_use=tenant.may_use(self.name),
            max_model_len=self.find_length(),
            is_strict=is_strict,
        )

    @property
    def fingerprint(self) -> str:
        """Of the weights, as the workers say; of all, while workers are replaced by others."""
        return " ".join(sorted({worker.fingerprint for worker in self.service.workers}))

    def check(self, asked_for: str | None, tenant: Tenant) -> None:
        """None asks for whatever there is. Raises ApiError 404 and 403."""
        self.terms(tenant).check_model(asked_for)

    def find_length(self) -> int | None:
        """Tokens that the worker takes which takes the fewest, so that any may be chosen.

        Where all are away, as it was: whoever is started again takes as many. None where there has never been
        one.
        """
        self.known_length = min(
            (worker.max_model_len for worker in self.service.workers), default=self.known_length
        )
        return self.known_length
