"""Which reader finds the calls of tools in a choice."""

from typing import Final

from baton.gateway.hermes_calls import HermesCalls
from baton.gateway.llama_calls import LlamaCalls
from baton.gateway.tool_forms import FoundCalls, ToolCallReader, ToolForm

_READERS: Final = {"hermes": HermesCalls, "llama": LlamaCalls}


def reader_of(form: ToolForm, *, is_parallel: bool) -> ToolCallReader:
    reader: ToolCallReader = _READERS[form](FoundCalls(is_parallel=is_parallel))
    return reader
