"""Lookups of the latest tokens, compared with a search through all of them."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.scheduler.sequence import Sequence
from baton.engine.speculation import lookup
from baton.engine.speculation.lookup import EarlierAnswers, Match, TokenIndex
from tests.batches import make_sequence

texts = st.lists(st.integers(0, 2), max_size=40)


def longest_match(known: list[int], latest: list[int], shortest: int, longest: int, stop: int) -> int:
    """The most of the last tokens of `latest` that end in `known` before `stop`; 0: fewer than `shortest`."""
    best = 0
    for end in range(1, stop):
        length = 0
        while length < min(longest, end, len(latest)) and known[end - length - 1] == latest[-length - 1]:
            length += 1
        best = max(best, length)
    return best if best >= shortest else 0


@given(parts=st.lists(texts, max_size=6), shortest=st.integers(1, 3), more=st.integers(0, 3))
def test_match_is_the_longest_of_all(parts: list[list[int]], shortest: int, more: int) -> None:
    longest = shortest + more
    index, known = TokenIndex(shortest, longest), []
    for part in parts:
        index.extend(part)
        known += part
        match = index.find_earlier()
        expected = longest_match(known, known, shortest, longest, len(known))
        assert (match.length if match is not None else 0) == expected or expected_is_old(known, shortest)
        if match is not None:
            check(match, known)
            assert match.end < len(known)


def expected_is_old(known: list[int], shortest: int) -> bool:
    """More places end in the same tokens than are compared."""
    last = known[-shortest:]
    places = [end for end in range(shortest, len(known)) if known[end - shortest : end] == last]
    return len(places) > lookup.MAX_CANDIDATES


def check(match: Match, latest: list[int]) -> None:
    matched = list(match.token_ids[match.end - match.length : match.end])
    assert matched == latest[-match.length :]


@given(text=st.lists(st.integers(0, 3), min_size=4, max_size=30), num_tokens=st.integers(1, 12))
def test_copy_goes_on_where_the_match_ends(text: list[int], num_tokens: int) -> None:
    index = TokenIndex(2, 4)
    index.extend(text)
    match = index.find_earlier()
    if match is not None:
        copied = match.copy(num_tokens)
        assert copied == [([*text, *copied])[match.end + place] for place in range(num_tokens)]


def test_place_that_was_followed_wins_over_one_that_is_as_good() -> None:
    index = TokenIndex(1, 2)
    index.extend([7, 1, 2, 8, 1, 2, 9, 1])
    followed = Match(index.token_ids, 2, 1)
    assert index.find_earlier() == Match(index.token_ids, 5, 1)
    assert index.find_earlier(followed) is followed
    moved = followed.moved(1)
    assert moved is not None and (moved.end, moved.length) == (3, 2)


def answered(prompt: list[int], answer: list[int], tenant: str = "", salt: bytes = b"") -> Sequence:
    sequence = make_sequence("r", prompt, answer)
    sequence.scheduling_key, sequence.cache_salt = tenant, salt
    return sequence


def test_answers_are_found_by_their_own_tenant_alone() -> None:
    earlier = EarlierAnswers(2, 4)
    earlier.add(answered([1, 2, 3], [4, 5, 6, 7], "acme", b"a"))
    asking = answered([9, 3], [4], "acme", b"a")
    match = earlier.find(asking, None)
    assert match is not None and match.copy(8) == [5, 6, 7], "the copy ends with the answer"
    assert earlier.find(answered([9, 3], [4], "acme", b"b"), None) is None
    assert earlier.find(answered([9, 3], [4], "other", b"a"), None) is None
    longer = Match(array("i", [0, 3, 4, 8]), 3, 2)
    assert earlier.find(asking, longer) is longer, "one that is as long"


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_TENANT_TOKENS", 64)
    monkeypatch.setattr(lookup, "MAX_TOKENS", 100)
    earlier = EarlierAnswers(2, 4)
    for number in range(200):
        earlier.add(answered([0], list(range(number, number + 30)), f"tenant-{number // 40}"))
        kept = [sum(map(len, indices)) for indices in earlier._of_tenants.values()]
        assert sum(kept) == earlier._num_tokens and (sum(kept) <= 100 or len(kept) == 1)
        assert max(kept) <= 64
    assert list(earlier._of_tenants)[-1] == ("tenant-4", b"")
