import asyncio
from collections.abc import Sequence

import pytest

from baton.cluster.model_directory import resolve_model
from baton.gateway.api.prompt_reader import PromptReader
from baton.gateway.tenants.public_prefixes import PublicPrefixes
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.chat_template import ChatTemplate
from tests.unit.gateway.calls import TOKENIZER, ids

HOUSE = "You sort numbers. Answer with the numbers alone."


def a_reader() -> PromptReader:
    return PromptReader(TOKENIZER, ChatTemplate.from_directory(resolve_model("tiny")))


def a_tenant(*texts: str) -> Tenant:
    return Tenant(name="acme", cache_salt=b"s" * 16, public_texts=texts)


def num_public(token_ids: Sequence[int], *texts: str, reader: PromptReader | None = None) -> int:
    return asyncio.run(PublicPrefixes(reader or a_reader()).num_tokens(a_tenant(*texts), token_ids))


def chat(*contents: str) -> list[int]:
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("system", "user"), contents, strict=False)
    ]
    return a_reader().encode_chat(messages, max_tokens=1000)


def test_a_prompt_that_begins_with_the_text_shares_its_tokens() -> None:
    shared = num_public(ids(HOUSE + " sort(3 1 2)="), HOUSE)
    assert len(ids(HOUSE)) - 1 <= shared <= len(ids(HOUSE)), "the last token may grow into what follows"


def test_a_chat_with_the_text_as_its_system_message_shares_it() -> None:
    prompt = chat(HOUSE, "3 1 2")
    shared = num_public(prompt, HOUSE)
    assert TOKENIZER.decode(prompt[:shared]).count(HOUSE) == 1
    assert "3 1 2" not in TOKENIZER.decode(prompt[:shared])


def test_a_prompt_that_goes_on_otherwise_shares_what_is_alike() -> None:
    other = HOUSE.replace("numbers alone", "secret word")
    shared = num_public(ids(other), HOUSE)
    assert 0 < shared < len(ids(HOUSE))
    assert HOUSE.startswith(TOKENIZER.decode(ids(other)[:shared]))


def test_the_longest_of_several_texts_counts() -> None:
    prompt = ids(HOUSE + " sort(1)=")
    assert num_public(prompt, "You", HOUSE, "nothing alike") == num_public(prompt, HOUSE)


def test_who_has_no_public_texts_shares_nothing() -> None:
    assert num_public(ids(HOUSE)) == 0


def test_a_model_without_a_tokenizer_shares_nothing() -> None:
    assert num_public([1, 2, 3], HOUSE, reader=PromptReader(None, None)) == 0


def test_forms_that_a_model_lacks_are_looked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    async def twice() -> None:
        public = PublicPrefixes(PromptReader(TOKENIZER, None))
        for _ in range(2):
            assert await public.num_tokens(a_tenant(HOUSE), ids(HOUSE))

    with caplog.at_level("INFO"):
        asyncio.run(twice())
    assert len(caplog.records) == 1 and HOUSE not in str(vars(caplog.records[0]))
