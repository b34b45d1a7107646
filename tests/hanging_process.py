"""A process whose worker hangs in a native call on request: `python -m tests.hanging_process FOLDER`.

When FOLDER has a file with a worker's name, that worker's engine sleeps in libc in its next step, without the
interpreter's lock, as in a driver that never answers. The worker removes the file first, so that its
successor does not hang.
"""

import ctypes
import sys
import threading
from pathlib import Path

from baton.cluster import process, worker_process


def hang_on_request(folder: Path) -> None:
    """Make workers of this process check for their file before each step."""
    serve = worker_process.HostedWorker.serve
    libc = ctypes.CDLL(None)

    def serve_until_it_hangs(self: worker_process.HostedWorker, stop: threading.Event) -> None:
        file, on_batch = folder / self._config.name, self.engine.on_batch

        def begin(num_tokens: int) -> None:
            on_batch(num_tokens)
            if file.exists():
                file.unlink()
                libc.sleep(3600)

        self.engine.on_batch = begin
        serve(self, stop)

    worker_process.HostedWorker.serve = serve_until_it_hangs  # type: ignore[method-assign]


def main() -> int:
    hang_on_request(Path(sys.argv[1]))
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
