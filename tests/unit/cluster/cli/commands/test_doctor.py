import asyncio
import importlib.metadata
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest

from baton.cluster import operator_node, redis_server
from baton.cluster.cli.commands import doctor
from baton.cluster.cli.commands.doctor import CHECKS, Finding
from baton.cluster.cluster_record import ClusterRecord, recorded
from baton.cluster.files import write_secret
from baton.cluster.process import run
from baton.cluster.redis_server import RedisServer
from baton.cluster.runtimes.base import Assignment, ProcessStarted, generations_of
from baton.config.cluster import ServeConfig
from baton.config.loader import build
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import KeyRing
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.unit.cluster.conftest import Baton
from tests.unit.cluster.model_directories import with_config_alone
from tests.unit.router.redis_routers import connected


def findings(check: doctor.Check, **settings: object) -> list[Finding]:
    return list(check(build(ServeConfig, {"model": "tiny", **settings})))


def the(check: doctor.Check, **settings: object) -> Finding:
    (finding,) = findings(check, **settings)
    return finding


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """One that answers one connection with `answer`; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_everything_that_is_wrong_says_how_to_mend_it() -> None:
    for finding in (found for check in CHECKS for found in findings(check, port=0)):
        assert finding.verdict == "ok" or finding.mend, finding


def test_a_port_in_use_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert the(doctor.port, port=port).verdict == "error"
    assert the(doctor.port, port=0).verdict == "ok"


def test_the_port_of_a_cluster_that_runs_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening, recorded() as record:
        port = listening.getsockname()[1]
        record(
            ClusterRecord(host="127.0.0.1", port=port, routers=(Address("127.0.0.1", 1),), keys=(b"k" * 32,))
        )
        assert the(doctor.port, port=port).verdict == "ok"


@pytest.mark.parametrize(
    ("answer", "verdict"), [(b"+PONG\r\n", "warning"), (b"-NOAUTH\r\n", "warning"), (b"", "ok")]
)
def test_a_redis_where_ray_wants_to_be_is_told_from_ray(
    answer: bytes, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(answer) as port:
        monkeypatch.setattr(doctor, "REDIS_PORT", port)
        assert the(doctor.redis_and_ray).verdict == verdict


def test_listening_socket_is_found_and_bound_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        mapped = socket.create_server(("::ffff:127.0.0.1", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        bound.bind(("127.0.0.1", 0))
        with mapped:
            found = doctor.listeners()
            assert Address(*server.getsockname()) in found
            assert Address("127.0.0.1", mapped.getsockname()[1]) in found
            assert Address(*bound.getsockname()) not in found


def test_rays_ports_must_not_be_open_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*which: Address) -> list[str]:
        monkeypatch.setattr(doctor, "listeners", lambda: list(which))
        return [finding.verdict for finding in findings(doctor.strangers)]

    assert found(Address("0.0.0.0", 8265)) == ["error"]
    assert found(Address("10.0.0.1", 10001)) == ["error"]
    assert found(Address("127.0.0.1", 8265), Address("0.0.0.0", 80)) == []


def test_a_ray_without_its_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert the(doctor.rays_token).verdict == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert the(doctor.rays_token).verdict == "error"
    assert findings(doctor.rays_token, runtime="local") == []


def test_little_shared_memory_and_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_SHM_BYTES", 2**60)
    monkeypatch.setattr(doctor, "MIN_OPEN_FILES", 2**40)
    assert "docker run --shm-size" in the(doctor.shared_memory).mend
    assert the(doctor.open_files).mend.startswith("ulimit -n ")


def test_missing_libraries_are_reported_with_their_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ray": "2.40.0", "fastapi": "1", "uvicorn": "1", "tokenizers": "1", "safetensors": "1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    bad = {finding.what: finding.mend for finding in findings(doctor.libraries) if finding.verdict == "error"}
    assert bad == {
        "torch is not installed": "pip install '.[worker]', in Baton's checkout",
        "ray 2.40.0 lets strangers run code": "pip install '.[ray]', in Baton's checkout",
    }
    del versions["ray"]
    assert [
        finding.what for finding in findings(doctor.libraries, runtime="local") if "ray" in finding.what
    ] == []


def test_missing_model_is_an_error(baton: Baton) -> None:
    status, out, _ = baton("doctor", "/nowhere", "--port", "0")
    assert status == 1 and re.search("^ERROR   model '/nowhere'.*\n        -> give a directory", out, re.M)


def test_a_model_that_knows_no_text_is_a_warning(tmp_path: Path) -> None:
    with_config_alone(tmp_path)
    found, warned = findings(doctor.model, model=str(tmp_path), engine={"load_format": "dummy"})
    assert (found.verdict, warned.verdict) == ("ok", "warning")
    assert "has no tokenizer: prompts are token ids" in warned.what


def test_a_file_of_tenants_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: {acme: {keys: [secret]}}")
    finding = the(doctor.settings, tenants=str(tmp_path / "tenants.yaml"))
    assert finding.verdict == "error" and "sha256sum" in finding.what


@pytest.mark.parametrize(
    "wrong",
    [
        {"gateway": {"tool_call_parser": "nope"}},
        {"transport": "nope"},
        {"router": {"policy": "nope"}},
    ],
)
def test_setting_that_serve_refuses_is_an_error(wrong: dict[str, object]) -> None:
    assert the(doctor.settings).verdict == "ok"
    finding = the(doctor.settings, **wrong)
    assert finding.verdict == "error" and "nope" in finding.what


def test_unknown_policy_does_not_end_the_other_checks() -> None:
    assert findings(doctor.shared_redis, router={"policy": "nope"}) == []


def test_a_package_that_hides_hugging_faces_kernels_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.setattr(doctor, "_checkout", lambda: tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "kernels", raising=False)
    assert the(doctor.shadowed_kernels).verdict == "error"


def looking(redis: str) -> dict[str, object]:
    return {"router": {"policy": "cost", "redis": redis}}


def test_a_redis_that_is_wanted_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not findings(doctor.shared_redis, **looking("none"))
    assert not findings(doctor.shared_redis, router={"policy": "round-robin", "redis": "auto"})
    monkeypatch.setattr(redis_server, "PROGRAMS", ("sh",))
    assert the(doctor.shared_redis, **looking("auto")).verdict == "ok"
    monkeypatch.setattr(redis_server, "PROGRAMS", ("no-such-server",))
    missing = the(doctor.shared_redis, **looking("auto"))
    assert missing.verdict == "warning" and "apt-get install redis-server" in missing.mend


@pytest.mark.parametrize(
    ("url", "verdict", "said"),
    [
        ("redis://h:port", "error", "redis: "),
        ("unix:///nowhere/redis.sock", "warning", "Redis does not answer"),
    ],
)
def test_a_redis_that_cannot_be_asked_is_told(url: str, verdict: str, said: str) -> None:
    found = the(doctor.shared_redis, **looking(url))
    assert found.verdict == verdict and found.what.startswith(said)


@needs_redis
@on_loop
async def test_a_redis_says_whether_it_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def finding(url: str) -> Finding:
        return await asyncio.to_thread(the, doctor.shared_redis, **looking(url))

    async with RedisServer() as redis, connected(redis.url) as connection:
        assert (await finding(redis.url)).verdict == "ok"
        await connection.call("CONFIG SET", "maxmemory-policy", "allkeys-lru")
        forgets = await finding(redis.url)
        assert forgets.verdict == "warning" and "allkeys-lru" in forgets.what
        monkeypatch.setattr(doctor, "MIN_REDIS", (99, 0))
        assert "too old" in (await finding(redis.url)).what


def test_dead_ray_head_is_an_error() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found = the(doctor.ray_head, ray_address=f"127.0.0.1:{port}")
    assert found.verdict == "error" and f"head at 127.0.0.1:{port} does not answer" in found.what
    assert findings(doctor.ray_head) == [] == findings(doctor.ray_head, runtime="local")


def test_routers_are_asked(tmp_path: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    key = b"0123456789abcdef"
    write_secret(tmp_path / "key", key)
    ready, stop, where = Event(), Event(), []

    def tell(message: object) -> None:
        if isinstance(message, ProcessStarted):
            where.append(message.address)
            ready.set()

    generations = generations_of(Kind.ROUTER, key)
    given = Assignment(
        kind=Kind.ROUTER, name="router-0", generations=generations, config=msgspec.Raw(b'{"redis":"none"}')
    )
    thread = Thread(target=run, args=(given, KeyRing(given.kind, given.generations), stop, tell))
    thread.start()
    try:
        assert ready.wait(60)
        (address,) = where
        (empty,) = doctor.routers((address,), (key,))
        assert empty.what.endswith("answers: 0 workers, 0 gateways: nothing is served")
        monkeypatch.setattr(operator_node, "ANSWER_TIMEOUT_S", 0.5)  # none of the others answers
        (stranger,) = doctor.routers((address,), (b"another key of 16",))
        assert (stranger.verdict, "another key or version" in stranger.what) == ("error", True)
    finally:
        stop.set()
        thread.join(60)
    (silent,) = doctor.routers((address,), (key,))
    assert (silent.verdict, "cannot be reached" in silent.what) == ("error", True)
    options = ("--router", f"127.0.0.1:{address.port}", "--cluster-key-file", str(tmp_path / "key"))
    status, out, _ = baton("doctor", "tiny", "--runtime", "local", *options)
    assert status == 1 and f"router at 127.0.0.1:{address.port} cannot be reached" in out
