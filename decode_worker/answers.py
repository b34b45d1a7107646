"""Attempts that the engine works on: what it makes for them is said to their gateways."""

from typing import NamedTuple

from baton.colleagues import Colleagues
from baton.control import Failure
from baton.control_wire import TOO_LARGE, fits
from baton.decode_worker.attempt import Attempt, Stage
from baton.decode_worker.reports import Reports
from baton.engine.replica import Replica
from baton.request import FinishReason, StepOutput
from baton.token_event import TokenEvent


class Ending(NamedTuple):
    """An attempt that has had its last token, or has failed: then nobody has been told yet."""

    attempt: Attempt
    failure: Failure | None = None
    reason: str = ""


class Answers:
    def __init__(self, engine: Replica, colleagues: Colleagues, reports: Reports) -> None:
        self.num_tokens = 0  # said in all
        self._engine = engine
        self._colleagues = colleagues
        self._reports = reports
        self._attempts: dict[str, Attempt] = {}  # by their names in the engine

    def begin(self, attempt: Attempt) -> None:
        """Go on with all the KV that it has. InvalidRequest, and it keeps what it has, when it cannot run."""
        (progress,) = self._engine.add(attempt.engine_request, attempt.filled)
        self._reports.begun(attempt, progress)
        attempt.stage, attempt.filled = Stage.RUNNING, None
        self._attempts[attempt.engine_id] = attempt

    def abort(self, attempt: Attempt) -> None:
        self._engine.abort(attempt.engine_id)
        self._attempts.pop(attempt.engine_id, None)

    def step(self) -> list[Ending]:
        """Have the engine make a step, if there is work; those that it ends."""
        if not self._engine.has_work():
            return []
        self._reports.step_begins()
        endings = [self._say(output) for output in self._engine.step()]
        self._reports.step_ended(self._engine)
        return [ending for ending in endings if ending is not None]

    def _say(self, output: StepOutput) -> Ending | None:
        attempt = self._attempts[output.request_id]
        event = TokenEvent.of(attempt.request, output, output.finish_reason)
        if output.finish_reason is FinishReason.ERROR:
            return Ending(attempt, Failure.ERROR, "the model's output for it could not be sampled")
        if not fits(event):
            return Ending(attempt, Failure.INVALID, TOO_LARGE)
        self.num_tokens += output.token_id is not None
        self._reports.said(attempt, output)
        self._colleagues.emit(attempt.gateway, event)
        return None if output.finish_reason is None else Ending(attempt)
