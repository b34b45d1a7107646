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
from baton.messages.workers import Load, PairTransport
from baton.tenants import Refusal
from tests.node_peers import a_worker_status, id_of
from tests.scripted_service import ScriptedService, worker

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Return the samples of a text of Prometheus, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def samples(exporter: Exporter, *others: Metrics) -> Samples:
    return parsed(exporter.text([exporter.metrics, *others]).decode())


def exporter(metrics: Metrics, service: ScriptedService, *, vllm_names: bool = True) -> Exporter:
    return Exporter(metrics, service, models=["tiny"], vllm_names=vllm_names)


def counted(name: str, **events: int) -> Metrics:
    metrics = Metrics(gateway=name, events=Counter(events))
    metrics.answered("/v1/completions", 200)
    metrics.refused["headers"] += 1
    metrics.ttft.observe(0.15)
    return metrics


def times(kind: type[Times] | type[RoutingTimes], *seconds: float) -> Any:
    observed = kind()
    for each in seconds:
        observed.observe(each)
    return observed


def everything() -> tuple[ScriptedService, Metrics, Metrics]:
    """Return a service of one worker and two routers, and two gateways. They count all that is exported."""
    prefill = times(Times, 0.3)
    step = times(Times, 0.004, 0.004, 500.0)
    load = Load(
        num_running=3,
        num_waiting=2,
        pages={"free": 32, "cached": 16, "active": 16},
        num_tokens=9,
        num_masks=4,
        mask_us=2_000_000,
        num_compiled_forms=2,
        compile_us=500_000,
        num_failed_forms=1,
        times={"step": step, "step_forward": step, "prefill": prefill, "warm_up": prefill},
        step_tokens=Sizes([0, 0, 3], 9.0),
        num_padded_tokens=7,
        counters={"transfers_adopted": 5, "digest_mismatches": 2, "opened_shm": 1, "retried_reads": 2},
        gauges={"open_files": 7},
        pairs=(PairTransport("prefill-0", "shm", "shm"), PairTransport("prefill-1", "tcp", "nccl")),
    )
    acme = TenantStatus(
        tenant="acme",
        weight=2.0,
        num_queued=5,
        oldest_wait_s=1.5,
        work_tokens=900,
        num_degraded=1,
        refused={Refusal.SHED: 7},
    )
    counters = {"decisions": 40, "blind_decisions": 1, "redis_failures": 2}
    counters |= {"routed_prompt_tokens": 90, "repeated_prompt_tokens": 32, "realised_prefix_tokens": 16}
    error = times(Times, 0.02)
    one = RouterStatus(
        id=id_of("one"),
        num_attempts=3,
        redis="down",
        routing=times(RoutingTimes, 0.0001, 0.003, 7.0),
        counters=counters,
        times={"error_ttft": error, "regret": times(Times, 0.5), "queue": error},
        queue=QueueStatus(level=OverloadLevel.SHED, num_queued=5, escalations={"shed": 3}, tenants=(acme,)),
    )
    service = ScriptedService()
    service.status = Status(
        workers=(a_worker_status(worker(), load, num_attempts=5),),
        routers=(one, RouterStatus(id=id_of("two"))),
    )
    first = counted("g0", replayed=4)
    first.forms["refused"] = 3
    first.form_check.observe(0.004)
    first.waiting_adapters, first.running_adapters = {"sql": 1}, {"chat": 2, "sql": 1}
    first.tenants_file["refused"] = 4
    tally = first.tenant("acme")
    tally.num_open, tally.generated_tokens = 2, 70
    tally.calls["tokens_per_s"] = 3
    tally.met["ttft"], tally.missed["ttft"] = 9, 1
    second = counted("g1", replays_lost=3)
    second.prompt_tokens, second.waiting_adapters = 5, {"code": 1}
    return service, first, second


WORKER = 'role="decode",worker="decode-0"'
ONE, TWO = (f'router="{id_of(name)[:8]}"' for name in ("one", "two"))
ACME = 'gateway="g0",tenant="acme"'
G0, G1 = ('engine="g0",model_name="tiny"', 'engine="g1",model_name="tiny"')
EXPECTED = f"""
baton_worker_running_sequences{{{WORKER}}} 3
baton_worker_generated_tokens_total{{{WORKER}}} 9
baton_kv_pages{{state="cached",{WORKER}}} 16
baton_worker_masks_total{{{WORKER}}} 4
baton_worker_mask_seconds_total{{{WORKER}}} 2
baton_worker_compiled_forms_total{{{WORKER}}} 2
baton_worker_form_compile_seconds_total{{{WORKER}}} 0.5
baton_worker_failed_forms_total{{{WORKER}}} 1
baton_worker_step_seconds_sum{{{WORKER}}} 500.008
baton_worker_step_seconds_bucket{{le="0.002",{WORKER}}} 0
baton_worker_step_seconds_bucket{{le="0.005",{WORKER}}} 2
baton_worker_step_seconds_bucket{{le="120.0",{WORKER}}} 2
baton_worker_step_seconds_bucket{{le="+Inf",{WORKER}}} 3
baton_worker_step_phase_seconds_count{{phase="forward",{WORKER}}} 3
baton_worker_prefill_seconds_sum{{{WORKER}}} 0.3
baton_worker_queue_seconds_count{{{WORKER}}} 0
baton_worker_seconds_count{{name="warm_up",{WORKER}}} 1
baton_worker_step_tokens_sum{{{WORKER}}} 9
baton_worker_padded_tokens_total{{{WORKER}}} 7
baton_worker_max_sequences{{{WORKER}}} 32
baton_worker_transfers_total{{outcome="adopted",{WORKER}}} 5
baton_worker_digest_mismatches_total{{{WORKER}}} 2
baton_worker_transport{{peer="prefill-0",transport="shm",{WORKER}}} 1
baton_worker_transport_fallback{{peer="prefill-0",transport="shm",best="shm",{WORKER}}} 0
baton_worker_transport_fallback{{peer="prefill-1",transport="tcp",best="nccl",{WORKER}}} 1
baton_worker_gauge{{name="open_files",{WORKER}}} 7

baton_frontend_total{{event="replayed",gateway="g0"}} 4
baton_frontend_total{{event="replays_lost",gateway="g1"}} 3
baton_requests_total{{gateway="g0",route="/v1/completions",status="200"}} 1
baton_requests_total{{gateway="g1",route="/v1/completions",status="200"}} 1
baton_connections_refused_total{{gateway="g0",reason="headers"}} 1
baton_connections_refused_total{{gateway="g1",reason="headers"}} 1
baton_time_to_first_token_seconds_count{{gateway="g0"}} 1
baton_time_to_first_token_seconds_bucket{{gateway="g0",le="0.1"}} 0
baton_time_to_first_token_seconds_bucket{{gateway="g0",le="0.2"}} 1
baton_time_to_first_token_seconds_count{{gateway="g1"}} 1
baton_forms_total{{gateway="g0",outcome="refused"}} 3
baton_form_check_seconds_sum{{gateway="g0"}} 0.004
baton_tenants_file_changes_total{{gateway="g0",outcome="refused"}} 4
baton_tenant_open_requests{{{ACME}}} 2
baton_tenant_generation_tokens_total{{{ACME}}} 70
baton_tenant_objectives_total{{kept="yes",objective="ttft",{ACME}}} 9
baton_tenant_objectives_total{{kept="no",objective="ttft",{ACME}}} 1
baton_tenant_calls_total{{outcome="tokens_per_s",{ACME}}} 3

baton_overload_level 6
baton_overload_escalations_total{{level="shed",{ONE}}} 3
baton_tenant_queued_requests{{tenant="acme"}} 5
baton_tenant_oldest_wait_seconds{{tenant="acme"}} 1.5
baton_tenant_weight{{tenant="acme"}} 2
baton_tenant_work_tokens_total{{tenant="acme",{ONE}}} 900
baton_tenant_degraded_requests_total{{tenant="acme",{ONE}}} 1
baton_tenant_refused_total{{tenant="acme",reason="shed",{ONE}}} 7
baton_router_decisions_total{{{ONE}}} 40
baton_router_blind_decisions_total{{{ONE}}} 1
baton_router_redis_up{{{ONE}}} 0
baton_router_attempts{{{ONE}}} 3
baton_router_routing_seconds_count{{{ONE}}} 3
baton_router_routing_seconds_bucket{{le="0.005",{ONE}}} 2
baton_router_routing_seconds_count{{{TWO}}} 0
baton_router_prediction_error_seconds_sum{{term="ttft",{ONE}}} 0.02
baton_router_regret_seconds_sum{{{ONE}}} 0.5
baton_router_queue_seconds_count{{{ONE}}} 1
baton_router_prompt_tokens_total{{{ONE}}} 90
baton_router_repeated_prompt_tokens_total{{{ONE}}} 32
baton_router_realised_prefix_tokens_total{{{ONE}}} 16

vllm:num_requests_waiting{{model_name="tiny"}} 2
vllm:num_requests_running{{model_name="tiny"}} 3
vllm:kv_cache_usage_perc{{model_name="tiny"}} 0.25
vllm:cache_config_info{{block_size="16",num_gpu_blocks="64"}} 1
vllm:prefix_cache_hits_total{{engine="decode-0",model_name="tiny"}} 0
vllm:lora_requests_info{{max_lora="0",running_lora_adapters="chat,sql",waiting_lora_adapters="code,sql"}} 1
vllm:time_to_first_token_seconds_count{{{G0}}} 1
vllm:time_to_first_token_seconds_sum{{{G0}}} 0.15
vllm:inter_token_latency_seconds_count{{{G0}}} 0
vllm:e2e_request_latency_seconds_count{{{G0}}} 0
vllm:prompt_tokens_total{{{G0}}} 0
vllm:prompt_tokens_total{{{G1}}} 5
vllm:generation_tokens_total{{{G0}}} 0
"""


def test_every_figure_is_exported_with_its_labels() -> None:
    service, first, second = everything()
    found, expected = samples(exporter(first, service), second), parsed(EXPECTED)
    assert {key: found.get(key) for key in expected} == expected
    assert ("baton_router_redis_up", (("router", id_of("two")[:8]),)) not in found
    le = [labels for name, labels in found if name == "baton_router_routing_seconds_bucket"]
    assert len(le) == 2 * (len(RoutingTimes.BOUNDS) + 1)


def test_counters_with_a_metric_of_their_own_are_not_told_twice() -> None:
    service, first, second = everything()
    found = samples(exporter(first, service), second)
    events = {
        of: {dict(labels)["event"]: value for (name, labels), value in found.items() if name == metric}
        for of, metric in (("worker", "baton_worker_events_total"), ("router", "baton_router_events_total"))
    }
    assert events == {"worker": {"opened_shm": 1, "retried_reads": 2}, "router": {"redis_failures": 2}}


def test_vllm_names_can_be_turned_off() -> None:
    assert GatewaySettings().vllm_metric_names
    service, first, _ = everything()
    found = samples(exporter(first, service, vllm_names=False))
    assert found and not any(name.startswith("vllm") for name, _ in found)


def test_every_figure_with_a_name_of_vllm_has_the_same_value_by_both_names() -> None:
    service, first, _ = everything()
    found = samples(exporter(first, service))
    twins = [each for each in METRICS if each.name in VLLM_NAMES]
    assert len(twins) > 10
    for metric in twins:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_sum"}[metric.kind]
        ours = [value for (name, _), value in found.items() if name == metric.name + suffix]
        twin = f"vllm:{VLLM_NAMES[metric.name]}{suffix}"
        theirs = [value for (name, _), value in found.items() if name == twin]
        assert ours and ours == theirs, metric.name


def test_counts_survive_encoding() -> None:
    counts = counted("g1", replays_lost=3)
    counts.tenant("acme").calls["answered"] += 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=Metrics) == counts


def test_metrics_with_a_damaged_histogram_are_refused() -> None:
    counts = [1] * (len(TokenTimes.BOUNDS) + 2)
    with pytest.raises(msgspec.ValidationError, match="one bucket more"):
        msgspec.json.decode(f'{{"itl":[{counts},3.0]}}', type=Metrics)


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


def test_metric_from_outside_the_tree_is_an_entry_of_the_registry() -> None:
    outside = gauge("outside_oldest_beat_seconds", WORKERS, "Age of the last beat.", lambda w: w.beat_age_s)
    METRICS.append(outside)
    try:
        found = samples(exporter(Metrics(), everything()[0]))
    finally:
        METRICS.remove(outside)
    assert found["outside_oldest_beat_seconds", (("role", "decode"), ("worker", "decode-0"))] == 0.1
