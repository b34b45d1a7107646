"""Orders about workers of a running cluster.

`scale`, `drain`, `undrain`, `restart`, `flip`, `migrate`, and `sleep` and `wake` of all workers of a model.
"""

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from baton.cluster.cli import output
from baton.cluster.cli.connections import add_router_options, ask
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.operator_node import Operator
from baton.errors import ConfigError, PeerGone, WorkerLost
from baton.messages.bounds import MAX_WORKERS, request_id_in
from baton.messages.operations import Status
from baton.messages.orders import Sleep, Wake, is_superseded, not_followed
from baton.messages.workers import Worker, WorkerRole

LOOK_EVERY_S: Final = 0.2
REPEAT_S: Final = 0.5  # between two orders to sleep or to wake
UNREACHED_S: Final = 15.0  # without an answer of any router
MAX_OF_ROLE: Final = MAX_WORKERS // 2
AnswerT = TypeVar("AnswerT")


def _drain(arguments: argparse.Namespace) -> None:
    ask(arguments, lambda operator: operator.drain(arguments.worker, may_be_last=arguments.force))
    output.write(f"{arguments.worker} drains; `baton status` shows it until it has ended\n")


def _undrain(arguments: argparse.Namespace) -> None:
    async def undrain(operator: Operator) -> None:
        await operator.undrain(arguments.worker)
        await _until_it_serves(operator, arguments.worker, arguments.wait)

    ask(arguments, undrain)
    output.write(f"{arguments.worker} serves again\n")


def _restart(arguments: argparse.Namespace) -> None:
    async def restart(operator: Operator) -> str:
        former = _find(await operator.status(), arguments.worker)
        name, former_id = (arguments.worker, "") if former is None else (former.name, former.id)
        await operator.restart(name)
        await _until_it_serves(operator, name, arguments.wait, former_id)
        return name

    output.write(f"{ask(arguments, restart)} serves again\n")


def _flip(arguments: argparse.Namespace) -> None:
    role = WorkerRole(arguments.role)

    async def flip(operator: Operator) -> None:
        former = _find(await operator.status(), arguments.worker)
        await operator.flip(arguments.worker, role, may_be_last=arguments.force)
        if former is not None:
            await _until_it_serves(operator, former.name, arguments.wait, former.id)

    ask(arguments, flip)
    output.write(f"{arguments.worker} is a {role} worker now\n")


def _scale(arguments: argparse.Namespace) -> None:
    found = re.fullmatch(r"(\d{1,9})P(\d{1,9})D", arguments.layout, re.IGNORECASE)
    num_prefill, num_decode = map(int, found.groups()) if found else (0, 0)
    if not num_decode or max(num_prefill, num_decode) > MAX_OF_ROLE:
        raise ConfigError(
            f"layout: expected such as 2P3D, with one decode worker or more and at most {MAX_OF_ROLE:,} "
            f"workers of a role, got {arguments.layout!r}"
        )
    wanted = {WorkerRole.PREFILL: num_prefill, WorkerRole.DECODE: num_decode}

    async def scale(operator: Operator) -> None:
        await operator.scale(num_prefill, num_decode, arguments.model)
        late = f"the workers are not there after {arguments.wait:g} s: see the log of `baton serve`"
        await _until(operator, arguments.wait, lambda status: _has(status, wanted, arguments.model), late)

    ask(arguments, scale)
    output.write(f"{num_prefill}P{num_decode}D serves\n")


def _has(status: Status, wanted: Mapping[WorkerRole, int], model: str) -> bool:
    """Return whether the model, or the only one, has so many workers of each role, and all are ready."""
    num = Counter(each.worker.role for each in status.workers if each.worker.serves(model))
    has_all = all(num[role] == most for role, most in wanted.items())
    return has_all and status.num_ready == len(status.workers)


def _sleep(arguments: argparse.Namespace) -> None:
    order = Sleep(model=arguments.model, level=arguments.level)
    ask(arguments, lambda operator: _repeat_order(operator, order, arguments.wait))
    output.write(f"{arguments.model or 'the model'} sleeps\n")


def _wake(arguments: argparse.Namespace) -> None:
    order = Wake(model=arguments.model)
    ask(arguments, lambda operator: _repeat_order(operator, order, arguments.wait))
    output.write(f"{arguments.model or 'the model'} serves again\n")


async def _repeat_order(operator: Operator, asked: Sleep | Wake, wait_s: float) -> None:
    """Repeat an order until all workers of the model have followed it and are ready.

    Raises WorkerLost after `wait_s`, when no router answers for UNREACHED_S, or when the opposite is ordered.
    """
    deadline_s = asyncio.get_running_loop().time() + wait_s
    order = await _answered(lambda: operator.new_order(asked), deadline_s)
    model, names = order.model or "the model", set[str]()
    while True:
        try:
            status = await _answered(lambda: operator.send_order(order), deadline_s)
        except (PeerGone, TimeoutError):
            raise WorkerLost(
                f"no router has answered for {UNREACHED_S:g} s; check with `baton status` whether {model} has"
                " followed the order"
            ) from None
        if is_superseded(order, status.orders):
            raise WorkerLost(f"a later order to do the opposite was given to {model}")
        of_model = [each for each in status.workers if each.worker.serves(order.model)]
        names |= {each.worker.name for each in of_model}  # one that follows is absent for a while
        draining = {each.worker.id for each in of_model if each.is_draining}
        left = not_followed(order, names, [each.worker for each in of_model], draining)
        # A router keeps no order for workers that it has never seen.
        if names and not left and status.num_ready == len(status.workers):
            return
        if asyncio.get_running_loop().time() >= deadline_s:
            if not names:
                raise WorkerLost(f"no worker of {model} has joined in {wait_s:g} s")
            missing = ", ".join(sorted(left)) or "the connections of all workers"
            raise WorkerLost(
                f"after {wait_s:g} s these workers have not followed the order: {missing};"
                " see the log of `baton serve`"
            )
        await asyncio.sleep(REPEAT_S)


async def _answered(question: Callable[[], Awaitable[AnswerT]], deadline_s: float) -> AnswerT:
    """Ask until a router answers, for UNREACHED_S at most. Raises PeerGone or TimeoutError then."""
    loop = asyncio.get_running_loop()
    deadline_s = min(deadline_s, loop.time() + UNREACHED_S)
    while True:
        try:
            return await question()
        except (PeerGone, TimeoutError):
            if loop.time() >= deadline_s:
                raise
            await asyncio.sleep(LOOK_EVERY_S)


async def _until(operator: Operator, wait_s: float, is_done: Callable[[Status], bool], late: str) -> None:
    """Wait until the status is as wanted, also while a router is started again.

    Raises WorkerLost after `wait_s`, with the message `late`. Raises PeerGone or TimeoutError when no router
    answers for UNREACHED_S, or until `wait_s` is over.
    """
    deadline_s = asyncio.get_running_loop().time() + wait_s
    while not is_done(await _answered(operator.status, deadline_s)):
        if asyncio.get_running_loop().time() >= deadline_s:
            raise WorkerLost(late)
        await asyncio.sleep(LOOK_EVERY_S)


async def _until_it_serves(operator: Operator, name: str, wait_s: float, former: str = "") -> None:
    """Wait for a worker of this name that does not drain, other than `former`, an id."""

    def serves(status: Status) -> bool:
        found = _find(status, name)
        return found is not None and found.id != former

    late = f"{name} does not serve after {wait_s:g} s: is that its name? See the log of `baton serve`"
    await _until(operator, wait_s, serves, late)


def _find(status: Status, name: str) -> Worker | None:
    """Return the worker of this name or id, unless it drains."""
    serving = (each.worker for each in status.workers if not each.is_draining)
    return next((each for each in serving if name in (each.name, each.id)), None)


def _migrate(arguments: argparse.Namespace) -> None:
    if bool(arguments.request) == bool(arguments.worker):
        raise ConfigError("give one of REQUEST and --from WORKER")
    request_id = request_id_in(arguments.request)
    if arguments.request and request_id is None:
        raise ConfigError(f"request: expected 32 hex digits, got {arguments.request!r}")
    moved = ask(
        arguments,
        lambda operator: operator.migrate(
            request_id=request_id or "", worker=arguments.worker, to=arguments.to
        ),
    )
    if not moved.num_moved and moved.reason:
        raise ConfigError(f"no request has moved: {moved.reason}")
    left = f", {moved.num_left} left where they were: {moved.reason}" if moved.num_left else ""
    output.write(f"{moved.num_moved} moved{left}\n")


Argument: TypeAlias = Callable[[Parser], object]  # adds one argument to a parser


def _add_options(*arguments: Argument) -> Callable[[Parser], None]:
    """Return a function that adds these arguments, and those that name the cluster."""

    def add(parser: Parser) -> None:
        for each in (*arguments, add_router_options):
            each(parser)

    return add


def _argument(*names: str, **settings: Any) -> Argument:
    """Return what adds an argument, with the settings of argparse."""
    return lambda parser: parser.add_argument(*names, **settings)


def _wait(seconds: float) -> Argument:
    help_ = f"seconds to wait ({seconds:g})"
    return _argument("--wait", type=float, default=seconds, metavar="S", help=help_)


_worker = _argument("worker", metavar="WORKER", help="name or id, as `baton status` shows")
_role = _argument("role", metavar="ROLE", choices=[*WorkerRole], help="prefill or decode")
_force = _argument("--force", action="store_true", help="also when it is the last of its role")
_layout = _argument("layout", metavar="LAYOUT", help="prefill and decode workers, such as 2P3D")
_model_of_workers = _argument(
    "--model", metavar="NAME", default="", help="the model of the workers, where there are several"
)
_model_help = "its name in the API; may be left out where there is one"
_model = _argument("model", metavar="MODEL", nargs="?", default="", help=_model_help)
_level = _argument(
    "--level",
    type=int,
    choices=(1, 2),
    default=1,
    help="1: a worker with a GPU keeps the weights in host memory; 2: no weights are kept (1)",
)
_request = _argument("request", metavar="REQUEST", nargs="?", default="", help="as `baton explain` takes it")
_from = _argument("--from", dest="worker", metavar="WORKER", default="", help="all requests of this one")
_to = _argument("--to", metavar="WORKER", default="", help="the decode worker; else the router chooses")


drain = CliCommand(
    """Have a worker take nothing new and end when its requests have left; then the worker stays away.

Running requests of a decode worker move to other decode workers. Requests that cannot move may end within
`drain_timeout_s`, then other workers replay them. `baton undrain` calls the worker back; a worker of `baton
worker` is started again by hand. The last worker of a role goes with --force only.
""",
    _add_options(_worker, _force),
    _drain,
)
undrain = CliCommand(
    """Call a drained worker back: `baton serve` starts it again under its name.

A worker that still drains comes back when it has ended. The command returns when the worker serves, and fails
after --wait seconds.
""",
    _add_options(_worker, _wait(600.0)),
    _undrain,
)
restart = CliCommand(
    """Drain a worker and start it again, so that it loads its model and its settings again.

The worker drains as with `baton drain`. The command returns when the new process serves, and fails after
--wait seconds. A worker that was drained before is started.
""",
    _add_options(_worker, _wait(600.0)),
    _restart,
)
flip = CliCommand(
    """Have a worker take the other role: a prefill worker decodes from now on, or the other way round.

The weights are not loaded again, and its cached pages stay. Its requests move to other workers first; those
that cannot move are replayed after `drain_timeout_s`. The command returns when the worker serves in its new
role, and fails after --wait seconds. The last worker of a role flips with --force only.
""",
    _add_options(_worker, _role, _force, _wait(120.0)),
    _flip,
)
scale = CliCommand(
    """Have `baton serve` run so many prefill and decode workers: `baton scale 2P3D`.

Missing workers are started; on Ray an autoscaler is asked for nodes. Workers that are too many hand their
requests over and end. The command returns when all workers are ready, and fails after --wait seconds.
""",
    _add_options(_layout, _model_of_workers, _wait(600.0)),
    _scale,
)
migrate = CliCommand(
    """Move a running request, or all requests of a decode worker, to another decode worker.

The KV pages of a request are copied while the request goes on, then the other worker takes over with the
next token: the client sees no replay. A request that cannot move stays where it is. The command returns when
each request has moved or stays.
""",
    _add_options(_request, _from, _to),
    _migrate,
)
sleep = CliCommand(
    """Have a model sleep: its workers free their weights and their KV pages, and take no requests.

Running requests end first. A request that has not ended within `drain_timeout_s` stops, and goes on after
the wake if that comes within `gateway.max_begun_wait_s`. The worker processes stay. The command returns when
all workers of the model sleep. It fails after --wait seconds, and when the model is woken meanwhile.
""",
    _add_options(_model, _level, _wait(600.0)),
    _sleep,
)
wake = CliCommand(
    """Wake a model that sleeps: its workers load the weights again, and serve.

The command returns when all workers of the model are ready. It fails after --wait seconds, and when the
model is put to sleep meanwhile.
""",
    _add_options(_model, _wait(600.0)),
    _wake,
)
