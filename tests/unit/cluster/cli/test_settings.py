from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.settings import (
    MAX_FILE_BYTES,
    Given,
    Settings,
    check_variables,
    read_mapping,
    variable,
)
from baton.config.cluster import ServeConfig
from baton.config.environment import VARIABLES
from baton.config.loader import leaves
from baton.errors import ConfigError


def settings(
    file: Path | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> Settings[ServeConfig]:
    given = {key.replace("__", "."): Given(value, f"--{key}") for key, value in flags.items()}
    return Settings(ServeConfig, flags=given, file=file, environment=environment or {})


def write(directory: Path, text: str) -> Path:
    path = directory / "baton.yaml"
    path.write_text(text)
    return path


def test_option_beats_variable_which_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path, "model: a\nport: 1\ndecode: {num_workers: 3}\nengine: {cache: {page_size: 32}}\n")
    environment = {"BATON_PORT": "2", "BATON_MODEL": "b", "BATON_ENGINE_MAX_MODEL_LEN": "512"}
    given = settings(file, environment, model="c")
    config = given.build()
    assert (config.model, config.port, config.decode.num_workers) == ("c", 2, 3)
    assert (config.engine.cache.page_size, config.engine.max_model_len) == (32, 512)
    keys = ("model", "port", "decode.num_workers", "prefill.num_workers")
    assert [given.origin(key) for key in keys] == [
        "--model",
        "BATON_PORT",
        f"{file}: decode.num_workers",
        "default",
    ]


def test_every_setting_has_a_variable_of_its_own() -> None:
    names = [variable(key) for key in leaves(ServeConfig)]
    assert len(names) == len(set(names))
    assert variable("engine.cache.page_size") == "BATON_ENGINE_CACHE_PAGE_SIZE"


def test_variables_hold_lists_mappings_and_sizes() -> None:
    config = settings(
        environment={
            "BATON_ENGINE_SCHEDULER_PREFERRED_BATCH_SIZES": "[4, 8]",
            "BATON_PREFILL_RAY_RESOURCES": '{"prefill": 1}',
            "BATON_ENGINE_CACHE_KV_CACHE_MEMORY_BYTES": "1GiB",
            "BATON_ENGINE_CACHE_ENABLE_PREFIX_CACHING": "false",
        },
        model="tiny",
    ).build()
    assert config.engine.scheduler.preferred_batch_sizes == (4, 8)
    assert config.prefill.ray_resources == {"prefill": 1.0}
    assert config.engine.cache.kv_cache_memory_bytes == 2**30
    assert not config.engine.cache.enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: tiny", r"baton.yaml: unknown configuration key 'modle'; did you mean 'model'\?"),
        (
            "engine: {cache: {pagesize: 1}}",
            r"key 'engine.cache.pagesize'; did you mean 'engine.cache.page_size'",
        ),
        ("model: tiny\nport: x", r"baton.yaml: port: expected .*, got 'x'"),
        (
            "model: tiny\nengine: {cache: {page_size: 3}}",
            r"engine.cache.page_size: expected a power of two, got 3",
        ),
        ("- tiny", "expected settings such as 'model: tiny', got list"),
        ("model: [", r"baton.yaml: cannot be read: line \d, column \d+: expected the node content"),
        ("model: 2024-13-45", "baton.yaml: cannot be read: line 1, column 8: expected a valid timestamp"),
        (f"port: {'9' * 5000}", "baton.yaml: cannot be read: line 1, column 7: expected a valid int"),
        ("model: a\nmodel: b", "baton.yaml: cannot be read: line 2, column 1: the key 'model' is repeated"),
        ("prefill: 2", r"baton.yaml: prefill: expected a mapping, got 2 \(int\)"),
        ("{1: 2}", "expected settings such as"),
    ],
)
def test_error_in_a_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(write(tmp_path, text)).build()


def test_wrong_value_is_named_by_its_origin() -> None:
    with pytest.raises(ConfigError, match="^BATON_PORT: expected .*, got 'eighty'"):
        settings(environment={"BATON_PORT": "eighty"}, model="tiny")
    with pytest.raises(ConfigError, match="^BATON_ENGINE_CACHE_PAGE_SIZE: expected a power of two, got 3"):
        settings(environment={"BATON_ENGINE_CACHE_PAGE_SIZE": "3"}, model="tiny").build()
    with pytest.raises(ConfigError, match="^--port: expected"):
        settings(model="tiny", port=-1).build()


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_mapping(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_mapping(tmp_path)
    large = write(tmp_path, " " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="1,048,576 bytes at most"):
        read_mapping(large)


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_mapping(write(tmp_path, "# nothing yet\n")) == {}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("BATON_PREFIL_NUM_WORKERS", "BATON_PREFILL_NUM_WORKERS"),
        ("BATON_PREFILL", "BATON_PREFILL_NUM_WORKERS"),
        ("BATON_MAX_MODEL_LEN", "BATON_ENGINE_MAX_MODEL_LEN"),
        ("BATON_CACHEDIR", "BATON_CACHE_DIR"),
        ("BATON_TENANT", "BATON_TENANTS"),
    ],
)
def test_misspelt_variable_is_answered_with_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown variable {given}; did you mean {meant}\?$"):
        check_variables({given: "2"})


def test_variables_of_other_commands_and_programs_pass() -> None:
    check_variables(dict.fromkeys(VARIABLES, "x"))
    check_variables({"BATON_UID": "0", "BATON_GID": "0", "BATON_TWIRLING": "yes"})
    check_variables({"BATON_STRICT": "true", "BATON_LOCAL_PREFILL_TOKENS": "1"})  # of other commands
    check_variables({"BATON_SERVICE_HOST": "10.0.0.1", "BATON_SERVICE_PORT_HTTP": "8000"})  # of Kubernetes
    check_variables({"BATON_PORT_8000_TCP_ADDR": "10.0.0.1", "BATON_GATEWAY_PORT": "tcp://10.0.0.1:8000"})
