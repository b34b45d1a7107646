"""The Helm chart, rendered as Helm renders the few forms that it uses: Helm itself is not needed."""

import json
import re
from typing import Any, Final

import pytest
import yaml

from tests.unit.cluster.test_deploy import DEPLOY, ROOT

CHART: Final = DEPLOY / "helm/baton"
FORM: Final = re.compile(r"\{\{ (?:(toJson) )?\.(Release\.Name|Values(?:\.\w+)+) \}\}")


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def render(given: dict[str, Any], release: str = "baton") -> list[dict[str, Any]]:
    """The documents that would be applied. AssertionError for a form that is not known here."""

    def written(form: re.Match[str]) -> str:
        value: Any = {"Release": {"Name": release}, "Values": given}
        for name in form[2].split("."):
            value = value[name]
        assert form[1] or not isinstance(value, dict | list)
        return json.dumps(value) if form[1] else str(value)

    text = FORM.sub(written, (CHART / "templates/cluster.yaml").read_text())
    assert "{{" not in text
    return list(yaml.safe_load_all(text))


def test_as_it_is_it_is_the_cluster_of_kuberay() -> None:
    plain = (DEPLOY / "kuberay/raycluster.yaml").read_text()
    assert render(values()) == list(yaml.safe_load_all(plain))


def test_each_value_is_used_and_each_that_is_used_has_a_default() -> None:
    template = (CHART / "templates/cluster.yaml").read_text()
    used = {form[2].split(".")[1] for form in FORM.finditer(template) if form[2].startswith("Values")}
    assert used == set(values())


def test_what_is_given_arrives() -> None:
    given = values() | {
        "model": "/models/big",
        "workerImage": "baton:cuda",
        "prefill": {"replicas": 3},
        "workerResources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    cluster, config, service, policy = render(given, "mine")
    prefill, decode = cluster["spec"]["workerGroupSpecs"]
    assert [prefill["replicas"], prefill["maxReplicas"], decode["replicas"]] == [3, 3, 2]
    (container,) = prefill["template"]["spec"]["containers"]
    assert container["image"] == "baton:cuda"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    settings = yaml.safe_load(config["data"]["baton.yaml"])
    assert (settings["model"], settings["prefill"]["num_workers"]) == ("/models/big", 3)
    head = cluster["spec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app": "mine"}
    mounted = [volume["configMap"]["name"] for volume in head["spec"]["volumes"] if "configMap" in volume]
    assert mounted == [config["metadata"]["name"]] == ["mine"]


@pytest.mark.parametrize("key", ["version", "appVersion"])
def test_it_is_of_this_release(key: str) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart[key]}"\n' in (ROOT / "pyproject.toml").read_text()
