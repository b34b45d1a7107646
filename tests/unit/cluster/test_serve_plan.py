import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cluster.model_directory import resolve_model
from baton.cluster.runtimes.base import ProcessSpec
from baton.cluster.serve_plan import (
    Topology,
    check_model,
    check_settings,
    more_workers,
    router_ports,
    specs,
    speech_of,
    with_role,
)
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.engine import EngineSettings
from baton.config.gateway import GatewayConfig, GatewayModel, TextSettings
from baton.config.loader import build
from baton.config.router import RouterConfig
from baton.errors import ConfigError, ModelError
from baton.messages.workers import Address, WorkerRole
from tests.lora_adapters import save_adapter
from tests.tiny_models import write_config
from tests.unit.cluster.model_directories import with_config_alone, with_pickled_weights, without_weights

ROUTER = Address("127.0.0.1", 7000)


def plan(num_gpus: int = 0, **settings: object) -> list[ProcessSpec]:
    config = build(ServeConfig, {"model": "tiny", **settings})
    return specs(config, Topology(routers=(ROUTER,), host="", port=8000, num_gpus=num_gpus))


def workers(planned: list[ProcessSpec]) -> list[WorkerConfig]:
    return [spec.config for spec in planned if isinstance(spec.config, WorkerConfig)]


def test_every_process_knows_the_router() -> None:
    planned = plan(prefill={"num_workers": 2}, decode={"num_workers": 3}, gateways=2)
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    names = [*workers, "router-0", "gateway-0", "gateway-1"]
    assert [spec.name for spec in planned] == names
    for spec in planned:
        if isinstance(spec.config, RouterConfig):
            assert (spec.config.host, spec.config.port) == (ROUTER.host, ROUTER.port)
        else:
            assert isinstance(spec.config, WorkerConfig | GatewayConfig)
            assert spec.config.routers == (ROUTER,)


def test_further_workers_are_planned_as_the_first_ones_under_unused_names() -> None:
    config = build(ServeConfig, {"model": "tiny", "decode": {"num_workers": 3}})
    topology = Topology(routers=(ROUTER,), host="", port=8000, num_gpus=0)
    first = {spec.name: spec for spec in specs(config, topology)}
    names = [name for name in first if name != "decode-1"]  # which was taken away
    more = more_workers(config, config, topology, WorkerRole.DECODE, 2, names)
    assert [spec.name for spec in more] == ["decode-1", "decode-3"]
    assert more[0] == first["decode-1"]


def test_stages_of_a_worker_are_spread_over_its_nodes() -> None:
    given = {"model": "tiny", "ray_address": "auto", "engine": {"nnodes": 2}, "prefill": {"nnodes": 1}}
    config = build(ServeConfig, {**given, "decode": {"pipeline_parallel_size": 4, "tensor_parallel_size": 2}})
    topology = Topology(routers=(ROUTER,), host="", port=8000, num_gpus=0)
    prefill, decode = (spec for spec in specs(config, topology) if spec.num_ranks)
    assert (prefill.num_ranks, prefill.num_nodes) == (1, 1)
    assert (decode.num_ranks, decode.num_nodes) == (8, 2)
    assert isinstance(decode.config, WorkerConfig) and decode.config.engine.ranks_per_node == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ray_address": "auto", "engine": {"nnodes": 2, "pipeline_parallel_size": 3}},
            "nnodes: 3 pipeline stages .* cannot be spread evenly over 2 nodes",
        ),
        (
            {"ray_address": "auto", "decode": {"nnodes": 2}},
            "nnodes: 1 pipeline stages .* cannot be spread evenly over 2 nodes",
        ),
        (
            {"ray_address": "auto", "engine": {"nnodes": 65, "pipeline_parallel_size": 65}},
            "engine.nnodes: expected int, at least 1, at most 64, got 65",
        ),
        (
            {"engine": {"nnodes": 2, "pipeline_parallel_size": 2}},
            "nnodes: 2 nodes for a worker need a Ray cluster of several nodes: give --ray-address",
        ),
        (
            {"runtime": "local", "engine": {"nnodes": 2, "pipeline_parallel_size": 2}},
            "nnodes: 2 nodes for a worker need a Ray cluster of several nodes: give --ray-address",
        ),
    ],
)
def test_nodes_that_stages_cannot_be_spread_over_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ServeConfig, {"model": "tiny", **settings})


def test_role_without_workers_may_have_any_number_of_stages() -> None:
    decode = {"pipeline_parallel_size": 2}
    prefill = {"num_workers": 0}
    build(
        ServeConfig,
        {
            "model": "tiny",
            "ray_address": "auto",
            "engine": {"nnodes": 2},
            "decode": decode,
            "prefill": prefill,
        },
    )


def test_each_model_has_workers_of_its_own_and_the_gateways_serve_all() -> None:
    other = {"model": "/models/b", "prefill": {"num_workers": 0}, "decode": {"num_workers": 2}}
    config = build(ServeConfig, {"model": "tiny", "served_model_name": "a", "other_models": {"b": other}})
    topology = Topology(routers=(ROUTER,), host="", port=8000, num_gpus=0)
    planned = specs(config, topology)
    workers = {spec.name: spec.config for spec in planned if isinstance(spec.config, WorkerConfig)}
    assert list(workers) == ["a-prefill-0", "a-decode-0", "b-decode-0", "b-decode-1"]
    assert {each.model_name for each in workers.values()} == {"a", "b"}
    assert workers["b-decode-1"].engine.model == "/models/b"
    (gateway,) = (spec.config for spec in planned if isinstance(spec.config, GatewayConfig))
    assert (gateway.model, gateway.served_model_name, gateway.expects_prefill) == ("tiny", "a", True)
    assert gateway.other_models == {"b": GatewayModel(model="/models/b", expects_prefill=False)}
    (more,) = more_workers(config, config.models[1], topology, WorkerRole.DECODE, 1, list(workers))
    assert (more.name, more.config) == (
        "b-decode-2",
        msgspec.structs.replace(workers["b-decode-1"], name="b-decode-2"),
    )


def test_adapters_of_each_model_go_to_the_gateways_with_it(tmp_path: Path) -> None:
    adapter = save_adapter(resolve_model("tiny"), tmp_path / "a")
    other = {"model": "tiny", "lora_modules": [f"law={adapter.path}"]}
    settings: dict[str, Any] = {
        "model": "tiny",
        "served_model_name": "a",
        "engine": {"enable_lora": True},
        "gateway": {"lora_modules": [f"sql={adapter.path}"]},
        "other_models": {"b": other},
    }
    config = build(ServeConfig, settings)
    topology = Topology(routers=(ROUTER,), host="", port=8000, num_gpus=0)
    (gateway,) = (spec.config for spec in specs(config, topology) if isinstance(spec.config, GatewayConfig))
    assert gateway.lora_modules == (f"sql={adapter.path}",)
    assert gateway.other_models["b"].lora_modules == (f"law={adapter.path}",)
    for each in config.models:
        check_model(each)
    without = settings | {"other_models": {"b": {**other, "engine": {"enable_lora": False}}}}
    with pytest.raises(ConfigError, match="--enable-lora"):
        check_model(build(ServeConfig, without).models[1])
    for name in ("a", "b", "sql"):
        taken = settings | {"other_models": {"b": {**other, "lora_modules": [f"{name}={adapter.path}"]}}}
        with pytest.raises(ConfigError, match=f"{name!r} is the name of another model or adapter"):
            build(ServeConfig, taken)


def test_worker_that_has_flipped_is_started_in_its_new_role() -> None:
    flipped = with_role(plan()[0], WorkerRole.DECODE)
    assert isinstance(flipped.config, WorkerConfig)
    assert (flipped.name, flipped.role, flipped.config.role) == ("prefill-0", "decode", WorkerRole.DECODE)


def test_settings_that_serve_accepts_are_accepted_by_every_process() -> None:
    most = {"drain_timeout_s": 0.0, "link_timeout_s": 600.0, "step_timeout_s": 86_400.0, "routers": 2}
    config = build(ServeConfig, {"model": "tiny", "router": {"seed": 2**63 - 1}, **most})
    topology = Topology(routers=(ROUTER, Address("127.0.0.1", 7001)), host="", port=8000, num_gpus=0)
    for spec in specs(config, topology):
        assert msgspec.json.decode(msgspec.json.encode(spec.config), type=type(spec.config)) == spec.config


def test_routers_have_ports_of_their_own_and_one_redis() -> None:
    addresses = (ROUTER, Address("127.0.0.1", 7001))
    config = build(ServeConfig, {"model": "tiny", "routers": 2, "router": {"seed": 5}})
    planned = specs(config, Topology(routers=addresses, host="", port=8000, num_gpus=0, redis="unix:///r"))
    routers = [spec for spec in planned if isinstance(spec.config, RouterConfig)]
    assert [spec.name for spec in routers] == ["router-0", "router-1"]
    told = [spec.config for spec in routers if isinstance(spec.config, RouterConfig)]
    assert [Address(each.host, each.port) for each in told] == list(addresses)
    assert {each.redis for each in told} == {"unix:///r"}
    assert len({each.seed for each in told}) == 2
    assert all(each.routers == addresses for each in workers(planned))


@pytest.mark.parametrize(("port", "expected"), [(0, [0, 0, 0]), (7000, [7000, 7001, 7002])])
def test_a_port_that_is_given_is_the_first_routers(port: int, expected: list[int]) -> None:
    config = build(ServeConfig, {"model": "tiny", "routers": 3, "router": {"port": port}})
    assert router_ports(config) == expected


def test_gateways_share_the_port() -> None:
    gateways = [spec.config for spec in plan(gateways=2) if isinstance(spec.config, GatewayConfig)]
    assert [(gateway.port, gateway.shares_port) for gateway in gateways] == [(8000, True)] * 2


def test_roles_have_ranks_and_pages_of_their_own() -> None:
    planned = plan(prefill={"tensor_parallel_size": 2}, decode={"page_size": 64})
    prefill, decode = workers(planned)
    assert (prefill.role, prefill.engine.tensor_parallel_size) == (WorkerRole.PREFILL, 2)
    assert (decode.role, decode.engine.cache.page_size) == (WorkerRole.DECODE, 64)
    assert [spec.num_ranks for spec in planned] == [2, 1, 0, 0]


def test_workers_that_wait_for_gpus_have_one_each() -> None:
    """Nodes with GPUs may join Ray later."""
    planned = plan(num_gpus=0, engine={"device": "cuda"})
    assert [spec.gpus_per_rank for spec in planned] == [1.0] * 2 + [0.0] * 2
    assert [worker.engine.cache.gpu_memory_utilization for worker in workers(planned)] == [0.9] * 2


@pytest.mark.parametrize(
    ("num_gpus", "gpus_per_rank", "share"), [(0, 0.0, 0.9), (1, 0.5, 0.45), (2, 1.0, 0.9), (8, 1.0, 0.9)]
)
def test_ranks_share_gpus_that_are_fewer(num_gpus: int, gpus_per_rank: float, share: float) -> None:
    planned = plan(num_gpus)
    assert [spec.gpus_per_rank for spec in planned] == [gpus_per_rank] * 2 + [0.0] * 2
    assert [worker.engine.cache.gpu_memory_utilization for worker in workers(planned)] == [share] * 2


@pytest.mark.parametrize(
    ("num_gpus", "asked", "priorities", "of_mps"),
    [
        (0, 0, [0, 0], [None, None]),
        (1, 0, [0, -1], [1, 0]),  # of the prefill worker and of the decode worker
        (1, -3, [-3, -3], [1, 0]),
        (2, 0, [0, 0], [None, None]),
    ],
)
def test_decode_goes_before_prefill_on_a_gpu_that_they_share(
    num_gpus: int, asked: int, priorities: list[int], of_mps: list[int | None]
) -> None:
    planned = plan(num_gpus, engine={"stream_priority": asked})
    assert [worker.engine.stream_priority for worker in workers(planned)] == priorities
    assert [spec.mps_priority for spec in planned] == [*of_mps, None, None]


def test_workers_and_ranks_of_both_roles_are_counted() -> None:
    config = build(
        ServeConfig,
        {
            "model": "tiny",
            "prefill": {"num_workers": 2, "tensor_parallel_size": 3},
            "decode": {"num_workers": 4},
            "engine": {"tensor_parallel_size": 2},
        },
    )
    assert list(config.pools) == list(WorkerRole)
    assert (config.num_workers, config.num_ranks) == (6, 2 * 3 + 4 * 2)


def test_device_cpu_is_used_beside_gpus() -> None:
    planned = plan(8, engine=EngineSettings(device="cpu"))
    assert [spec.gpus_per_rank for spec in planned] == [0.0] * 4
    assert [worker.engine.device for worker in workers(planned)] == ["cpu"] * 2


@pytest.mark.parametrize(
    ("num_gpus", "asked", "planned"), [(0, "auto", "cpu"), (1, "auto", "cuda"), (0, "cuda", "cuda")]
)
def test_device_of_a_worker_is_planned_from_the_gpus(num_gpus: int, asked: str, planned: str) -> None:
    processes = plan(num_gpus, engine={"device": asked})
    assert [worker.engine.device for worker in workers(processes)] == [planned] * 2


def test_policy_and_bounds_reach_the_router_and_the_workers() -> None:
    planned = plan(router={"policy": "round-robin", "local_prefill_tokens": 99}, transport="tcp")
    (router,) = [spec.config for spec in planned if isinstance(spec.config, RouterConfig)]
    assert (router.policy, router.local_prefill_tokens) == ("round-robin", 99)
    assert [worker.transport for worker in workers(planned)] == ["tcp"] * 2


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
        ({"decode": {"pipeline_parallel_size": 99}}, "^decode.pipeline_parallel_size: .* layers .* over 99 "),
        ({"engine": {"pipeline_parallel_size": 99}}, "^engine.pipeline_parallel_size: .* layers .* over 99 "),
        ({"engine": {"tensor_parallel_size": 3}}, "^engine.tensor_parallel_size: KV heads: .* over 3 "),
        (
            {"decode": {"enable_expert_parallel": True}},
            "^decode.enable_expert_parallel: expert parallelism: .* has no experts",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config(**settings))


def test_settings_that_latent_attention_does_not_support_are_told(tmp_path: Path) -> None:
    keys = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    engine = {"load_format": "dummy", "cache": {"kv_cache_dtype": "fp8"}}
    with pytest.raises(ConfigError, match="^cache.kv_cache_dtype: DeepseekV3ForCausalLM supports 'auto'"):
        check_model(config(write_config(tmp_path, **keys), engine=engine))


def test_weights_that_are_quantised_already_are_not_quantised_again(tmp_path: Path) -> None:
    directory = write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    engine = {"load_format": "dummy", "quantization": "int8"}
    with pytest.raises(ConfigError, match="^quantization: int8 was asked for, but the weights are in fp8"):
        check_model(config(directory, engine=engine))


def test_role_without_workers_splits_nothing() -> None:
    check_model(config(prefill={"num_workers": 0, "tensor_parallel_size": 3}))


def test_a_file_of_tenants_is_read(tmp_path: Path) -> None:
    check_settings(config())
    file = tmp_path / "tenants.yaml"
    with pytest.raises(ConfigError, match="tenants.yaml: cannot be read"):
        check_settings(config(tenants=str(file)))
    file.write_text(f"tenants: {{acme: {{keys: ['sha256:{'0' * 64}']}}}}")
    check_settings(config(tenants=str(file)))
    file.write_text("tenants: {acme: {keys: [secret]}}")
    with pytest.raises(ConfigError, match=r"tenants.acme.keys\[0\]: expected 'sha256:'"):
        check_settings(config(tenants=str(file)))


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_parser_that_does_not_exist_is_named(setting: str) -> None:
    check_settings(config(gateway={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}))
    with pytest.raises(ConfigError, match=rf"gateway.{setting}: 'hremes' is not known; known are .*"):
        check_settings(config(gateway={setting: "hremes"}))


def test_form_of_prompts_follows_from_the_model_files(tmp_path: Path) -> None:
    with_config_alone(tmp_path)
    assert speech_of(tmp_path, TextSettings()) == "token ids"
    without_weights(tmp_path)
    assert speech_of(tmp_path, TextSettings()) == "chat"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert speech_of(tmp_path, TextSettings()) == "text"
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    assert speech_of(tmp_path, TextSettings()) == "text"


def test_adapters_are_checked_before_any_process_starts(tmp_path: Path) -> None:
    adapter = save_adapter(resolve_model("tiny"), tmp_path / "a", rank=16)
    modules = {"lora_modules": (f"sql={adapter.path}",)}
    check_model(config(engine={"enable_lora": True}, gateway=modules))
    with pytest.raises(ConfigError, match="--enable-lora"):
        check_model(config(gateway=modules))
    with pytest.raises(ModelError, match="--max-lora-rank"):
        check_model(config(engine={"enable_lora": True, "max_lora_rank": 8}, gateway=modules))
    for wrong in ("sql", "=path", "sql="):
        with pytest.raises(ConfigError, match="name=path"):
            check_model(config(engine={"enable_lora": True}, gateway={"lora_modules": (wrong,)}))
