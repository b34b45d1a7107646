import torch

from baton.engine.engine import MIN_PREFILL_TOKENS, PreemptionMeter
from baton.engine.runner.model_runner import KvPool
from baton.engine.scheduler.sequence import Batch
from baton.pages import PageLayout
from tests.batches import make_batch, make_sequence, rest_of


def pool(num_host_pages: int, num_pages: int = 3) -> KvPool:
    layout = PageLayout(tp_size=1, page_size=4, num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
    return KvPool(layout, num_pages, num_host_pages, torch.device("cpu"))


def prefill(num_tokens: int, num_decodes: int = 0) -> Batch:
    decodes = [rest_of(make_sequence(str(i), [1, 2]), 1) for i in range(num_decodes)]
    return make_batch(*decodes, rest_of(make_sequence("prefill", range(num_tokens))))


def test_no_rates_without_host_pages() -> None:
    meter = PreemptionMeter(pool(0))
    meter.observe(prefill(100), 1.0)
    assert meter.rates is None


def test_steps_without_prefill_give_no_rates() -> None:
    meter = PreemptionMeter(pool(2))
    meter.observe(make_batch(*(rest_of(make_sequence(str(i), [1, 2]), 1) for i in range(64))), 9.0)
    meter.observe(prefill(MIN_PREFILL_TOKENS - 1), 9.0)
    assert meter.rates is None


def test_recompute_cost_is_measured_in_prefill_steps() -> None:
    meter = PreemptionMeter(pool(2))
    meter.observe(prefill(30), 900.0)  # the first one compiles: it does not count
    meter.observe(prefill(30, num_decodes=2), 3.2)
    assert meter.rates is not None
    assert meter.rates.recompute_s_per_token == 0.1
    assert 0 < meter.rates.swap_s_per_page < 1


def test_recompute_cost_is_a_running_mean() -> None:
    meter = PreemptionMeter(pool(2))
    meter.observe(prefill(20), 2.0)
    meter.observe(prefill(20), 2.0)
    meter.observe(prefill(20), 200.0)
    assert meter.rates is not None and 0.1 < meter.rates.recompute_s_per_token < 5
    for _ in range(60):
        meter.observe(prefill(20), 4.0)
    assert abs(meter.rates.recompute_s_per_token - 0.2) < 1e-3


def test_measuring_leaves_the_pool_empty() -> None:
    measured = pool(7, num_pages=2)
    PreemptionMeter(measured)
    assert not measured.device.any() and not measured.host.any()
