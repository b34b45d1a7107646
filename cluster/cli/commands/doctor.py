"""Find problems of this machine that `baton serve` with the same options would have, and print remedies.

Checks change nothing. They connect to Ray's head (--ray-address), Redis (--redis) and the routers of
--router.

Exit status: 0, or 1 when a problem would keep `baton serve` from serving.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import psutil

from baton.cluster.cli import output
from baton.cluster.cli.connections import addresses, key_file
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cli.settings import Given, add_serve_options, settings_from
from baton.cluster.cluster_key import Keys, read_keys
from baton.cluster.cluster_record import is_served
from baton.cluster.operator_node import connected
from baton.cluster.redis_server import find_program
from baton.cluster.runtimes.base import LOOPBACK
from baton.cluster.runtimes.gpus import is_torch_for_cpus, visible_gpus
from baton.cluster.runtimes.ray import MIN_RAY
from baton.config.cluster import ServeConfig
from baton.config.environment import prepare_ray, ray_asks_for_token
from baton.config.gateway import is_loopback
from baton.errors import FAILED, BatonError, ConfigError, PeerGone, how_to_install, reason_of
from baton.messages.operations import Status
from baton.messages.workers import Address, Routers
from baton.router.policies.registry import policy_class

Verdict: TypeAlias = Literal["ok", "warning", "error"]

MIN_SHM_BYTES: Final = 1 << 30
MIN_OPEN_FILES: Final = 8192  # connections, twice, and room for Ray's own
MIN_REDIS: Final = (6, 2)
KEEPS_ALL: Final = "noeviction"  # the maxmemory-policy of a Redis that never forgets
REDIS_PORT: Final = 6379  # the default port of Redis, and of Ray's GCS
# Ray's servers at these ports run code for every client that reaches them.
RAY_PORTS: Final = {8265: "dashboard and job API", 10001: "client server"}
INSTALL: Final = "pip install ., in Baton's checkout"  # PyPI's baton is another project
PROBE_TIMEOUT_S: Final = 0.5
RAY_TIMEOUT_S: Final = 20.0  # most of it to import Ray on a busy machine
MARKS: Final = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    verdict: Verdict  # error: `baton serve` would fail, or would be unsafe
    what: str
    mend: str = ""  # the remedy

    @property
    def text(self) -> str:
        """The line for the user, and a second one with the remedy."""
        return f"{MARKS[self.verdict]} {self.what}" + (f"\n        -> {self.mend}" if self.mend else "")


Check: TypeAlias = Callable[[ServeConfig], Iterator[Finding]]


def _add_options(parser: Parser) -> None:
    add_serve_options(parser)
    parser.add_argument(
        "--router", type=addresses, metavar="HOST:PORT", help="routers to ask; several with commas"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")


def _run(arguments: argparse.Namespace) -> int:
    given = settings_from(ServeConfig, arguments)
    given.given.setdefault("model", Given("tiny", "default"))
    config = given.build()
    findings = [finding for check in CHECKS for finding in check(config)]
    if arguments.router is not None:
        keys = read_keys(key_file(config.cluster_key_file))
        findings += routers(arguments.router, keys)
    if arguments.json:
        output.write(f"{msgspec.json.encode(findings).decode()}\n")
    else:
        output.write("".join(f"{finding.text}\n" for finding in findings))
    return FAILED if any(finding.verdict == "error" for finding in findings) else 0


def _ok(what: str) -> Finding:
    return Finding(verdict="ok", what=what)


def _warning(what: str, mend: str) -> Finding:
    return Finding(verdict="warning", what=what, mend=mend)


def _error(what: str, mend: str) -> Finding:
    return Finding(verdict="error", what=what, mend=mend)


def _judge(is_well: bool, well: str, what: str, mend: str, verdict: Verdict = "warning") -> Finding:
    """Return the finding `well`, or the problem `what`."""
    return _ok(well) if is_well else Finding(verdict=verdict, what=what, mend=mend)


def libraries(config: ServeConfig) -> Iterator[Finding]:
    """Check that the needed Python packages are installed."""
    needed = {"torch": "worker", "safetensors": "worker", "fastapi": "", "uvicorn": "", "tokenizers": ""}
    if config.runtime == "ray":
        needed["ray"] = "ray"
    for name, extra in needed.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield _error(f"{name} is not installed", how_to_install(extra) if extra else INSTALL)
            continue
        if name == "ray" and tuple(int(part) for part in version.split(".")[:2]) < MIN_RAY:
            yield _error(f"ray {version} lets strangers run code", how_to_install("ray"))
        else:
            yield _ok(f"{name} {version}")


def compiler(config: ServeConfig) -> Iterator[Finding]:
    """Check that there is a C compiler for the CPU kernels."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    yield _judge(
        bool(found) or config.engine.device == "cuda",
        f"C compiler: {found or 'not needed on a GPU'}",
        "there is no C compiler: a CPU computes much slower",
        "apt-get install gcc libc6-dev",
    )


def model(config: ServeConfig) -> Iterator[Finding]:
    """Check that the workers can load each model with these settings."""
    for each in config.models:
        yield from _model(each)


def _model(config: ServeConfig) -> Iterator[Finding]:
    from baton.cluster.serve_plan import check_model, speech_of  # --help does not wait for it

    try:
        directory = check_model(config)
        speech = speech_of(directory, config.gateway)
    except BatonError as error:
        yield _error(
            str(error),
            "give a directory with a whole model or a repository within reach, and settings that fit it",
        )
        return
    yield _ok(f"model: {directory}")
    if speech == "token ids":
        yield _warning(f"{directory} has no tokenizer: prompts are token ids", "put its tokenizer there")
    elif speech == "text":
        yield _warning(
            f"{directory} has no chat template: it completes text", "put chat_template.jinja there"
        )


def settings(config: ServeConfig) -> Iterator[Finding]:
    """Check the file of tenants, and the names of the policy, the transport and the parsers."""
    from baton.cluster.serve_plan import check_settings  # --help does not wait for it

    try:
        check_settings(config)
    except ConfigError as error:
        yield _error(str(error), "mend this setting, or the file that it names")
        return
    tenants = f", tenants: {config.tenants}" if config.tenants else ""
    yield _ok(f"policy: {config.router.policy}, transport: {config.transport}{tenants}")


def gpus(config: ServeConfig) -> Iterator[Finding]:
    """Check that there are GPUs if the engine needs them, and NCCL with them."""
    found = visible_gpus()
    if config.engine.device == "cuda" and not found:
        yield _error(
            "engine.device is cuda, and this machine shows no GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    elif found and is_torch_for_cpus():
        yield _judge(
            config.engine.device == "cpu",
            "the engine computes on CPUs",
            f"torch has no CUDA: workers do not use this machine's GPUs ({len(found)})",
            "install a torch that was built with CUDA, or give --device cpu",
        )
    elif found:
        yield _ok(f"{len(found)} GPU{'s' * (len(found) != 1)}")
        yield from _nccl()


def _nccl() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    yield _judge(
        any(str(name).startswith("nvidia-nccl") for name in names),
        "NCCL is installed",
        "there is no NCCL package: ranks on several GPUs need it",
        "install a torch that was built with CUDA: its wheel brings nvidia-nccl",
    )


def shared_memory(config: ServeConfig) -> Iterator[Finding]:
    """Check that /dev/shm has enough room."""
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.exists() else 0
    yield _judge(
        free >= MIN_SHM_BYTES,
        f"/dev/shm has {free >> 20:,} MiB free",
        f"/dev/shm has {free >> 20} MiB free: Ray's object store and NCCL's buffers may not fit",
        "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm",
    )


def open_files(config: ServeConfig) -> Iterator[Finding]:
    """Check that a process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _judge(
        soft >= MIN_OPEN_FILES,
        f"{soft:,} open files a process",
        f"a process may have {soft:,} files open: a gateway with many clients needs more",
        f"ulimit -n {MIN_OPEN_FILES if hard >= MIN_OPEN_FILES else hard} before `baton serve`",
    )


def port(config: ServeConfig) -> Iterator[Finding]:
    """Check that the port for clients is free."""
    taken = [one for one in listeners() if config.port and one.port == config.port]
    if taken and is_served(config.port):
        yield _ok(f"port {config.port} is that of a cluster of yours, which runs")
    elif taken:
        yield _error(f"port {config.port} is in use", "stop what listens there, or give another --port")
    else:
        yield _ok(f"port {config.port} is free")


def redis_and_ray(config: ServeConfig) -> Iterator[Finding]:
    """Check that no Redis listens on the port of Ray's GCS."""
    here = [one for one in listeners() if one.port == REDIS_PORT]
    if not here:
        return
    yield _judge(
        not _speaks_redis(here[0]),
        f"port {REDIS_PORT} is not a Redis: probably Ray's GCS; put a Redis elsewhere",
        f"a Redis listens on {REDIS_PORT}, where `ray start --head` puts its GCS",
        "ray start --head --port 6380, or move Redis; a Ray that `baton serve` starts avoids the port",
    )


def shared_redis(config: ServeConfig) -> Iterator[Finding]:
    """Check that routers can share a Redis."""
    url = config.router.redis
    try:
        if url == "none" or not policy_class(config.router.policy).uses_prefix_index:
            return
    except ConfigError:
        return  # `settings` tells of the policy
    if importlib.util.find_spec("redis") is None:
        verdict = _warning if url == "auto" else _error
        yield verdict("redis is not installed: routers share nothing", how_to_install("redis"))
    elif url != "auto":
        yield from _redis_at(url)
    elif program := find_program():
        yield _ok(f"{program}, which `baton serve` starts for its routers")
    else:
        yield _warning(
            "there is no redis-server on PATH: a router knows neither the others nor what the last one knew",
            "apt-get install redis-server, or give --redis URL; --redis none does without",
        )


def listeners() -> list[Address]:
    """Return the addresses of the TCP listeners of this network namespace."""
    found = {
        Address(each.laddr[0].removeprefix("::ffff:"), each.laddr[1])
        for each in psutil.net_connections("tcp")
        if each.laddr and each.status == psutil.CONN_LISTEN
    }
    return sorted(found, key=msgspec.structs.astuple)


def _redis_at(url: str) -> Iterator[Finding]:
    try:
        facts = asyncio.run(_ask_redis(url))
    except ConfigError as error:
        yield _error(str(error), "give redis://HOST:PORT, unix:///PATH, auto or none")
        return
    if facts is None:
        yield _warning("Redis does not answer: requests are routed without it", "start it, or mend --redis")
        return
    version = str(facts.get("valkey_version") or facts.get("redis_version", "0"))
    eviction = facts.get("maxmemory_policy", "")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < MIN_REDIS:
        yield _warning(f"Redis {version} is too old", "6.2 or newer, or Valkey")
    elif eviction != KEEPS_ALL:
        yield _warning(
            f"Redis {version} drops keys when its memory is full ({eviction})",
            f"redis-server --maxmemory-policy {KEEPS_ALL}",
        )
    else:
        yield _ok(f"Redis {version} answers")


async def _ask_redis(url: str) -> dict[str, Any] | None:
    """Return the facts of INFO; None when no Redis answers. ConfigError: the URL is wrong."""
    from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection  # needs the library

    connection = RedisConnection(url, Names.of("none"))
    try:
        facts: dict[str, Any] = await connection.call("INFO")
        return facts
    except REDIS_FAILURES:
        return None
    finally:
        await connection.aclose()


def strangers(config: ServeConfig) -> Iterator[Finding]:
    """Check that other machines cannot reach ports that run code."""
    if not is_loopback(config.host):
        yield _ok(f"clients of other machines reach {config.host}: tenants' keys are in {config.tenants}")
    for one in listeners():
        if one.port in RAY_PORTS and not is_loopback(one.host):
            yield _error(
                f"Ray's {RAY_PORTS[one.port]} can be reached from other machines at port {one.port}: "
                "its clients may run code here",
                "ray start --dashboard-host 127.0.0.1, RAY_AUTH_MODE=token, a firewall around the cluster",
            )


def rays_token(config: ServeConfig) -> Iterator[Finding]:
    """Check that Ray's ports ask for a token."""
    if config.runtime != "ray":
        return
    yield _judge(
        ray_asks_for_token(),
        "Ray's own ports listen on all interfaces, and answer only clients with ~/.ray/auth_token",
        "Ray's own ports listen on all interfaces; RAY_AUTH_MODE lets every client run code here",
        "export RAY_AUTH_MODE=token, or leave it unset",
        verdict="error",
    )


def ray_head(config: ServeConfig) -> Iterator[Finding]:
    """Check the health of the GCS at `ray_address`, with this machine's token."""
    if config.runtime != "ray" or config.ray_address is None or importlib.util.find_spec("ray") is None:
        return
    prepare_ray()
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    if config.ray_address != "auto":
        command += ["--address", config.ray_address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=RAY_TIMEOUT_S)
        is_well, said = asked.returncode == 0, asked.stdout + asked.stderr
    except subprocess.TimeoutExpired:
        is_well, said = False, ""
    if is_well:
        yield _ok(f"Ray's head at {config.ray_address} answers")
        return
    why = "; it wants another token" if "oken" in said and "auth" in said.lower() else ""
    yield _error(
        f"Ray's head at {config.ray_address} does not answer{why}",
        "start it: ray start --head --port 6380; or give its address: --ray-address HOST:PORT; every machine "
        "needs the head's ~/.ray/auth_token",
    )


def routers(addresses: Routers, keys: Keys) -> list[Finding]:
    """Check that each router answers."""
    return [_router_at(address, keys) for address in addresses]


def _router_at(address: Address, keys: Keys) -> Finding:
    async def ask() -> Status:
        async with connected((address,), keys) as operator:
            return await operator.status()

    where = f"the router at {address.host}:{address.port}"
    try:
        status = asyncio.run(ask())
    except (PeerGone, TimeoutError, OSError):
        mend = "start it, open its port to this machine, or give the key it was started with"
        try:
            socket.create_connection((address.host, address.port), PROBE_TIMEOUT_S).close()
        except OSError as error:
            return _error(f"{where} cannot be reached: {reason_of(error)}", mend)
        return _error(f"{where} accepts connections and does not answer: another key or version", mend)
    num_workers = len(status.workers)
    said = f"{where} answers: {num_workers} workers, {status.num_gateways} gateways"
    return (
        _ok(said) if num_workers else _warning(f"{said}: nothing is served", "start workers, see their log")
    )


def shadowed_kernels(config: ServeConfig) -> Iterator[Finding]:
    """Check that no folder of Baton hides Hugging Face's `kernels`."""
    spec = importlib.util.find_spec("kernels")
    origin = spec.origin if spec else None
    yield _judge(
        not origin or Path(origin).parent != _checkout() / "kernels",
        "no folder of Baton hides Hugging Face's `kernels`",
        f"{origin} hides Hugging Face's `kernels` from transformers",
        "remove that file: Baton's folders hold no __init__.py",
        verdict="error",
    )


def memory(config: ServeConfig) -> Iterator[Finding]:
    """Report cores and memory."""
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield _ok(f"{len(os.sched_getaffinity(0))} cores, {present >> 30} GiB of memory")


def _checkout() -> Path:
    return Path(__file__).resolve().parents[3]


def _speaks_redis(where: Address) -> bool:
    host = LOOPBACK if where.host == "0.0.0.0" else where.host
    try:
        with socket.create_connection((host, where.port), PROBE_TIMEOUT_S) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-ERR"))
    except OSError:
        return False


CHECKS: Final[tuple[Check, ...]] = (
    memory,
    libraries,
    compiler,
    model,
    settings,
    gpus,
    shared_memory,
    open_files,
    port,
    redis_and_ray,
    shared_redis,
    strangers,
    rays_token,
    ray_head,
    shadowed_kernels,
)


doctor = CliCommand(__doc__, _add_options, _run)
