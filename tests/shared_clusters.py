"""Served clusters that the tests of several files ask: the files run one after another in one process."""

from contextlib import ExitStack
from typing import Final

from tests.served import SERVE, Served, served

# These files of tests/e2e share clusters, so pytest-xdist keeps their tests on one process.
FILES: Final = frozenset(
    f"tests/e2e/test_{name}.py"
    for name in [
        "gateway_loss",
        "health",
        "http_failover",
        "http_messages",
        "http_openai",
        "http_responses",
        "lora",
        "nginx",
    ]
)
TRANSFORMERS: Final = "transformers"  # a group: one process loads it, for seconds, and saves each model once
WITH_TRANSFORMERS: Final = ("tests/parity/", "tests/unit/engine/models/", "tests/unit/bench/test_tiny")


def group_of(nodeid: str) -> str:
    """Return the group of a test: its file, or the group of several files."""
    file = nodeid.partition("::")[0]
    if file.startswith(WITH_TRANSFORMERS):
        return TRANSFORMERS
    return "shared clusters" if file in FILES else file


class SharedClusters:
    """Clusters by their options and variables; each starts when it is first wanted and runs until `close`."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._clusters: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], Served] = {}

    def get(self, *options: str, **environment: str) -> Served:
        """Return the cluster of these options of `baton serve`, after those of SERVE, and these variables."""
        key = options, frozenset(environment.items())
        if key not in self._clusters:
            self._clusters[key] = self._ends.enter_context(served(*SERVE, *options, **environment))
        return self._clusters[key]

    def close(self) -> None:
        """End all clusters."""
        self._clusters.clear()
        self._ends.close()
