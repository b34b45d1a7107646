"""Options that are generated from settings: their names, their values, and errors in their words."""

import argparse
import shlex
from pathlib import Path

import pytest

from baton.cluster.cli.commands.generate import engine_settings_of, generate, sampling_of
from baton.cluster.cli.options import INSTEAD, Parser
from baton.cluster.cli.settings import WITHOUT_OPTION, add_serve_options, settings_from
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineConfig, engine_config
from baton.config.loader import comments, leaves
from baton.errors import ConfigError
from baton.request import SamplingParams
from tests.unit.cluster.conftest import Baton

# The names of the options, which are vLLM's where vLLM has one. They must not change.
SERVE_FLAGS = """
--model --served-model-name --runtime --ray-address --host --port --gateways --routers --prefill --decode
--prefill-tp --decode-tp --prefill-pp --decode-pp --prefill-nnodes --decode-nnodes
--prefill-ep --no-prefill-ep --decode-ep --no-decode-ep
--prefill-block-size --prefill-page-size --decode-block-size
--decode-page-size --transport
--kv-digests --no-kv-digests --kv-streams
--router-policy --redis --decision-log --recording --recording-memory-bytes --local-prefill-tokens
--chat-template
--tool-call-parser --reasoning-parser --generation-config --override-generation-config
--default-chat-template-kwargs --operator-port --allowed-origins --otlp-traces-endpoint --tenants
--lora-modules --wake-on-request --no-wake-on-request
--cluster-key-file --start-timeout --link-timeout --step-timeout --drain-timeout --config --log-format
--planner --planner-ttft-ms --planner-tpot-ms --planner-attainment --planner-max-workers --planner-times
--planner-log
"""
ENGINE_FLAGS = """
--dtype --load-format --device --tensor-parallel-size -tp --pipeline-parallel-size -pp --nnodes
--enable-expert-parallel --no-enable-expert-parallel
--engine-seed --max-model-len --max-num-seqs --seed
--max-num-batched-tokens --scheduler-policy --max-queue-delay-ms --preferred-batch-sizes --block-size
--page-size --kv-cache-dtype --kv-transfer-dtype --kv-cache-memory --kv-cache-memory-bytes
--gpu-memory-utilization
--host-cache-memory --kv-disk-path --kv-disk-size
--enable-prefix-caching --no-enable-prefix-caching --batch-invariant --no-batch-invariant --quantization
--async-scheduling --no-async-scheduling --speculative-config --stream-priority
--enable-lora --no-enable-lora --max-loras --max-cpu-loras --max-lora-rank -q
--logits-processor --logits-processors
"""
GENERATE_FLAGS = """
--bad-words
--prompt-file --token-ids --chat --stop --json -q --quiet -v --verbose --max-tokens --min-tokens --temperature
--top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias
--allowed-token-ids --bad-words-token-ids --extra-args
--stop-token-ids --n --logprobs --prompt-logprobs --ignore-eos --no-ignore-eos --structured-outputs
--include-stop-str-in-output --no-include-stop-str-in-output --skip-special-tokens --no-skip-special-tokens
"""


def served(options: str) -> ServeConfig:
    parser = Parser("serve", None)
    add_serve_options(parser)
    return settings_from(ServeConfig, parser.parse(shlex.split(options))).build()


def generated(options: str) -> argparse.Namespace:
    parser = Parser("generate", None)
    generate.add_options(parser)
    return parser.parse(["model", *shlex.split(options)])


def engine(options: str) -> EngineConfig:
    return engine_config({"model": "m", **engine_settings_of(generated(options))})


@pytest.mark.parametrize(
    ("command", "flags"),
    [("serve", SERVE_FLAGS + ENGINE_FLAGS), ("generate", GENERATE_FLAGS + ENGINE_FLAGS)],
)
def test_help_has_every_option_and_no_other(baton: Baton, command: str, flags: str) -> None:
    status, out, _ = baton(command, "--help")
    columns = " ".join(line.strip().partition("  ")[0] for line in out.splitlines() if line.startswith("  -"))
    shown = {word.strip(",") for word in columns.split() if word.startswith("-")}
    assert (status, shown - {"-h", "--help"}) == (0, set(flags.split()))


def test_help_has_the_comments_of_the_settings(baton: Baton) -> None:
    out = " ".join(baton("serve", "--help").out.split())
    assert comments(EngineConfig)["tensor_parallel_size"] in out and "(default: 8000)" in out


def test_every_setting_has_an_option_or_is_listed_as_without() -> None:
    parser = Parser("serve", None)
    add_serve_options(parser)
    dests = {action.dest for action in parser._actions} - {"help", "config", "log_format"}
    assert dests == set(leaves(ServeConfig)) - WITHOUT_OPTION | {"model"}


def test_without_options_everything_is_the_default() -> None:
    assert served("tiny") == ServeConfig(model="tiny")
    assert sampling_of(generated("")) == SamplingParams(max_tokens=256)
    assert engine_settings_of(generated("")) == {}


def test_sampling_options_are_sampling_parameters() -> None:
    options = "--max-tokens 5 --top-k 3 --min-p 0.1 --n 2 --ignore-eos --logit-bias 5:-1.5,17:2"
    assert sampling_of(generated(f"{options} --stop-token-ids 5,17")) == SamplingParams(
        max_tokens=5,
        top_k=3,
        min_p=0.1,
        n=2,
        ignore_eos=True,
        logit_bias={5: -1.5, 17: 2.0},
        stop_token_ids=(5, 17),
    )


def test_engine_options_reach_their_part_of_the_configuration() -> None:
    config = engine(
        "-tp 2 -pp 3 --max-num-seqs 8 --block-size 32 --kv-cache-memory 1.5GiB --no-enable-prefix-caching "
        "--scheduler-policy dynamic --max-queue-delay-ms 2.5 --preferred-batch-sizes 4,8 --engine-seed 3"
    )
    assert (config.tensor_parallel_size, config.pipeline_parallel_size, config.seed) == (2, 3, 3)
    assert (config.cache.page_size, config.cache.enable_prefix_caching) == (32, False)
    assert config.cache.kv_cache_memory_bytes == 3 * 2**29
    scheduler = config.scheduler
    assert (scheduler.max_num_seqs, scheduler.policy, scheduler.max_queue_delay_ms) == (8, "dynamic", 2.5)
    assert scheduler.preferred_batch_sizes == (4, 8)


def test_spellings_of_vllm() -> None:
    config = engine(
        "--kv-cache-memory-bytes 1GiB --enable-prefix-caching --dtype half --load-format safetensors"
    )
    assert (config.cache.kv_cache_memory_bytes, config.cache.enable_prefix_caching) == (2**30, True)
    assert (config.dtype, config.load_format, engine("--dtype float").dtype) == ("float16", "auto", "float32")
    given = served("/models/l --max-num-batched-tokens 4k --seed 3 --max-model-len 4K --port 9000")
    assert (given.engine.scheduler.max_num_batched_tokens, given.engine.max_model_len) == (4000, 4096)
    assert (given.engine.seed, given.model_name, given.port) == (3, "l", 9000)
    given = served("tiny -q int8 --kv-cache-dtype fp8_e4m3")
    assert (given.engine.quantization, given.engine.cache.kv_cache_dtype) == ("int8", "fp8")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--served-model-name a b", "--served-model-name takes one value: unexpected argument 'b'"),
        ("--lora-modules a=/x b=/y", "put commas between several values: --lora-modules a=/x,b=/y"),
        ("b", "unexpected argument 'b'"),
    ],
)
def test_second_value_is_refused_by_the_name_of_its_option(
    baton: Baton, options: str, complaint: str
) -> None:
    status, _, err = baton("serve", "tiny", *options.split())
    assert status == 2 and complaint in err


@pytest.mark.parametrize(
    "flag", ["--enable-eplb", "--max-log-len", "--enable-reasoning", "--model-impl", "--expert-placement"]
)
def test_option_of_another_meaning_is_not_suggested(baton: Baton, flag: str) -> None:
    assert "did you mean" not in baton("serve", "tiny", flag).err


def test_roles_differ_in_number_ranks_and_pages() -> None:
    given = served("tiny --prefill 2 --decode-tp 2 --prefill-pp 2 --prefill-block-size 64 -tp 4")
    prefill, decode = given.prefill.engine(given.engine), given.decode.engine(given.engine)
    assert (given.prefill.num_workers, given.decode.num_workers) == (2, 1)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (4, 2)
    assert (prefill.num_ranks, decode.num_ranks, given.num_ranks) == (8, 2, 18)
    assert (prefill.cache.page_size, decode.cache.page_size) == (64, 16)


def test_roles_differ_in_expert_parallelism() -> None:
    for options, expected in (
        ("--enable-expert-parallel --no-decode-ep", (True, False)),
        ("--decode-ep", (False, True)),
        ("--enable-expert-parallel", (True, True)),
    ):
        given = served(f"tiny {options}")
        roles = given.prefill.engine(given.engine), given.decode.engine(given.engine)
        assert tuple(role.enable_expert_parallel for role in roles) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("25.6k", 25600), ("1m", 10**6), ("1M", 2**20), ("4096", 4096), ("5", 5)]
)
def test_counts_may_have_a_unit(text: str, expected: int) -> None:
    assert engine(f"--max-model-len {text}").max_model_len == expected


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        *(
            (f"--max-model-len={text}", "expected an integer such as 4096, 4k")
            for text in ("", "k", "-1", "1e12", "4.5", "4.5K", "4 k", "4kk", "9" * 20)
        ),
        *(
            (f"--logit-bias={text}", f"expected biases such as 5:-1.5,17:2, got {text!r}")
            for text in ("", "5", "5:", "a:1", "5:1:2", "5:1,")
        ),
        *(
            (f"{flag}={text}", f"{flag}: expected integers such as 5,17, got {text!r}")
            for flag in ("--token-ids", "--stop-token-ids")
            for text in ("", "1,", "1 2", "one", "1.5")
        ),
        ("--stop=", "a stop string must not be empty"),
        ("--max-tokens=three", "--max-tokens: expected int | None, got 'three'"),
        ("--dtype=int3", "--dtype: expected one of 'auto', 'float32'"),
        ("--max-tokns=3", "unknown option '--max-tokns=3'; did you mean --max-tokens?"),
        ("--temp=0", "did you mean --temperature?"),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("--data-parallel-size-local=2", "give --prefill N and --decode N"),
        ("-O3", "nothing is compiled by torch"),
        ("--quantization=awq", "a checkpoint in awq is recognised by its config.json"),
        ("--load-format=mistral", "a model is a directory in Hugging Face layout"),
        ("-1+2=", "put -- before a text that starts with a dash"),
        *((f"{flag}=x", instead.partition(":")[0]) for flag, instead in INSTEAD.items()),
    ],
)
def test_wrong_option_is_one_line_and_status_2(baton: Baton, option: str, complaint: str) -> None:
    status, out, err = baton("generate", "tiny", "x", option)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tiny --decode 0", "--decode: expected 1 or more"),
        ("tiny --host 0.0.0.0", "--host: '0.0.0.0' can be reached from other machines"),
        ("tiny --runtime local --ray-address auto", "--ray-address: runtime 'local'"),
        (
            """tiny --override-generation-config '{"top_p": 2}'""",
            "--override-generation-config: top_p must be",
        ),
        ("tiny --page-size 3", "--page-size: expected a power of two, got 3"),
        ("tiny --prefill-page-size 5", "cache.page_size: expected a power of two, got 5"),
        ("", "model: expected a value, got none"),
        ("''", 'model: expected "tiny", a directory or a repository, got an empty string'),
    ],
)
def test_settings_that_contradict_each_other_are_named_by_their_flag(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        served(options)


@pytest.mark.parametrize("options", ["--port 1 tiny --gateways 2", "tiny --port 1 --gateways 2"])
def test_model_may_stand_anywhere(options: str) -> None:
    assert served(options).model == "tiny"


def test_several_models_are_given_one_by_one_or_in_a_file(tmp_path: Path) -> None:
    first, second = served("--model a=tiny --model b=/models/b --decode 2 --max-model-len 512").models
    assert (first.model_name, first.model, second.model_name, second.model) == ("a", "tiny", "b", "/models/b")
    assert (first.decode.num_workers, second.decode.num_workers, second.engine.max_model_len) == (2, 2, 512)
    file = tmp_path / "baton.yaml"
    file.write_text(
        "model: tiny\nengine: {max_model_len: 512, cache: {page_size: 32}}\nother_models:\n"
        "  b: {model: /models/b, decode: {num_workers: 3}, engine: {cache: {page_size: 64}}}\n"
    )
    first, second = served(f"--config {file}").models
    assert (first.model_name, first.decode.num_workers, second.decode.num_workers) == ("tiny", 1, 3)
    assert (first.engine.cache.page_size, second.engine.cache.page_size) == (32, 64)
    assert second.engine.max_model_len == 512


def test_path_may_have_an_equals_sign_in_it() -> None:
    assert served("--model /data/x=1/m").model == "/data/x=1/m"
    assert served("tiny --model m=/data/x=1/m").models[1].model == "/data/x=1/m"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model a=tiny --model a=/models/b", "--model: each model needs a name of its own, of at most 64"),
        (f"--model {'a' * 65}=tiny --model b=tiny", "--model: expected up to 64 characters"),
        (
            "--model a=tiny --model b=/m --planner advise --planner-ttft-ms 9 --planner-times t",
            "--planner: this",
        ),
    ],
)
def test_settings_that_several_models_cannot_have_are_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        served(options)
