"""Served clusters that the tests of several files ask: the files run one after another in one process."""

from contextlib import ExitStack

from tests.served import SERVE, Served, served


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
