"""The Helm chart, rendered by Helm's own engine, and its documents against Kubernetes' schemas."""

import copy
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from baton.config.cluster import ServeConfig
from baton.config.loader import build
from tests.kubernetes_schemas import check_document
from tests.unit.cluster.deploy_files import DEPLOY, ROOT, RULES

helm = pytest.importorskip("helm_python", reason="Helm's engine comes as a wheel for Linux on x86-64 alone")

CHART: Final = DEPLOY / "helm/baton"
TOLERATION: Final = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
AFFINITY: Final = {
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname"}}
        ]
    }
}
EVERYTHING: Final[dict[str, Any]] = {
    "model": "/models/big",
    "workerImage": "registry/baton:cuda",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "gateways": 2,
    "routers": 2,
    "settings": {"router": {"policy": "prefix"}, "engine": {"max_model_len": 4096}},
    "env": [{"name": "BATON_LOG_LEVEL", "value": "INFO"}],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "serviceAccountName": "baton",
    "prefill": {
        "replicas": 3,
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "nodeSelector": {"pool": "prefill"},
        "tolerations": [TOLERATION],
        "podAnnotations": {"team": "inference"},
    },
    "decode": {"affinity": AFFINITY},
    "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
    "podDisruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


def render(given: dict[str, Any], release: str = "baton") -> list[dict[str, Any]]:
    """Return the documents that `helm install` would apply."""
    chart = helm.Chart.load(str(CHART))
    texts: dict[str, str] = chart.render(given, name=release, namespace="default")
    return [document for text in texts.values() for document in yaml.safe_load_all(text) if document]


def test_chart_with_its_defaults_is_the_cluster_of_kuberay() -> None:
    cluster, config, service, policy = render({})
    plain = list(yaml.safe_load_all((DEPLOY / "kuberay/raycluster.yaml").read_text()))
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        group["template"]["metadata"]["labels"].pop("serves", None)
        for container in group["template"]["spec"]["containers"]:
            assert container.pop("imagePullPolicy") == "IfNotPresent"
    assert service["metadata"].pop("labels") == {"app": "baton"}
    assert service["spec"].pop("type") == "ClusterIP"
    assert settings_of(config) == settings_of(plain[1])
    assert [cluster, service, policy] == [plain[0], *plain[2:]]


def settings_of(config: dict[str, Any]) -> ServeConfig:
    return build(ServeConfig, yaml.safe_load(config["data"]["baton.yaml"]))


@pytest.mark.parametrize("given", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_rendered_documents_pass_strict_schemas(given: dict[str, Any]) -> None:
    documents = render(copy.deepcopy(given))
    assert len(documents) >= 4
    for document in documents:
        check_document(document)


def test_values_arrive() -> None:
    documents = render(copy.deepcopy(EVERYTHING), "mine")
    kinds = [document["kind"] for document in documents]
    assert kinds.count("PodDisruptionBudget") == 2 and kinds.count("ServiceMonitor") == 1
    cluster, config, service, policy, *_ = documents
    (endpoint,) = next(each for each in documents if each["kind"] == "ServiceMonitor")["spec"]["endpoints"]
    (job,) = {line for line in RULES.read_text().splitlines() if "up{job=" in line}
    assert endpoint["relabelings"][0]["replacement"] in job
    prefill, decode = cluster["spec"]["workerGroupSpecs"]
    assert [prefill["replicas"], prefill["maxReplicas"], decode["replicas"]] == [3, 3, 2]
    spec = prefill["template"]["spec"]
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"pool": "prefill"}, [TOLERATION])
    assert "affinity" not in spec and decode["template"]["spec"]["affinity"] == AFFINITY
    assert prefill["template"]["metadata"]["annotations"] == {"team": "inference"}
    (container,) = spec["containers"]
    assert container["image"] == "registry/baton:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    settings = settings_of(config)
    assert (settings.model, settings.prefill.num_workers, settings.gateways) == ("/models/big", 3, 2)
    assert (settings.router.policy, settings.engine.max_model_len) == ("prefix", 4096)
    pods = [cluster["spec"]["headGroupSpec"]["template"], prefill["template"], decode["template"]]
    for pod in pods:
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["spec"]["serviceAccountName"] == "baton"
        for each in pod["spec"]["containers"]:
            assert {"name": "models", "mountPath": "/models", "readOnly": True} in each["volumeMounts"]
            assert {"name": "BATON_LOG_LEVEL", "value": "INFO"} in each["env"]
    assert service["spec"]["selector"].items() <= pods[0]["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app": "mine"}
    budget = next(each for each in documents if each["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"].items() <= pods[1]["metadata"]["labels"].items()
    monitor = documents[-1]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_network_policy_can_be_left_out() -> None:
    assert len(render({"networkPolicy": {"enabled": False}})) == 3


@pytest.mark.parametrize("key", ["version", "appVersion"])
def test_chart_has_the_version_of_this_release(key: str) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart[key]}"\n' in Path(ROOT / "pyproject.toml").read_text()
