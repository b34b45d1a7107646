"""Which reader finds the calls of tools in a choice."""

from baton.gateway.hermes_calls import HermesCalls
from baton.gateway.llama_calls import LlamaCalls
from baton.gateway.tool_forms import FoundCalls, ToolCallReader, ToolForm


def reader_of(form: ToolForm, *, is_parallel: bool) -> ToolCallReader:
    calls = FoundCalls(is_parallel=is_parallel)
    return HermesCalls(calls) if form == "hermes" else LlamaCalls(calls)
