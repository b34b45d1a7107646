"""Which reader finds the calls of tools in a choice."""

from collections.abc import Callable

from baton.gateway.hermes_calls import HermesCalls
from baton.gateway.llama_calls import LlamaCalls
from baton.gateway.tool_forms import FoundCalls, ToolCallReader, ToolForm


def reader_of(form: ToolForm, *, is_parallel: bool, new_id: Callable[[], str]) -> ToolCallReader:
    calls = FoundCalls(is_parallel=is_parallel, new_id=new_id)
    return HermesCalls(calls) if form == "hermes" else LlamaCalls(calls)
