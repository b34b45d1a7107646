import torch

from baton.engine.engine import MIN_PREFILL_TOKENS, PageCosts
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


def test_no_costs_without_host_pages() -> None:
    costs = PageCosts(pool(0))
    costs.observe(prefill(100), 1.0)
    assert costs.compute_token_s is None


def test_steps_without_prefill_give_no_costs() -> None:
    costs = PageCosts(pool(2))
    costs.observe(make_batch(*(rest_of(make_sequence(str(i), [1, 2]), 1) for i in range(64))), 9.0)
    costs.observe(prefill(MIN_PREFILL_TOKENS - 1), 9.0)
    assert costs.compute_token_s is None


def test_cost_of_a_token_is_measured_in_prefill_steps() -> None:
    costs = PageCosts(pool(2))
    costs.observe(prefill(30), 900.0)  # the first one compiles: it does not count
    costs.observe(prefill(30, num_decodes=2), 3.2)
    assert costs.compute_token_s == 0.1
    assert costs.copy_page_s is not None and 0 < costs.copy_page_s < 1


def test_cost_of_a_token_is_a_running_mean() -> None:
    costs = PageCosts(pool(2))
    costs.observe(prefill(20), 2.0)
    costs.observe(prefill(20), 2.0)
    costs.observe(prefill(20), 200.0)
    assert costs.compute_token_s is not None and 0.1 < costs.compute_token_s < 5
    for _ in range(60):
        costs.observe(prefill(20), 4.0)
    assert abs(costs.compute_token_s - 0.2) < 1e-3


def test_measuring_leaves_the_pool_empty() -> None:
    measured = pool(7, num_pages=2)
    PageCosts(measured)
    assert not measured.device.any() and not measured.host.any()
