"""Files of tests that pytest-xdist keeps on one process. Every pytest process imports this at its start."""

from typing import Final

# These files of tests/e2e share clusters (tests/shared_clusters.py).
CLUSTER_FILES: Final = frozenset(
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
    return "shared clusters" if file in CLUSTER_FILES else file
