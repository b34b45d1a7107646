"""What a machine lacks, and how to mend it: each check looks, changes nothing, and says what to do."""

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
from typing import Final, Literal, TypeAlias

import msgspec

from baton.cluster.cluster_key import Keys
from baton.cluster.cluster_record import is_served
from baton.cluster.installing import install
from baton.cluster.operator_node import connected
from baton.cluster.ports import ListeningProcess, listeners
from baton.cluster.runtimes.ray import MIN_RAY
from baton.cluster.serve_plan import check_model, check_tenants, speech_of
from baton.config.cluster import ServeConfig
from baton.config.environment import prepare_ray, ray_asks_for_token, visible_gpus
from baton.config.gateway import is_loopback
from baton.errors import BatonError, ConfigError, PeerGone
from baton.messages.operations import Status
from baton.messages.workers import Address, Routers
from baton.router.policies.registry import policy_class
from baton.router.redis.server import find_program

Verdict: TypeAlias = Literal["ok", "warning", "error"]

MIN_SHM_BYTES: Final = 1 << 30
MIN_OPEN_FILES: Final = 8192  # connections, twice, and room for Ray's own
REDIS_PORT: Final = 6379  # of Redis, and of Ray's GCS, by default
# What Ray serves there runs code for whoever reaches it.
RAY_PORTS: Final = {8265: "dashboard and job API", 10001: "client server", REDIS_PORT: "GCS"}
PROBE_TIMEOUT_S: Final = 0.5
RAY_TIMEOUT_S: Final = 20.0  # most of it to import Ray on a busy machine


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    what: str
    mend: str = ""


Check: TypeAlias = Callable[[ServeConfig], Iterator[Finding]]


def examine(config: ServeConfig) -> list[Finding]:
    """What stands in the way of `baton serve` with these settings, and what does not."""
    return [finding for check in CHECKS for finding in check(config)]


def _ok(what: str) -> Finding:
    return Finding(verdict="ok", what=what)


def _warning(what: str, mend: str) -> Finding:
    return Finding(verdict="warning", what=what, mend=mend)


def _error(what: str, mend: str) -> Finding:
    return Finding(verdict="error", what=what, mend=mend)


def libraries(config: ServeConfig) -> Iterator[Finding]:
    needed = {"torch": "worker", "safetensors": "worker", "fastapi": "", "uvicorn": "", "tokenizers": ""}
    if config.runtime == "ray":
        needed["ray"] = "ray"
    for name, extra in needed.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield _error(f"{name} is not installed", install(extra))
            continue
        if name == "ray" and tuple(int(part) for part in version.split(".")[:2]) < MIN_RAY:
            yield _error(f"ray {version} lets strangers run code", install("ray"))
        else:
            yield _ok(f"{name} {version}")


def compiler(config: ServeConfig) -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found or config.engine.device == "cuda":
        yield _ok(f"C compiler: {found or 'not needed on a GPU'}")
    else:
        yield _warning("there is no C compiler: a CPU computes much slower", "apt-get install gcc libc6-dev")


def model(config: ServeConfig) -> Iterator[Finding]:
    try:
        directory = check_model(config)
        speech = speech_of(directory, config.gateway.chat_template)
    except BatonError as error:
        yield _error(
            str(error), "give the directory of a whole model of this machine, and settings that fit it"
        )
        return
    yield _ok(f"model: {directory}")
    if speech == "token ids":
        yield _warning(f"{directory} has no tokenizer.json: prompts are token ids", "put its tokenizer there")
    elif speech == "text":
        yield _warning(
            f"{directory} has no chat template: it completes text", "put chat_template.jinja there"
        )


def tenants(config: ServeConfig) -> Iterator[Finding]:
    if config.tenants is None:
        return
    try:
        check_tenants(config)
    except BatonError as error:
        yield _error(str(error), "`printf %s KEY | sha256sum` prints what stands behind sha256:")
    else:
        yield _ok(f"tenants: {config.tenants}")


def gpus(config: ServeConfig) -> Iterator[Finding]:
    found = visible_gpus()
    if config.engine.device == "cuda" and not found:
        yield _error(
            "engine.device is cuda, and this machine shows no GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    elif found:
        yield _ok(f"{len(found)} GPU{'s' * (len(found) != 1)}")
        yield from _nccl()


def _nccl() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    if any(str(name).startswith("nvidia-nccl") for name in names):
        yield _ok("NCCL is installed")
    else:
        yield _warning(
            "there is no NCCL package: ranks on several GPUs need it",
            "install a torch that was built with CUDA: its wheel brings nvidia-nccl",
        )


def shared_memory(config: ServeConfig) -> Iterator[Finding]:
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.exists() else 0
    if free < MIN_SHM_BYTES:
        yield _warning(
            f"/dev/shm has {free >> 20} MiB free: Ray's object store and NCCL's buffers may not fit",
            "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm",
        )
    else:
        yield _ok(f"/dev/shm has {free >> 20:,} MiB free")


def open_files(config: ServeConfig) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield _warning(
            f"a process may have {soft:,} files open: a gateway with many clients needs more",
            f"ulimit -n {MIN_OPEN_FILES if hard >= MIN_OPEN_FILES else hard} before `baton serve`",
        )
    else:
        yield _ok(f"{soft:,} open files a process")


def port(config: ServeConfig) -> Iterator[Finding]:
    taken = [one for one in listeners() if config.port and one.port == config.port]
    if taken and is_served(config.port):
        yield _ok(f"port {config.port} is that of a cluster of yours, which runs")
    elif taken:
        yield _error(f"port {config.port} is in use", "stop what listens there, or give another --port")
    else:
        yield _ok(f"port {config.port} is free")


def redis_and_ray(config: ServeConfig) -> Iterator[Finding]:
    here = [one for one in listeners() if one.port == REDIS_PORT]
    if not here:
        return
    if _speaks_redis(here[0]):
        yield _warning(
            f"a Redis listens on {REDIS_PORT}, where `ray start --head` puts its GCS",
            "ray start --head --port 6380, or move Redis; a Ray that `baton serve` starts avoids the port",
        )
    else:
        yield _ok(f"port {REDIS_PORT} is not a Redis: probably Ray's GCS; put a Redis elsewhere")


def shared_redis(config: ServeConfig) -> Iterator[Finding]:
    url = config.router.redis
    if url == "none" or not policy_class(config.router.policy).uses_prefix_index:
        return
    if importlib.util.find_spec("redis") is None:
        verdict = _warning if url == "auto" else _error
        yield verdict("redis is not installed: routers share nothing", install("redis"))
    elif url != "auto":
        yield from _redis_at(url)
    elif program := find_program():
        yield _ok(f"{program}, which `baton serve` starts for its routers")
    else:
        yield _warning(
            "there is no redis-server on PATH: a router knows neither the others nor what the last one knew",
            "apt-get install redis-server, or give --redis URL; --redis none does without",
        )


def _redis_at(url: str) -> Iterator[Finding]:
    from baton.cluster.redis_check import KEEPS_ALL, look_at  # needs the library

    try:
        found = look_at(url)
    except ConfigError as error:
        yield _error(str(error), "give redis://HOST:PORT, unix:///PATH, auto or none")
        return
    if found is None:
        yield _warning("Redis does not answer: requests are routed without it", "start it, or mend --redis")
    elif found.is_too_old:
        yield _warning(f"Redis {found.version} is too old", "6.2 or newer, or Valkey")
    elif found.eviction != KEEPS_ALL:
        yield _warning(
            f"Redis {found.version} forgets what it was told when its memory is full ({found.eviction})",
            f"redis-server --maxmemory-policy {KEEPS_ALL}",
        )
    else:
        yield _ok(f"Redis {found.version} answers")


def strangers(config: ServeConfig) -> Iterator[Finding]:
    if not is_loopback(config.host):
        yield _ok(f"clients of other machines reach {config.host}: tenants' keys are in {config.tenants}")
    for one in listeners():
        if one.port in RAY_PORTS and not is_loopback(one.host) and one.port != REDIS_PORT:
            yield _error(
                f"Ray's {RAY_PORTS[one.port]} can be reached from other machines at port {one.port}: whoever "
                "reaches it may run code here",
                "ray start --dashboard-host 127.0.0.1, RAY_AUTH_MODE=token, a firewall around the cluster",
            )


def rays_token(config: ServeConfig) -> Iterator[Finding]:
    if config.runtime != "ray":
        return
    if ray_asks_for_token():
        yield _ok("Ray's own ports listen on all interfaces, and answer only those with ~/.ray/auth_token")
    else:
        yield _error(
            "Ray's own ports listen on all interfaces; RAY_AUTH_MODE lets whoever reaches them run code here",
            "export RAY_AUTH_MODE=token, or leave it unset",
        )


def ray_head(config: ServeConfig) -> Iterator[Finding]:
    """Ask the GCS at `ray_address` for its health, with this machine's token."""
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
    """Ask each router for its status."""
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
            return _error(f"{where} cannot be reached: {error.strerror or error}", mend)
        return _error(f"{where} accepts connections and does not answer: another key or version", mend)
    num_workers = len(status.workers)
    said = f"{where} answers: {num_workers} workers, {status.num_gateways} gateways"
    return (
        _ok(said) if num_workers else _warning(f"{said}: nothing is served", "start workers, see their log")
    )


def shadowed_kernels(config: ServeConfig) -> Iterator[Finding]:
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin and Path(spec.origin).parent == _checkout() / "kernels":
        yield _error(
            f"{spec.origin} hides Hugging Face's `kernels` from transformers",
            "remove that file: Baton's folders hold no __init__.py",
        )
    else:
        yield _ok("nothing of Baton's hides Hugging Face's `kernels`")


def memory(config: ServeConfig) -> Iterator[Finding]:
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield _ok(f"{len(os.sched_getaffinity(0))} cores, {present >> 30} GiB of memory")


def _checkout() -> Path:
    return Path(__file__).resolve().parents[1]


def _speaks_redis(where: ListeningProcess) -> bool:
    host = "127.0.0.1" if where.host == "0.0.0.0" else where.host
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
    tenants,
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
