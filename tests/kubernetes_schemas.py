"""Strict checks of Kubernetes documents: unknown fields, wrong types and missing fields are errors.

Kubernetes' own kinds are checked against its published schemas. Of custom resources the pod templates are
checked so, as pods; their other fields against the lists below, which are of KubeRay 1.5's and the Prometheus
operator's definitions.
"""

from typing import Any, Final

import kubernetes_validate

VERSION: Final = "1.34"
RAY_CLUSTER: Final = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
RAY_SERVICE: Final = {
    *("serveConfigV2", "upgradeStrategy", "rayClusterDeletionDelaySeconds", "rayClusterConfig"),
    *("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"),
}
GROUP: Final = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
ENDPOINT: Final = {"port", "path", "interval", "relabelings", "authorization"}


def check_document(document: dict[str, Any]) -> None:
    """Raise an error that names the field unless the API server would take the document as it is."""
    match document["kind"]:
        case "RayCluster":
            assert document["apiVersion"] == "ray.io/v1"
            _check_ray_cluster(document["spec"])
        case "RayService":
            assert document["apiVersion"] == "ray.io/v1"
            assert document["spec"].keys() <= RAY_SERVICE
            _check_ray_cluster(document["spec"]["rayClusterConfig"])
        case "ServiceMonitor":
            assert document["apiVersion"] == "monitoring.coreos.com/v1"
            assert document["spec"].keys() == {"selector", "endpoints"}
            for endpoint in document["spec"]["endpoints"]:
                assert endpoint.keys() <= ENDPOINT
                assert endpoint["authorization"]["credentials"].keys() == {"name", "key"}
        case _:
            kubernetes_validate.validate(document, VERSION, strict=True)


def _check_ray_cluster(spec: dict[str, Any]) -> None:
    assert spec.keys() <= RAY_CLUSTER
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group.keys() <= GROUP
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        template = group["template"]
        assert template.keys() == {"metadata", "spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        _check_probes(template["spec"]["containers"])


def _check_probes(containers: list[dict[str, Any]]) -> None:
    """KubeRay adds probes to a first container without: they need wget or Ray's dashboard.

    From initLivenessAndReadinessProbe of KubeRay's ray-operator/controllers/ray/common/pod.go, which also
    gives workers of a RayService a readiness probe of Serve's proxy.
    """
    for probe in ("readinessProbe", "livenessProbe"):
        assert "tcpSocket" in containers[0][probe], f"{probe} is KubeRay's"
