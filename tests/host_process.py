"""A host of endpoint_host.py in a process of its own, whose methods are called from the test's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

from baton.errors import TransferFailed

ROOT: Final = Path(__file__).resolve().parents[1]


class HostProcess:
    """A host in a process of its own."""

    def __init__(self, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.endpoint_host", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def call(self, name: str, *arguments: object) -> Any:
        """Raises TransferFailed with what the host raised."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise TransferFailed(answer["error"])
        return answer["result"]
