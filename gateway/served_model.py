"""The model that a gateway serves: its name, its text, its limits."""

import msgspec

from baton.errors import InvalidRequest
from baton.gateway.api_errors import ApiError
from baton.gateway.service import Service
from baton.gateway.tenants import Tenant
from baton.gateway.text_work import TextWork

NO_WORKERS_RETRY_S = 2.0


class ServedModel(msgspec.Struct, kw_only=True):
    name: str
    text: TextWork
    service: Service
    created_s: int  # when it began to be served, by the calendar
    known_length: int | None = None  # tokens that workers took when there last were any

    def check(self, asked_for: str | None, tenant: Tenant) -> str:
        """The model's name; None asks for whatever there is. Raises ApiError 404 and 403."""
        if asked_for is not None and asked_for != self.name:
            message = f"the model {asked_for[:80]!r} does not exist; {self.name!r} does"
            raise ApiError(404, message, code="model_not_found", param="model")
        if not tenant.may_use(self.name):
            raise ApiError(403, f"this key may not use the model {self.name!r}", code="model_forbidden")
        return self.name

    @property
    def fingerprint(self) -> str:
        """Of the weights, as the workers say; of all, while workers are replaced by others."""
        return " ".join(sorted({worker.fingerprint for worker in self.service.workers}))

    @property
    def max_model_len(self) -> int:
        """Of the worker that takes the fewest tokens, so that any may be chosen.

        Where all are away, as it was: whoever is started again takes as many. Raises ApiError 503 where there
        has never been one.
        """
        self.known_length = min(
            (worker.max_model_len for worker in self.service.workers), default=self.known_length
        )
        if self.known_length is None:
            message = "no worker has been there yet: the cluster is being started"
            raise ApiError(503, message, code="no_worker", retry_after_s=NO_WORKERS_RETRY_S)
        return self.known_length

    def check_length(self, num_tokens: int) -> None:
        """Raises ApiError, or InvalidRequest, for a prompt that the model cannot take."""
        longest = self.max_model_len
        if not num_tokens:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if num_tokens >= longest:
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens; the model takes {longest}, one of them for the answer",
                code="context_length_exceeded",
                param="prompt",
            )
