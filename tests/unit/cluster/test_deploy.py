"""The contents of deploy/, as far as they can be checked without Docker, Kubernetes or other machines."""

import contextlib
import copy
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from baton.bench.processes import free_ports
from baton.cluster.cli.commands import processes
from baton.cluster.cli.main import main
from baton.cluster.cli.options import Parser
from baton.cluster.cli.settings import Settings
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.gateway import GatewayConfig
from baton.config.loader import build
from baton.config.router import RouterConfig
from baton.gateway.http.auth import PUBLIC_PATHS
from baton.messages.workers import Address, WorkerRole
from tests.kubernetes_schemas import check_document
from tests.served import accepts, until
from tests.unit.cluster.deploy_files import DEPLOY, ROOT, metrics_text

OBJECT_STORE: Final = "--object-store-memory=100000000"
DOCKERFILES: Final = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = dockerfile.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_baton_under_tini_and_not_as_root(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    last = dict(found)
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--", "baton"]
    assert int(last["USER"].partition(":")[0]) > 0
    assert [word for word, _ in found].index("USER") < [word for word, _ in found].index("ENTRYPOINT")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_installs_extras_and_constraints_that_exist(dockerfile: Path) -> None:
    (install,) = [rest for word, rest in instructions(dockerfile) if word == "RUN" and "pip install" in rest]
    (constraints,) = re.findall(r"--constraint (\S+)", install)
    assert (ROOT / constraints).is_file()
    (extras,) = re.findall(r'"\.\[(.*?)\]"', install)
    (default,) = [rest.removeprefix("RAY=") for word, rest in instructions(dockerfile) if word == "ARG"]
    project = (ROOT / "pyproject.toml").read_text()
    for extra in (*extras.replace("$RAY", default).split(","), "ray-service"):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_command_of_the_image_build_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = [
        rest for word, rest in instructions(DEPLOY / "docker/cpu.Dockerfile") if rest.startswith('["baton')
    ]
    assert main(json.loads(run)[1:]) == 0
    assert capsys.readouterr().out == "sun moon star\n"


def config_of(command: list[str]) -> RouterConfig | GatewayConfig | WorkerConfig:
    """Return the configuration of a process that is started with this command."""
    name, *options = command
    parser = Parser(name, None)
    getattr(processes, name).add_options(parser)
    arguments = parser.parse(options)
    if name == "worker":
        return processes.worker_config(arguments)
    if name == "router":
        return processes.config_of(RouterConfig, arguments)
    return processes.config_of(GatewayConfig, arguments)


def test_compose_starts_processes_that_find_each_other() -> None:
    services = read("compose.yaml")["services"]
    redis = services.pop("redis")
    assert redis["command"][-2:] == ["--maxmemory-policy", "noeviction"]
    configs = {}
    for name, entry in services.items():
        configs[name] = config_of(entry["command"])
        assert entry["read_only"] and entry["cap_drop"] == ["ALL"] and entry["secrets"]
    router = configs.pop("router")
    assert isinstance(router, RouterConfig) and router.redis == "redis://redis:6379"
    roles = []
    for name, config in configs.items():
        assert isinstance(config, WorkerConfig | GatewayConfig)
        assert config.drain_timeout_s < float(services[name]["stop_grace_period"].rstrip("s"))
        assert config.routers == (Address(router.host, router.port),)
        if isinstance(config, WorkerConfig):
            roles.append(config.role)
            assert (config.name, config.host) == (name, name)  # each listens where others look for it
    assert sorted(roles) == [WorkerRole.DECODE] * 2 + [WorkerRole.PREFILL] * 2


def test_compose_lets_keys_change_and_kernels_be_compiled() -> None:
    """A changed tenants file is a new file, so its folder is mounted; kernels are built where they run."""
    services = read("compose.yaml")["services"]
    command = services["gateway"]["command"]
    tenants = Path(command[command.index("--tenants") + 1])
    folders = [volume.split(":")[1] for volume in services["gateway"]["volumes"]]
    assert folders == [str(tenants.parent)]
    cache = services["decode-0"]["environment"]["BATON_CACHE_DIR"]
    (mount,) = [each for each in services["decode-0"]["tmpfs"] if each.startswith(cache + ":")]
    assert "exec" in mount.partition(":")[2].split(",") and "mode=700" in mount


def test_compose_has_every_secret_that_it_hands_out() -> None:
    compose = read("compose.yaml")
    used = {name for entry in compose["services"].values() for name in entry.get("secrets", ())}
    assert used == set(compose["secrets"])


def start_commands(config: dict[str, Any]) -> list[list[str]]:
    """The arguments of every `ray start`."""
    lines = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    commands = [shlex.split(line.partition("ray start ")[2]) for line in lines if "ray start" in line]
    assert len(commands) == 2
    return commands


def test_ray_up_takes_its_cluster_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(read("ray/cluster.yaml")))


def test_ray_knows_the_options_that_it_is_started_with() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    config = read("ray/cluster.yaml")
    for arguments in start_commands(config):
        scripts.start.make_context("start", arguments)


def test_ray_lets_nobody_in_without_a_token() -> None:
    config = read("ray/cluster.yaml")
    for line in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        assert "ray start" not in line or "RAY_AUTH_MODE=token ray start" in line
    head = start_commands(config)[0]
    assert "--dashboard-host=127.0.0.1" in head and "--port=6379" not in head


@pytest.fixture(scope="module")
def kuberay() -> dict[str, Any]:
    text = (DEPLOY / "kuberay/raycluster.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    spec = cluster["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def test_the_kubernetes_cluster_wants_a_token_and_no_root(kuberay: dict[str, Any]) -> None:
    cluster = kuberay["RayCluster"]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['spec']['rayVersion']}\n" in (ROOT / "constraints/gpu.txt").read_text()
    for pod in pods(cluster):
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["enableServiceLinks"] is False
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_kubernetes_settings_are_settings(kuberay: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(kuberay["ConfigMap"]["data"]["baton.yaml"])
    config = Settings(ServeConfig, flags={}, file=file, environment={}).build()
    groups = {group["groupName"]: group for group in kuberay["RayCluster"]["spec"]["workerGroupSpecs"]}
    for role, workers in (("prefill", config.prefill), ("decode", config.decode)):
        # rayStartParams are strings of shell: quotes within quotes.
        offered = json.loads(json.loads(groups[role]["rayStartParams"]["resources"].strip("'")))
        assert workers.ray_resources == offered
        assert workers.num_workers == groups[role]["replicas"]


def test_the_kubernetes_service_and_probes_find_the_gateway(kuberay: dict[str, Any]) -> None:
    head = pods(kuberay["RayCluster"])[0]
    labels = head["metadata"]["labels"]
    assert kuberay["Service"]["spec"]["selector"].items() <= labels.items()
    (container,) = [one for one in head["spec"]["containers"] if one["name"] == "baton"]
    assert container["ports"][0]["containerPort"] == build(ServeConfig, {"model": "tiny"}).port
    (port,) = kuberay["Service"]["spec"]["ports"]
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {port["targetPort"], *(probe["port"] for probe in probes)} == {container["ports"][0]["name"]}
    assert [probe["path"] for probe in probes] == ["/health", "/ping", "/ping"]
    assert set(PUBLIC_PATHS) >= {probe["path"] for probe in probes}  # the kubelet has no key


@pytest.mark.parametrize("file", ["raycluster", "rayservice"])
def test_kubernetes_documents_pass_strict_schemas(file: str) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / f"kuberay/{file}.yaml").read_text()))
    assert len(documents) >= 3
    for document in documents:
        check_document(document)


def test_probes_ask_where_ray_is_told_to_listen(kuberay: dict[str, Any]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    spec = kuberay["RayCluster"]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        parameters, container = group["rayStartParams"], group["template"]["spec"]["containers"][0]
        raylet = int(parameters["node-manager-port"])
        assert container["readinessProbe"]["tcpSocket"]["port"] == raylet
        gcs = int(parameters.get("port", 6379))  # KubeRay's default, of `ray start`
        liveness = container["livenessProbe"]["tcpSocket"]["port"]
        assert liveness == (gcs if container["name"] == "ray-head" else raylet)
        arguments = [f"--{name}={value}" for name, value in parameters.items()]
        scripts.start.make_context(
            "start", [argument for argument in arguments if "resources" not in argument]
        )


def test_ray_listens_for_the_probes_with_the_parts_that_the_images_have() -> None:
    """The image has base Ray and no dashboard: what KubeRay's own probes would ask does not listen."""
    pytest.importorskip("ray")
    gcs, raylet = free_ports(2)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:  # sockets have short names
        options = [f"--port={gcs}", f"--node-manager-port={raylet}", f"--temp-dir={folder}", OBJECT_STORE]
        head = subprocess.Popen([*command, *options], env=environment, start_new_session=True)
        try:
            until(lambda: (accepts(gcs) and accepts(raylet)) or head.poll() is not None, timeout_s=120)
            assert head.poll() is None
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            head.wait()
    until(lambda: not accepts(gcs) and not accepts(raylet))


@pytest.fixture(scope="module")
def rayservice() -> dict[str, Any]:
    text = (DEPLOY / "kuberay/rayservice.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_rayservice_runs_the_cluster_of_the_other_file(
    kuberay: dict[str, Any], rayservice: dict[str, Any]
) -> None:
    assert rayservice["ConfigMap"] == kuberay["ConfigMap"]
    cluster = copy.deepcopy(rayservice["RayService"]["spec"]["rayClusterConfig"])
    head = cluster["headGroupSpec"]
    ray, baton = head["template"]["spec"]["containers"]
    assert baton["ports"][0] in ray["ports"]
    # What is different: the dashboard, which the operator asks, the watch's place, the image, and ports.
    assert head["rayStartParams"].pop("dashboard-host") == "0.0.0.0"
    head["rayStartParams"] = {**head["rayStartParams"], "dashboard-host": "127.0.0.1"}
    assert json.loads(json.loads(head["rayStartParams"].pop("resources").strip("'"))) == {"baton_head": 1}
    del ray["ports"]
    for pod in pods({"spec": cluster}):
        for container in pod["spec"]["containers"]:
            container["image"] = "baton:cpu"
    assert cluster == kuberay["RayCluster"]["spec"]


def test_the_rayservice_watches_the_gateways_and_leaves_their_port_alone(rayservice: dict[str, Any]) -> None:
    spec = rayservice["RayService"]["spec"]
    serve = yaml.safe_load(spec["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    containers = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in containers[0]["ports"]}
    assert int(application["args"]["port"]) == ports["api"]
    assert serve["http_options"]["port"] == ports["serve"] != ports["api"]
    strangers = [rule for rule in rayservice["NetworkPolicy"]["spec"]["ingress"] if "from" not in rule]
    assert [port["port"] for rule in strangers for port in rule["ports"]] == [ports["api"]]


def test_metrics_tell_the_build_and_workers_by_role_and_node() -> None:
    text = metrics_text()
    assert 'baton_workers{model_name="tiny",node="host-7",role="decode",state="serving"} 1.0' in text
    assert re.search(r'^baton_build_info\{python="3\.\d+\.\d+",version="[\d.]+"\} 1\.0$', text, re.MULTILINE)
