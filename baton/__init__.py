"""Baton serves large language models with prefill and decode on different workers.

`LLM`, `SamplingParams` and `StructuredOutputs` are the offline API. Importing `baton` imports neither torch
nor Ray: the names are resolved on first use.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from baton.cluster.offline.llm import LLM as LLM
    from baton.request import SamplingParams as SamplingParams
    from baton.request import StructuredOutputs as StructuredOutputs

    __version__: str

DISTRIBUTION: Final = "baton-serve"  # on PyPI, `baton` is another project


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from baton.cluster.offline.llm import LLM

        return LLM
    if name in ("SamplingParams", "StructuredOutputs"):
        from baton import request

        return getattr(request, name)
    if name == "__version__":
        # Importing this takes 30 ms, which would be a third of the start of a small process.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(DISTRIBUTION)
        except PackageNotFoundError:  # a checkout on the path, as on a GPU machine where nothing is installed
            return "0"
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
