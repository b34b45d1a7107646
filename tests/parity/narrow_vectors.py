"""Prints an engine's answers, with the C kernels compiled for narrower vectors than the CPU has.

    python -m tests.parity.narrow_vectors DIRECTORY SETTINGS [FLAG ...]

SETTINGS: of the engine, JSON. FLAG: of the compiler, beside the usual ones.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import msgspec

from baton.kernels import native
from tests.parity.runs import GREEDY, SEEDED, engine, prompts, run


def main(directory: Path, settings: str, *flags: str) -> None:
    with (
        patch.object(native, "FLAGS", (*native.FLAGS, *flags)),
        engine(directory, **json.loads(settings)) as made,
    ):
        answers = run(made, prompts(), GREEDY), run(made, prompts(1), SEEDED)
    print(msgspec.json.encode(answers).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
