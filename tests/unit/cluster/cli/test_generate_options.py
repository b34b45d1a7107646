import argparse
from typing import Any

import msgspec
import pytest

from baton.cluster.cli.generate_options import (
    DEFAULT_MAX_TOKENS,
    OPTIONS,
    SWITCHES,
    add_options,
    engine_settings,
    flags_of_settings,
    option_flags,
    sampling_params,
)
from baton.config.engine import EngineConfig, engine_config
from baton.request import SamplingParams
from tests.test_knobs import KNOBS


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(["model", *arguments])


def test_without_options_everything_is_the_default() -> None:
    arguments = parse()
    assert sampling_params(arguments) == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    assert engine_settings(arguments) == {}


def test_sampling_options_are_sampling_parameters() -> None:
    arguments = parse("--max-tokens", "5", "--top-k", "3", "--min-p", "0.1", "--n", "2", "--ignore-eos")
    assert sampling_params(arguments) == SamplingParams(
        max_tokens=5, top_k=3, min_p=0.1, n=2, ignore_eos=True
    )


def test_the_batching_options_reach_the_scheduler() -> None:
    spelled = [
        "--scheduler-policy",
        "dynamic",
        "--max-queue-delay-ms",
        "2.5",
        "--preferred-batch-sizes",
        "4,8",
    ]
    config = engine_config({"model": "m", **engine_settings(parse(*spelled, "--engine-seed", "3"))})
    assert config.scheduler.policy == "dynamic"
    assert config.scheduler.max_queue_delay_ms == 2.5
    assert config.scheduler.preferred_batch_sizes == (4, 8)
    assert config.seed == 3


def test_logit_biases_are_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = sampling_params(parse("--logit-bias", "5:-1.5,17:2"))
    assert sampling.logit_bias == {5: -1.5, 17: 2.0}
    for wrong in ("", "5", "5:", "a:1", "5:1:2", "5:1,"):
        with pytest.raises(SystemExit):
            parse("--logit-bias", wrong)
        message = f"argument --logit-bias: expected biases such as 5:-1.5,17:2, got {wrong!r}"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--token-ids", "--stop-token-ids"])
@pytest.mark.parametrize("value", ["", "1,", "1 2", "one", "1.5"])
def test_token_ids_that_are_none_are_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(flag, value)
    assert f"argument {flag}: expected integers such as 5,17, got {value!r}" in capsys.readouterr().err


def test_the_flags_that_were_typed_name_their_settings() -> None:
    flags = flags_of_settings(parse("--page-size", "32"))
    assert flags["engine.cache.page_size"] == "--page-size"
    assert flags["engine.cache.kv_cache_memory_bytes"] == "--kv-cache-memory"


def test_spellings_of_vllm() -> None:
    spelled = ["--kv-cache-memory-bytes", "1GiB", "--enable-prefix-caching", "--dtype", "half"]
    spelled += ["--load-format", "safetensors", "--max-model-len", "4k"]
    config = engine_config({"model": "m", **engine_settings(parse(*spelled))})
    assert (config.cache.kv_cache_memory_bytes, config.cache.enable_prefix_caching) == (2**30, True)
    assert (config.dtype, config.load_format, config.max_model_len) == ("float16", "auto", 4000)


def test_engine_options_reach_their_part_of_the_configuration() -> None:
    spelled = ["-tp", "2", "--max-num-seqs", "8", "--block-size", "32", "--kv-cache-memory", "1.5GiB"]
    config = engine_config({"model": "m", **engine_settings(parse(*spelled, "--no-enable-prefix-caching"))})
    assert config.tensor_parallel_size == 2
    assert config.scheduler.max_num_seqs == 8
    assert config.cache.page_size == 32
    assert config.cache.kv_cache_memory_bytes == 3 * 2**29
    assert not config.cache.enable_prefix_caching


@pytest.mark.parametrize("key", [entry.key for entry in (*OPTIONS, *SWITCHES)])
def test_every_option_fills_a_field_that_exists(key: str) -> None:
    struct, *path = key.split(".")
    named: Any = {"sampling": SamplingParams, "engine": EngineConfig}[struct]
    for name in path:
        (named,) = (field.type for field in msgspec.structs.fields(named) if field.name == name)


def test_every_setting_has_an_option() -> None:
    keys = {entry.key for entry in (*OPTIONS, *SWITCHES)}
    engine = {f"engine.{name}" for name in KNOBS if name != "model"}
    sampling = {f"sampling.{name}" for name in SamplingParams.__struct_fields__}
    assert keys == engine | sampling


def test_every_flag_is_known_to_the_search_for_the_nearest() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    text = parser.format_help()
    assert all(flag in text for flag in option_flags())
