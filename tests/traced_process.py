"""A process of a cluster that records which modules run: `python -m tests.traced_process FOLDER`.

Otherwise it is `python -m baton.cluster.process`. It records while FOLDER/record exists. When that file is
gone it writes the modules, one a line, to FOLDER/<process name>.modules.
"""

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

from baton.cluster import process
from baton.cluster.runtimes.base import Assignment
from baton.rpc.auth import KeyRing

ROOT: Final = Path(__file__).resolve().parents[1]
LOOK_S: Final = 0.02


class Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_on = False
        self._files: set[str] = set()

    def install(self) -> None:
        """Record the calls of this thread, and of every thread that starts later."""
        threading.Thread(target=self._watch, name="recorder", daemon=True).start()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_on and event == "call":
            self._files.add(frame.f_code.co_filename)

    def _watch(self) -> None:
        name = ""
        while True:
            time.sleep(LOOK_S)
            name = name or process_name
            is_on = (self._folder / "record").exists()
            if self._is_on and not is_on:
                self._is_on = False
                partial = self._folder / f"{name}.partial"
                partial.write_text("\n".join(sorted(modules_of(self._files))))
                partial.rename(self._folder / f"{name}.modules")
                self._files.clear()
            self._is_on = is_on


process_name = ""


def modules_of(files: set[str]) -> set[str]:
    """Paths of Baton's modules among these files, relative to the repository, such as `router/router.py`."""
    paths = {Path(file).resolve() for file in files if not file.startswith("<")}
    inside = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)}
    return {str(path) for path in inside if path.parts[0] not in {"tests", ".venv"}}


def main() -> int:
    def run_named(given: Assignment, ring: KeyRing, stop: threading.Event, tell: process.Tell) -> None:
        global process_name
        process_name = given.name
        process.run(given, ring, stop, tell)

    Recorder(Path(sys.argv[1])).install()
    return process.main(run_named)


if __name__ == "__main__":
    sys.exit(main())
