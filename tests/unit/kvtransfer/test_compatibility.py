from typing import Any

import msgspec
import pytest

from baton.kvtransfer.links import check, check_doors
from baton.kvtransfer.protocol.messages import EndpointHello, ListenerAddresses, RankListenerAddresses
from baton.pages import PageLayout

LAYOUT = PageLayout(tp_size=2, page_size=16, num_layers=4, num_kv_heads=8, head_dim=64, dtype="bfloat16")


def hello(**changes: Any) -> EndpointHello:
    fields = {"protocol": 1, "incarnation": b"a" * 16, "fingerprint": "abc", "layout": LAYOUT}
    return EndpointHello(**{**fields, **changes})


def relaid(**changes: Any) -> EndpointHello:
    return hello(incarnation=b"b" * 16, layout=msgspec.structs.replace(LAYOUT, **changes))


@pytest.mark.parametrize("changes", [{}, {"tp_size": 8}, {"page_size": 64}, {"tp_size": 4, "page_size": 1}])
def test_other_cuts_of_the_same_pages_are_compatible(changes: dict[str, int]) -> None:
    assert check(hello(), relaid(**changes)) is None
    assert check(relaid(**changes), hello()) is None


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (hello(protocol=2), "version 1 of the transfer protocol, the peer 2"),
        (hello(fingerprint="xyz"), "the model abc, the peer xyz"),
        (relaid(num_layers=5), "num_layers 4 and num_layers 5"),
        (relaid(num_kv_heads=16), "num_kv_heads 8 and num_kv_heads 16"),
        (relaid(head_dim=128), "head_dim 64 and head_dim 128"),
        (relaid(dtype="float16"), "dtype bfloat16 and dtype float16"),
        (hello(), "this process itself"),
    ],
)
def test_what_differs_is_named(theirs: EndpointHello, reason: str) -> None:
    found = check(hello(), theirs)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("incarnations", "reason"),
    [
        ("ab", None),
        ("a", "1 ranks have doors in a layout of tp_size 2"),
        ("abc", "3 ranks have doors in a layout of tp_size 2"),
        ("aa", "two ranks are one process"),
    ],
)
def test_every_rank_has_doors_of_its_own(incarnations: str, reason: str | None) -> None:
    ranks = [
        RankListenerAddresses(incarnation=each.encode() * 16, host="h", device="cpu") for each in incarnations
    ]
    assert check_doors(hello(), ListenerAddresses(ranks=tuple(ranks))) == reason
