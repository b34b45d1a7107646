"""In-flight entries of dispatched attempts, and pull sources beside long prompts."""

import msgspec

from baton.messages.bounds import MAX_PULLED_PAGES
from baton.messages.codec import encode, fits_beside, fits_request
from baton.messages.control import Dispatch, PullSource
from baton.request import SamplingParams
from baton.router.dispatcher import make_entry
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.membership import Member
from baton.router.policies.base import Pair
from baton.router.policies.cost_model import CostModel
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.router.router_cluster import cluster


def a_source(num_pages: int) -> PullSource:
    return PullSource(id_of("p"), num_pages * 16, (2**31 - 1,) * num_pages, (2**32 - 1,) * num_pages)


def test_entry_counts_the_expected_answer() -> None:
    worker = a_worker("d0")
    pair = Pair(Member(worker, TestPeer.worker(cluster().router, worker), 0.0), None, "the only one")
    for max_tokens, expected in ((7, 7), (9000, EXPECTED_OUTPUT_TOKENS)):
        request = a_request(num_tokens=50, sampling=SamplingParams(max_tokens=max_tokens))
        entry = make_entry("g", request, pair, CostModel(), 7.0)
        assert (entry.num_output_tokens, entry.num_tokens) == (expected, 50 + expected)


def test_pull_source_fits_beside_short_prompt_only() -> None:
    short = a_request(num_tokens=1000)
    long = msgspec.structs.replace(short, token_ids=(2**31 - 1,) * 180_000)
    source = a_source(MAX_PULLED_PAGES)
    assert fits_request(long) and fits_beside(short, source) and not fits_beside(long, source)
    encode(Dispatch(request=short, gateway=id_of("g"), source=source))
    encode(Dispatch(request=long, gateway=id_of("g")))
