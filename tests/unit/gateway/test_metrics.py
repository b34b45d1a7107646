from prometheus_client.parser import text_string_to_metric_families

from baton.control import Status
from baton.gateway.metrics import Exporter, Histogram, Metrics
from baton.worker import Load, WorkerStatus
from tests.scripted_service import ScriptedService, worker


def samples(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exporter.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def exporter(metrics: Metrics, service: ScriptedService, *, vllm_names: bool = False) -> Exporter:
    return Exporter(metrics, service, model="tiny", vllm_names=vllm_names)


def service_with_workers() -> ScriptedService:
    service = ScriptedService()
    load = Load(num_running=3, num_waiting=2, pages={"free": 32, "cached": 16, "active": 16}, num_tokens=9)
    service.status = Status(
        workers=(WorkerStatus(worker=worker(), load=load, num_attempts=5, beat_age_s=0.1),)
    )
    service.counters = {"replayed": 4}
    return service


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    found = {sample.labels.get("le"): sample.value for sample in histogram.family("x", "y", "g").samples}
    assert (found["0.1"], found["1.0"], found["+Inf"]) == (2.0, 3.0, 4.0)


def test_requests_are_counted_by_known_routes_only() -> None:
    metrics = Metrics("g0")
    for path in ("/v1/completions", "/v1/completions", "/etc/passwd", "/a%00"):
        metrics.answered(path, 200)
    found = samples(exporter(metrics, ScriptedService()))
    assert (
        found["baton_requests_total", (("gateway", "g0"), ("route", "/v1/completions"), ("status", "200"))]
        == 2
    )
    assert found["baton_requests_total", (("gateway", "g0"), ("route", "other"), ("status", "200"))] == 2


def test_workers_are_shown_by_the_routers_word() -> None:
    found = samples(exporter(Metrics("g0"), service_with_workers()))
    decode = (("role", "decode"), ("worker", "decode-0"))
    assert found["baton_worker_running_sequences", decode] == 3
    assert found["baton_worker_generated_tokens_total", decode] == 9
    assert found["baton_kv_pages", (("role", "decode"), ("state", "cached"), ("worker", "decode-0"))] == 16
    assert found["baton_frontend_total", (("event", "replayed"), ("gateway", "g0"))] == 4
    assert not any(name.startswith("vllm") for name, _ in found)


def test_vllms_names_are_there_when_asked_for() -> None:
    found = samples(exporter(Metrics(), service_with_workers(), vllm_names=True))
    model = (("model_name", "tiny"),)
    assert found["vllm:num_requests_waiting", model] == 2
    assert found["vllm:num_requests_running", model] == 3
    assert found["vllm:kv_cache_usage_perc", model] == 0.25
    assert found["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "64"))] == 1
    assert any(name == "vllm:lora_requests_info" for name, _ in found)
