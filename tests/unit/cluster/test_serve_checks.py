import json
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.model_directory import resolve_model
from baton.cluster.serve_plan import check_model, check_tenants, speech_of
from baton.config.cluster import ServeConfig
from baton.config.loader import build
from baton.errors import ConfigError, ModelError
from tests.unit.cluster.model_directories import with_config_alone, with_pickled_weights, without_weights


def config(model: object = "tiny", **settings: Any) -> ServeConfig:
    return build(ServeConfig, {"model": str(model), **settings})


def test_a_model_that_can_be_loaded_is_found() -> None:
    assert check_model(config()) == resolve_model("tiny")


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    with_config_alone(tmp_path)
    assert check_model(config(tmp_path, engine={"load_format": "dummy"})) == tmp_path


def test_damaged_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json"):
        check_model(config(tmp_path))
    with_config_alone(tmp_path)
    with pytest.raises(ModelError, match="found no weights"):
        check_model(config(tmp_path))
    with_pickled_weights(tmp_path)
    with pytest.raises(ModelError, match="pickled weights"):
        check_model(config(tmp_path))
    weights = (resolve_model("tiny") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])  # of a download that broke off
    with pytest.raises(ModelError, match="model.safetensors"):
        check_model(config(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"max_model_len": 10**6}}, "^max_model_len: the model has positions for 4096 tokens"),
        ({"decode": {"tensor_parallel_size": 3}}, "^decode.tensor_parallel_size: KV heads: .* over 3 "),
        ({"engine": {"tensor_parallel_size": 3}}, "^engine.tensor_parallel_size: KV heads: .* over 3 "),
    ],
)
def test_settings_that_do_not_fit_the_model_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config(**settings))


def test_workers_that_there_are_none_of_split_nothing() -> None:
    check_model(config(prefill={"num_workers": 0, "tensor_parallel_size": 3}))


def test_a_file_of_tenants_is_read(tmp_path: Path) -> None:
    check_tenants(config())
    file = tmp_path / "tenants.yaml"
    with pytest.raises(ConfigError, match="tenants.yaml: cannot be read"):
        check_tenants(config(tenants=str(file)))
    file.write_text(f"tenants: {{acme: {{keys: ['sha256:{'0' * 64}']}}}}")
    check_tenants(config(tenants=str(file)))
    file.write_text("tenants: {acme: {keys: [secret]}}")
    with pytest.raises(ConfigError, match=r"tenants.acme.keys\[0\]: expected 'sha256:'"):
        check_tenants(config(tenants=str(file)))


def test_form_of_prompts_follows_from_the_model_files(tmp_path: Path) -> None:
    with_config_alone(tmp_path)
    assert speech_of(tmp_path) == "token ids"
    without_weights(tmp_path)
    assert speech_of(tmp_path) == "chat"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert speech_of(tmp_path) == "text"
