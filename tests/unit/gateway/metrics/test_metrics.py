from collections import Counter
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.config.gateway import GatewaySettings
from baton.gateway.metrics.exporter import METRICS, VLLM_NAMES, WORKERS, Exporter, gauge
from baton.gateway.metrics.metrics import Metrics, TokenTimes
from baton.messages.operations import Status
from baton.messages.status import (
    OverloadLevel,
    QueueStatus,
    RouterStatus,
    RoutingTimes,
    Sizes,
    TenantStatus,
    Times,
)
from baton.messages.workers import Load, PairTransport, WorkerStatus
from baton.tenants import Refusal
from tests.node_peers import id_of
from tests.scripted_service import ScriptedService, worker


def samples(exporter: Exporter, *others: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exporter.text([exporter.metrics, *others]).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def exporter(metrics: Metrics, service: ScriptedService, *, vllm_names: bool = True) -> Exporter:
    return Exporter(metrics, service, models=["tiny"], vllm_names=vllm_names)


def service_with_workers() -> ScriptedService:
    service = ScriptedService()
    load = Load(num_running=3, num_waiting=2, pages={"free": 32, "cached": 16, "active": 16}, num_tokens=9)
    service.status = Status(
        workers=(WorkerStatus(worker=worker(), load=load, num_attempts=5, beat_age_s=0.1),)
    )
    return service


def test_workers_are_shown_from_the_status_of_the_router() -> None:
    found = samples(exporter(Metrics(gateway="g0", events=Counter(replayed=4)), service_with_workers()))
    decode = (("role", "decode"), ("worker", "decode-0"))
    assert found["baton_worker_running_sequences", decode] == 3
    assert found["baton_worker_generated_tokens_total", decode] == 9
    assert found["baton_kv_pages", (("role", "decode"), ("state", "cached"), ("worker", "decode-0"))] == 16
    assert found["baton_frontend_total", (("event", "replayed"), ("gateway", "g0"))] == 4


def test_vllm_names_can_be_turned_off() -> None:
    found = samples(exporter(Metrics(), service_with_workers(), vllm_names=False))
    assert found and not any(name.startswith("vllm") for name, _ in found)


def test_every_figure_with_a_name_of_vllm_has_the_same_value_by_both_names() -> None:
    found = samples(exporter(counted("g0"), service_with_workers()))
    twins = [each for each in METRICS if each.name in VLLM_NAMES]
    assert len(twins) > 10
    for metric in twins:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_sum"}[metric.kind]
        ours = [value for (name, _), value in found.items() if name == metric.name + suffix]
        twin = f"vllm:{VLLM_NAMES[metric.name]}{suffix}"
        theirs = [value for (name, _), value in found.items() if name == twin]
        assert ours and ours == theirs, metric.name


def test_forms_and_masks_are_exported() -> None:
    service = ScriptedService()
    load = Load(num_masks=4, mask_us=2_000_000, num_compiled_forms=2, compile_us=500_000, num_failed_forms=1)
    service.status = Status(
        workers=(WorkerStatus(worker=worker(), load=load, num_attempts=0, beat_age_s=0.1),)
    )
    metrics = Metrics(gateway="g0", forms=Counter(refused=3))
    metrics.form_check.observe(0.004)
    found = samples(exporter(metrics, service))
    decode, gateway = (("role", "decode"), ("worker", "decode-0")), (("gateway", "g0"),)
    assert found["baton_worker_masks_total", decode] == 4
    assert found["baton_worker_mask_seconds_total", decode] == 2.0
    assert found["baton_worker_compiled_forms_total", decode] == 2
    assert found["baton_worker_form_compile_seconds_total", decode] == 0.5
    assert found["baton_worker_failed_forms_total", decode] == 1
    assert found["baton_forms_total", (*gateway, ("outcome", "refused"))] == 3
    assert found["baton_form_check_seconds_sum", gateway] == 0.004


def test_vllm_names_are_shown_by_default() -> None:
    assert GatewaySettings().vllm_metric_names
    found = samples(exporter(Metrics(), service_with_workers()))
    model = (("model_name", "tiny"),)
    assert found["vllm:num_requests_waiting", model] == 2
    assert found["vllm:num_requests_running", model] == 3
    assert found["vllm:kv_cache_usage_perc", model] == 0.25
    assert found["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "64"))] == 1


def test_adapters_of_open_calls_are_named_as_vllm_names_them() -> None:
    here = Metrics(waiting_adapters={"sql": 1}, running_adapters={"chat": 2, "sql": 1})
    found = samples(
        exporter(here, service_with_workers()), Metrics(gateway="g1", waiting_adapters={"code": 1})
    )
    ((labels, value),) = [(labels, value) for (name, labels), value in found.items() if "lora_req" in name]
    assert value == 1 and dict(labels) == {
        "max_lora": "0",
        "running_lora_adapters": "chat,sql",
        "waiting_lora_adapters": "code,sql",
    }


def test_vllm_names_cover_latencies_tokens_and_caches() -> None:
    given = exporter(counted("g0"), service_with_workers())
    found = samples(given, msgspec.structs.replace(counted("g1"), prompt_tokens=5))
    for gateway, num_tokens in (("g0", 0), ("g1", 5)):
        labels = (("engine", gateway), ("model_name", "tiny"))
        assert found["vllm:time_to_first_token_seconds_count", labels] == 1
        assert found["vllm:time_to_first_token_seconds_sum", labels] == 0.15
        assert found["vllm:inter_token_latency_seconds_count", labels] == 0
        assert found["vllm:e2e_request_latency_seconds_count", labels] == 0
        assert found["vllm:prompt_tokens_total", labels] == num_tokens
        assert found["vllm:generation_tokens_total", labels] == 0
    assert found["vllm:prefix_cache_hits_total", (("engine", "decode-0"), ("model_name", "tiny"))] == 0


def counted(name: str, **events: int) -> Metrics:
    metrics = Metrics(gateway=name, events=Counter(events))
    metrics.answered("/v1/completions", 200)
    metrics.refused["headers"] += 1
    metrics.ttft.observe(0.15)
    return metrics


def test_each_gateway_has_series_of_its_own() -> None:
    found = samples(exporter(counted("g0"), ScriptedService()), counted("g1", replays_lost=3))
    for name in ("g0", "g1"):
        route = (("gateway", name), ("route", "/v1/completions"), ("status", "200"))
        assert found["baton_requests_total", route] == 1
        assert found["baton_connections_refused_total", (("gateway", name), ("reason", "headers"))] == 1
        assert found["baton_time_to_first_token_seconds_count", (("gateway", name),)] == 1
        assert found["baton_time_to_first_token_seconds_bucket", (("gateway", name), ("le", "0.1"))] == 0
        assert found["baton_time_to_first_token_seconds_bucket", (("gateway", name), ("le", "0.2"))] == 1
    assert found["baton_frontend_total", (("event", "replays_lost"), ("gateway", "g1"))] == 3


def test_counts_survive_encoding() -> None:
    counts = counted("g1", replays_lost=3)
    counts.tenant("acme").calls["answered"] += 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=Metrics) == counts


def test_metrics_with_a_damaged_histogram_are_refused() -> None:
    counts = [1] * (len(TokenTimes.BOUNDS) + 2)
    with pytest.raises(msgspec.ValidationError, match="one bucket more"):
        msgspec.json.decode(f'{{"itl":[{counts},3.0]}}', type=Metrics)


def test_tenants_are_counted_by_gateways_and_routers() -> None:
    metrics, service = Metrics(gateway="g0"), service_with_workers()
    tally = metrics.tenant("acme")
    tally.num_open, tally.generated_tokens = 2, 70
    tally.calls["tokens_per_s"] = 3
    tally.met["ttft"], tally.missed["ttft"] = 9, 1
    metrics.tenants_file["refused"] = 4
    acme = TenantStatus(
        tenant="acme",
        weight=2.0,
        num_queued=5,
        oldest_wait_s=1.5,
        work_tokens=900,
        num_degraded=1,
        refused={Refusal.SHED: 7},
    )
    queue = QueueStatus(level=OverloadLevel.SHED, num_queued=5, escalations={"shed": 3}, tenants=(acme,))
    service.status = Status(routers=(RouterStatus(id=id_of("one"), queue=queue),))
    found = samples(exporter(metrics, service))
    here, there = (("gateway", "g0"), ("tenant", "acme")), (("tenant", "acme"),)
    assert found["baton_tenant_open_requests", here] == 2
    assert found["baton_tenant_generation_tokens_total", here] == 70
    kept, missed = (("kept", kept) for kept in ("yes", "no"))
    name = "baton_tenant_objectives_total"
    assert found[name, (here[0], kept, ("objective", "ttft"), here[1])] == 9
    assert found[name, (here[0], missed, ("objective", "ttft"), here[1])] == 1
    assert found["baton_tenant_calls_total", (here[0], ("outcome", "tokens_per_s"), here[1])] == 3
    assert found["baton_tenants_file_changes_total", (here[0], ("outcome", "refused"))] == 4
    assert found["baton_overload_level", ()] == 6
    assert found["baton_overload_escalations_total", (("level", "shed"), ("router", id_of("one")[:8]))] == 3
    assert found["baton_tenant_queued_requests", there] == 5
    assert found["baton_tenant_oldest_wait_seconds", there] == 1.5
    assert found["baton_tenant_weight", there] == 2
    router = ("router", id_of("one")[:8])
    assert found["baton_tenant_work_tokens_total", (router, *there)] == 900
    assert found["baton_tenant_degraded_requests_total", (router, *there)] == 1
    assert found["baton_tenant_refused_total", (("reason", "shed"), router, *there)] == 7


def test_no_counter_of_a_tenant_falls_when_a_router_dies() -> None:
    def counters(*names: str) -> dict[Any, float]:
        service = ScriptedService()
        queue = QueueStatus(num_queued=2, tenants=(TenantStatus(tenant="acme", work_tokens=900),))
        routers = tuple(RouterStatus(id=id_of(name), queue=queue) for name in names)
        service.status = Status(routers=routers)
        found = samples(exporter(Metrics(), service))
        assert found["baton_queued_requests", ()] == 2 * len(names)
        return {key: value for key, value in found.items() if key[0].endswith("_total")}

    both, one = counters("one", "two"), counters("one")
    assert list(both.values()).count(900) == 2
    assert one.items() <= both.items(), "what is left is what it was"


def test_each_router_has_series_of_its_own() -> None:
    times = RoutingTimes()
    for seconds in (0.0001, 0.003, 7.0):
        times.observe(seconds)
    counters = {"decisions": 40, "blind_decisions": 1, "redis_failures": 2}
    one = RouterStatus(
        id=id_of("one"),
        num_attempts=3,
        redis="down",
        routing=times,
        counters=counters,
    )
    service = ScriptedService()
    service.status = Status(routers=(one, RouterStatus(id=id_of("two"))))
    found = samples(exporter(Metrics(), service))
    label = ("router", id_of("one")[:8])
    other = ("router", id_of("two")[:8])
    assert found["baton_router_decisions_total", (label,)] == 40
    assert found["baton_router_blind_decisions_total", (label,)] == 1
    assert found["baton_router_events_total", (("event", "redis_failures"), label)] == 2
    assert found["baton_router_redis_up", (label,)] == 0
    assert ("baton_router_redis_up", (other,)) not in found
    assert found["baton_router_attempts", (label,)] == 3
    assert found["baton_router_routing_seconds_count", (label,)] == 3
    assert found["baton_router_routing_seconds_bucket", (("le", "0.005"), label)] == 2
    assert found["baton_router_routing_seconds_count", (other,)] == 0
    assert len(RoutingTimes.BOUNDS) + 1 == sum(
        name == "baton_router_routing_seconds_bucket" and label in labels for name, labels in found
    )


def test_steps_prompts_and_transfers_of_workers_are_exported() -> None:
    service = service_with_workers()
    step, prefill = Times(), Times()
    for seconds in (0.004, 0.004, 500.0):
        step.observe(seconds)
    prefill.observe(0.3)
    load = Load(
        times={"step": step, "step_forward": step, "prefill": prefill, "warm_up": prefill},
        step_tokens=Sizes([0, 0, 3], 9.0),
        num_padded_tokens=7,
        counters={"transfers_adopted": 5, "digest_mismatches": 2, "opened_shm": 1},
        pairs=(PairTransport("prefill-0", "shm", "shm"), PairTransport("prefill-1", "tcp", "nccl")),
    )
    service.status = Status(
        workers=(WorkerStatus(worker=worker(), load=load, num_attempts=0, beat_age_s=0.1),)
    )
    found = samples(exporter(Metrics(), service))
    here = (("role", "decode"), ("worker", "decode-0"))

    def of(name: str, *labels: tuple[str, str]) -> float:
        return found[f"baton_worker_{name}", tuple(sorted((*here, *labels)))]

    assert of("step_seconds_sum") == 500.008
    assert of("step_seconds_bucket", ("le", "0.002")) == 0 and of("step_seconds_bucket", ("le", "0.005")) == 2
    assert of("step_seconds_bucket", ("le", "120.0")) == 2 and of("step_seconds_bucket", ("le", "+Inf")) == 3
    assert of("step_phase_seconds_count", ("phase", "forward")) == 3
    assert of("prefill_seconds_sum") == 0.3 and of("queue_seconds_count") == 0
    assert of("seconds_count", ("name", "warm_up")) == 1
    assert (of("step_tokens_sum"), of("padded_tokens_total"), of("max_sequences")) == (9, 7, 32)
    assert of("transfers_total", ("outcome", "adopted")) == 5 and of("digest_mismatches_total") == 2
    assert of("transport", ("peer", "prefill-0"), ("transport", "shm")) == 1
    for number, (transport, best) in enumerate((("shm", "shm"), ("tcp", "nccl"))):
        labels = ("peer", f"prefill-{number}"), ("transport", transport), ("best", best)
        assert of("transport_fallback", *labels) == number
    events = {dict(labels)["event"] for name, labels in found if name == "baton_worker_events_total"}
    assert events == {"opened_shm"}, "counters with a metric of their own are not told twice"


def test_predictions_of_routers_are_exported() -> None:
    service = service_with_workers()
    error, regret = Times(), Times()
    error.observe(0.02)
    regret.observe(0.5)
    counters = {"routed_prompt_tokens": 90, "repeated_prompt_tokens": 32, "realised_prefix_tokens": 16}
    router = RouterStatus(
        id=id_of("one"), counters=counters, times={"error_ttft": error, "regret": regret, "queue": error}
    )
    service.status = Status(routers=(router,))
    found = samples(exporter(Metrics(), service))
    label = ("router", id_of("one")[:8])
    assert found["baton_router_prediction_error_seconds_sum", (label, ("term", "ttft"))] == 0.02
    assert found["baton_router_regret_seconds_sum", (label,)] == 0.5
    assert found["baton_router_queue_seconds_count", (label,)] == 1
    assert found["baton_router_prompt_tokens_total", (label,)] == 90
    assert found["baton_router_repeated_prompt_tokens_total", (label,)] == 32
    assert found["baton_router_realised_prefix_tokens_total", (label,)] == 16
    assert not any(name == "baton_router_events_total" for name, _ in found)


def test_worker_names_its_own_metrics() -> None:
    service = service_with_workers()
    load = Load(gauges={"open_files": 7}, counters={"retried_reads": 2})
    service.status = Status(
        workers=(WorkerStatus(worker=worker(), load=load, num_attempts=0, beat_age_s=0.1),)
    )
    found = samples(exporter(Metrics(), service))
    labels = (("role", "decode"), ("worker", "decode-0"))
    assert found["baton_worker_gauge", (("name", "open_files"), *labels)] == 7
    assert found["baton_worker_events_total", (("event", "retried_reads"), *labels)] == 2


def test_metric_from_outside_the_tree_is_an_entry_of_the_registry() -> None:
    outside = gauge("outside_oldest_beat_seconds", WORKERS, "Age of the last beat.", lambda w: w.beat_age_s)
    METRICS.append(outside)
    try:
        found = samples(exporter(Metrics(), service_with_workers()))
    finally:
        METRICS.remove(outside)
    assert found["outside_oldest_beat_seconds", (("role", "decode"), ("worker", "decode-0"))] == 0.1
