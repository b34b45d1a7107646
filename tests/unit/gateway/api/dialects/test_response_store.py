import json
from typing import Any

import pytest

from baton.gateway.api.dialects.response_store import (
    OVERHEAD_BYTES,
    ResponseQuery,
    ResponseStore,
    StoredResponse,
    list_items,
)
from baton.gateway.api.errors import ApiError


def stored(items: int = 1, size: int = 10) -> StoredResponse:
    inputs = [{"role": "user", "content": f"{number}"} for number in range(items)]
    return StoredResponse(b"r" * size, json.dumps(inputs).encode(), b'[{"id": "msg_0"}]')


def store(**bounds: Any) -> ResponseStore:
    return ResponseStore(**{"max_entries": 3, "max_bytes": 10_000, **bounds})


def listed(kept: StoredResponse, query: dict[str, str]) -> Any:
    return json.loads(b"".join(list_items(kept, "resp_7", query)))


def is_there(kept: ResponseStore, tenant: str, id: str) -> bool:
    return kept.tell(ResponseQuery(tenant, id)) is not None


def test_least_recently_used_response_gives_way() -> None:
    kept = store()
    for name in ("a", "b", "c"):
        assert kept.put("acme", name, stored())
    assert is_there(kept, "acme", "a")  # which counts as a use
    kept.put("acme", "d", stored())
    assert [name for name in "abcd" if is_there(kept, "acme", name)] == ["a", "c", "d"]


def test_bytes_of_a_tenant_are_bounded_and_counted() -> None:
    one = stored(size=1000)
    kept = store(max_entries=100, max_bytes=3 * one.num_bytes)
    for number in range(10):
        kept.put("acme", str(number), one)
        assert kept.num_bytes("acme") == min(number + 1, 3) * one.num_bytes
    assert one.num_bytes > 1000 + OVERHEAD_BYTES
    for number in (7, 8, 9):
        assert kept.tell(ResponseQuery("acme", str(number), forgets=True)) == one
    assert kept.num_bytes("acme") == 0


def test_response_above_the_bound_is_not_stored_and_evicts_none() -> None:
    kept = store(max_bytes=2000)
    assert kept.put("acme", "a", stored())
    assert not kept.put("acme", "b", stored(size=2000))
    assert is_there(kept, "acme", "a") and not is_there(kept, "acme", "b")


def test_tenants_neither_find_nor_evict_responses_of_each_other() -> None:
    kept = store()
    kept.put("acme", "a", stored())
    for number in range(50):
        kept.put("zeta", str(number), stored())
    assert is_there(kept, "acme", "a") and not is_there(kept, "zeta", "a")
    assert kept.tell(ResponseQuery("zeta", "a", forgets=True)) is None and is_there(kept, "acme", "a")


def test_store_without_entries_is_off() -> None:
    kept = store(max_entries=0)
    assert not kept.is_on and not kept.put("acme", "a", stored())


@pytest.mark.parametrize(
    ("items", "output", "expected"),
    [(b"[]", b"[]", []), (b"[1]", b"[]", [1]), (b"[]", b"[2]", [2]), (b"[1,2]", b"[3]", [1, 2, 3])],
)
def test_conversation_is_the_input_then_the_output(items: bytes, output: bytes, expected: list[int]) -> None:
    assert json.loads(StoredResponse(b"", items, output).conversation) == expected


def test_items_are_listed_in_pages() -> None:
    asked: dict[str, str] = {"limit": "2", "order": "asc"}
    pages: list[Any] = []
    while True:
        page = listed(stored(items=5), asked)
        pages.append([item["content"] for item in page["data"]])
        if not page["has_more"]:
            break
        asked["after"] = page["last_id"]
    assert pages == [["0", "1"], ["2", "3"], ["4"]]
    latest = listed(stored(items=5), {})
    assert [item["content"] for item in latest["data"]] == ["4", "3", "2", "1", "0"]


def test_listed_items_have_the_id_of_the_client_or_one_of_ours() -> None:
    kept = StoredResponse(b"", b'[{"id":"mine","content":"a"},{"content":"b"}]', b"[]")
    page = listed(kept, {"order": "asc"})
    assert page["data"] == [{"id": "mine", "content": "a"}, {"id": "item_7001", "content": "b"}]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("mine", "item_7001", False)
    assert listed(kept, {"order": "asc", "after": "mine"})["data"] == page["data"][1:]
    assert listed(kept, {"order": "asc", "after": "item_7001"})["data"] == []


def test_item_is_listed_as_it_was_given() -> None:
    numbers = b'[{"role":"user","x":[1e400,' + b"9" * 40 + b"]}]"  # no decoder of numbers takes the first
    text = b"".join(list_items(StoredResponse(b"", numbers, b"[]"), "resp_7", {}))
    assert numbers[2:-2] in text


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"include": "x"}],
)
def test_wrong_query_is_named(query: dict[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        listed(stored(), query)
    assert (refused.value.status, refused.value.param) == (400, next(iter(query)))
