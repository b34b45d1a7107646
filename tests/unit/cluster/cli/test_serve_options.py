import argparse
from pathlib import Path

import pytest

from baton.cluster.cli.options import Option
from baton.cluster.cli.serve_options import SERVE_OPTIONS, add_options, engine_options, settings
from baton.config.cluster import ServeConfig
from baton.config.gateway import GatewaySettings
from baton.config.loader import leaves
from baton.errors import ConfigError

# Set in a file or by a variable: an option for each would hide those that are used.
WITHOUT_OPTION = {
    *("prefill.ray_resources", "decode.ray_resources", "prefill.cores_per_rank", "decode.cores_per_rank"),
    *(f"gateway.{name}" for name in GatewaySettings.__struct_fields__),
    *("router.host", "router.port", "router.max_attempts", "router.seed"),
    "router.link_timeout_s",  # as of all processes: link_timeout_s
}


def config(*arguments: str) -> ServeConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return settings(parser.parse_args(arguments)).build()


def test_the_model_is_enough() -> None:
    assert config("tiny") == ServeConfig(model="tiny")


def test_every_setting_has_one_option() -> None:
    options = (*SERVE_OPTIONS, *engine_options())
    keys = [option.key for option in options if isinstance(option, Option)]
    switches = {option.key for option in options if not isinstance(option, Option)}
    assert len(keys) == len(set(keys))
    assert {*keys, *switches, *WITHOUT_OPTION, "model"} == set(leaves(ServeConfig))


def test_spellings_of_vllm() -> None:
    given = config(
        *(
            "/models/Llama",
            "-tp",
            "2",
            "--max-num-seqs",
            "8",
            "--max-num-batched-tokens",
            "4k",
            "--seed",
            "3",
        ),
        *(
            "--block-size",
            "32",
            "--gpu-memory-utilization",
            "0.5",
            "--served-model-name",
            "l",
            "--dtype",
            "half",
        ),
        *("--max-model-len", "4K", "--port", "9000", "--no-enable-prefix-caching"),
    )
    engine = given.engine
    assert (engine.tensor_parallel_size, engine.seed, engine.dtype) == (2, 3, "float16")
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (8, 4000)
    assert (engine.cache.page_size, engine.cache.gpu_memory_utilization) == (32, 0.5)
    assert (engine.max_model_len, engine.cache.enable_prefix_caching) == (4096, False)
    assert (given.model_name, given.port) == ("l", 9000)


def test_roles_differ_in_number_ranks_and_pages() -> None:
    given = config("tiny", "--prefill", "2", "--decode-tp", "2", "--prefill-block-size", "64", "-tp", "4")
    prefill, decode = given.prefill.engine(given.engine), given.decode.engine(given.engine)
    assert (given.prefill.num_workers, given.decode.num_workers) == (2, 1)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (4, 2)
    assert (prefill.cache.page_size, decode.cache.page_size) == (64, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "--decode", "0"), "--decode: expected 1 or more"),
        (
            ("tiny", "--host", "0.0.0.0"),
            "--host: '0.0.0.0' can be reached from other machines",
        ),
        (("tiny", "--runtime", "podman"), "--runtime: expected one of 'ray', 'local', got 'podman'"),
        (
            ("tiny", "--runtime", "local", "--ray-address", "auto"),
            "--ray-address: runtime 'local'",
        ),
        (("tiny", "--block-size", "3"), "--block-size: expected a power of two, got 3"),
        (("tiny", "--prefill-page-size", "5"), "cache.page_size: expected a power of two, got 5"),
        ((), "model: expected a value, got none"),
        (("",), 'model: expected "tiny" or a directory, got an empty string'),
    ],
)
def test_what_cannot_be_is_told_by_its_flag(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        config(*arguments)


def test_a_file_fills_what_the_command_line_leaves(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("model: tiny\nruntime: local\nport: 1\n")
    given = config("--config", str(file), "--port", "2")
    assert (given.model, given.runtime, given.port) == ("tiny", "local", 2)
