"""What dashboards and llm-d's endpoint picker read of vLLM, by vLLM's names; off unless it is asked for.

The label `engine`, vLLM's for one of several, names the gateway or the worker that has counted.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.gateway.counts import Counts
from baton.gateway.histograms import histogram_family
from baton.gateway.metrics import ITL_BOUNDS_S, REQUEST_BOUNDS_S, TTFT_BOUNDS_S
from baton.worker import WorkerStatus

LABELS: Final = ("model_name", "engine")


def vllm_gateway_families(gateways: Sequence[Counts], model: str) -> Iterator[Metric]:
    for name, documentation, bounds, counted in (
        ("time_to_first_token", "To the first token.", TTFT_BOUNDS_S, [each.ttft for each in gateways]),
        ("inter_token_latency", "Between tokens.", ITL_BOUNDS_S, [each.itl for each in gateways]),
        ("e2e_request_latency", "To the end.", REQUEST_BOUNDS_S, [each.duration for each in gateways]),
    ):
        values = [(model, each.gateway) for each in gateways]
        rows = zip(values, counted, strict=True)
        yield histogram_family(f"vllm:{name}_seconds", documentation, bounds, LABELS, rows)
    for name, documentation, counts in (
        ("prompt_tokens", "Of prompts.", [each.prompt_tokens for each in gateways]),
        ("generation_tokens", "Generated.", [each.generated_tokens for each in gateways]),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        for each, count in zip(gateways, counts, strict=True):
            counter.add_metric((model, each.gateway), count)
        yield counter


def vllm_worker_families(workers: Sequence[WorkerStatus], model: str) -> Iterator[Metric]:
    """The five that llm-d's endpoint picker reads, of all workers together; and what caches have found."""
    num_pages = sum(worker.worker.num_pages for worker in workers)
    num_free = sum(
        worker.load.pages.get("free", 0) + worker.load.pages.get("cached", 0) for worker in workers
    )
    for name, documentation, value in (
        ("num_requests_waiting", "Sequences that wait.", sum(each.load.num_waiting for each in workers)),
        ("num_requests_running", "Sequences that run.", sum(each.load.num_running for each in workers)),
        ("kv_cache_usage_perc", "Share of KV pages in use.", 1 - num_free / num_pages if num_pages else 0.0),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
        gauge.add_metric((model,), value)
        yield gauge
    for name, documentation, found in (
        ("prefix_cache_queries", "Tokens looked up.", [each.load.prefix_queries_tokens for each in workers]),
        ("prefix_cache_hits", "Of these, found.", [each.load.prefix_hits_tokens for each in workers]),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        for worker, count in zip(workers, found, strict=True):
            counter.add_metric((model, worker.worker.name), count)
        yield counter
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "Of the cache.", labels=("block_size", "num_gpu_blocks")
    )
    page_size = max((worker.worker.page_size for worker in workers), default=0)
    cache.add_metric((str(page_size), str(num_pages)), 1)
    yield cache
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "None are served.",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    )
    adapters.add_metric(("0", "", ""), 1)
    yield adapters
