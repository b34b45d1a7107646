"""A program for tests of cluster/template.py. It prints its Facts, reads a status and ends with it."""

import os
import random
import signal
import sys
from functools import partial
from typing import Any, Final

import msgspec

DIES: Final = "die at a fork"
HANGS: Final = "hang"
HAS_TORCH: Final = "import torch"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a process reports about itself: ids, arguments, environment, descriptors."""

    pid: int
    parent: int
    group: int
    descriptors: list[int]
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    handlers: dict[str, str]
    num_threads: int
    uses_gpu: bool
    random: float


def facts() -> Facts:
    torch: Any = sys.modules.get("torch")
    folder = os.open("/proc/self/fd", os.O_RDONLY)
    descriptors = sorted(map(int, os.listdir(folder)))
    os.close(folder)
    return Facts(
        pid=os.getpid(),
        parent=os.getppid(),
        group=os.getpgid(0),
        descriptors=[each for each in descriptors if each != folder],
        arguments=sys.argv[1:],
        environment={name: ascii(value) for name, value in os.environ.items()},
        folder=os.getcwd(),
        handlers={each.name: str(signal.getsignal(each)) for each in signal.Signals},
        num_threads=torch.get_num_threads() if torch else 0,
        uses_gpu=torch is not None and torch.cuda.is_initialized(),
        random=random.random(),
    )


def end_at_fork(template: int) -> None:
    if os.getpid() == template:
        os.kill(template, signal.SIGKILL)


if DIES in sys.argv:  # in the template, which imports this module
    os.register_at_fork(after_in_parent=partial(end_at_fork, os.getpid()))
if HAS_TORCH in sys.argv:
    import torch  # noqa: F401
if HANGS in sys.argv:
    signal.pause()


def main() -> int:
    print(msgspec.json.encode(facts()).decode(), flush=True)
    return int(sys.stdin.readline())


if __name__ == "__main__":
    sys.exit(main())
