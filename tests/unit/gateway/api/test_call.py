import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from baton.clock import ManualClock
from baton.cluster.model_directory import resolve_model
from baton.config.gateway import GatewayConfig, GatewaySettings
from baton.errors import BatonError, InvalidRequest
from baton.gateway.api.body import (
    MAX_PROMPTS,
    UNSUPPORTED,
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode_body,
    early_text,
    list_prompts,
)
from baton.gateway.api.body_reader import BodyReader, ServedModels
from baton.gateway.api.call import SAMPLING_FIELDS, AskedCall, Call
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.api.inference import Inference
from baton.gateway.api.prompt_reader import PromptReader, ReadPolicy
from baton.gateway.metrics.metrics import ROUTES, Metrics
from baton.gateway.streams.resume import EventIds
from baton.gateway.tenants.limiter import Limiter
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import SamplingParams, StructuredOutputs
from tests.scripted_service import ScriptedService
from tests.unit.gateway.calls import TENANT, TOKENIZER, served_model

TOOL = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "a"}]
NOTHING: tuple[object, ...] = (None, False, 0, {}, [], "")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool }} <tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


LOOP = asyncio.Runner()  # of all tests of this file, which share a form server
FORMS = FormChecker()
BODIES = BodyReader(PromptReader(TOKENIZER, ChatTemplate(TEMPLATE, {})))


@pytest.fixture(scope="module", autouse=True)
def _loop_ends() -> Iterator[None]:
    yield
    LOOP.run(FORMS.close())
    LOOP.close()


def read(kind: Any, fields: dict[str, Any], **of_model: Any) -> Call:
    scope = {"type": "http", "headers": [], "state": {"tenant": TENANT}}

    charge = Limiter(Metrics(), GatewaySettings()).inputs.charge(TENANT.name, TENANT.policy.quotas)

    async def run() -> Call:
        return await inference(**of_model).read_call(kind, json.dumps(fields).encode(), scope, charge)

    return LOOP.run(run())


def inference(**of_model: Any) -> Inference:
    model = served_model(ScriptedService(), bodies=BODIES, **of_model)
    config, event_ids, metrics = GatewayConfig(model="tiny", routers=()), EventIds([b"k" * 32]), Metrics()
    limiter = Limiter(metrics, GatewaySettings(max_open_requests=1))
    models, clock = ServedModels([model]), ManualClock()
    return Inference(models, metrics, limiter, clock, config, event_ids, FORMS, draw_seed=lambda: 11)


def chat(**fields: Any) -> Call:
    return read("chat", {"messages": MESSAGES, **fields})


def completion(**fields: Any) -> Call:
    return read("completion", {"prompt": [5, 6], **fields})


def decode(kind: type[AnyBody], **fields: Any) -> AnyBody:
    return decode_body(json.dumps(fields).encode(), kind)[0]


def test_every_route_of_calls_has_its_own_count() -> None:
    async def routes() -> set[str]:
        return set(inference().posts)

    assert LOOP.run(routes()) <= ROUTES


def test_defaults_are_those_of_openai() -> None:
    assert chat().sampling.max_tokens is None and completion().sampling.max_tokens == 16
    assert chat().sampling.temperature == 1.0 and chat().num_choices == 1
    assert not chat().is_streamed and chat().is_chat and not completion().is_chat
    assert chat().tenant.name == "acme" and chat().model == "tiny"


def test_every_sampling_field_of_a_body_reaches_the_sampler() -> None:
    fields: dict[str, Any] = dict.fromkeys(SAMPLING_FIELDS, 1) | {"ignore_eos": True, "top_p": 0.5}
    fields |= {"include_stop_str_in_output": True, "stop": "a", "bad_words": ["b"]}
    sampling = completion(**fields, max_tokens=9).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert len(fields) == 12


def test_model_caps_the_tokens_of_an_answer() -> None:
    capped = SamplingParams(max_tokens=9)
    for asked, given in ((None, 9), (4, 4), (100, 9)):
        call = read("chat", {"messages": MESSAGES, "max_tokens": asked}, defaults=capped)
        assert call.sampling.max_tokens == given


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).sampling.max_tokens == 3


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("wrong", [0, -1, 10**30])
def test_limit_of_tokens_is_refused_by_the_name_that_was_given(key: str, wrong: int) -> None:
    with pytest.raises(BatonError) as refused:
        chat(**{key: wrong})
    assert as_api_error(refused.value).param == key


@pytest.mark.parametrize("prompt", [[5] * 100_000, "a" * 2_000_000])
def test_prompt_that_is_too_long_is_refused_in_words_that_clients_know(prompt: object) -> None:
    """Agents shorten a conversation after such an error, whether or not the text was tokenised."""
    with pytest.raises(ApiError, match=r"^prompt is too long: .* maximum context length is \d+") as refused:
        completion(prompt=prompt)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


def test_seed_is_drawn_for_a_body_without_a_seed() -> None:
    assert (chat().sampling.seed, chat(seed=3).sampling.seed) == (11, 3)
    assert chat(seed=-1).sampling.seed == 2**63 - 1


def test_number_of_choices_is_bounded() -> None:
    for number in (4, 128):
        call = chat(n=number)
        assert (call.num_choices, call.sampling.n) == (number, 1)
    for wrong in (0, -1, 129):
        with pytest.raises(InvalidRequest, match="n must be between 1 and 128") as refused:
            chat(n=wrong)
        answer = as_api_error(refused.value)
        assert (answer.status, answer.param) == (400, "n")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_seed_fits_64_bits(seed: int) -> None:
    with pytest.raises(ApiError, match="seed"):
        chat(seed=seed)


def test_whole_floats_are_integers() -> None:
    call = chat(max_tokens=5.0, seed=3.0, n=2.0, temperature=1)
    assert (call.sampling.max_tokens, call.sampling.seed, call.num_choices) == (5, 3, 2)
    with pytest.raises(ApiError, match="max_tokens"):
        chat(max_tokens=5.5)


def test_logprobs() -> None:
    assert chat(top_logprobs=0).sampling.logprobs is None
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(ApiError, match="^top_logprobs: "):
            chat(**fields)
    echoed = completion(echo=True, logprobs=2).sampling
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    assert completion(logprobs=2).sampling.prompt_logprobs is None


def test_completion_may_ask_for_no_token() -> None:
    call = completion(max_tokens=0, echo=True)
    assert call.hides_tokens and call.sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match="max_tokens"):
        chat(max_tokens=0)


def test_stop_strings() -> None:
    assert chat(stop="a").sampling.stops == ("a",) and chat(stop=["a", "b"]).sampling.stops == ("a", "b")


def test_keys_of_logit_bias_are_token_ids() -> None:
    assert chat(logit_bias={"7": 1}).sampling.logit_bias == {7: 1.0}
    with pytest.raises(ApiError, match="token ids"):
        chat(logit_bias={"seven": 1})


def test_usage_in_streams() -> None:
    assert not chat(stream=True).has_usage
    assert chat(stream=True, stream_options={"include_usage": True}).has_usage
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).has_running_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).has_running_usage


@pytest.mark.parametrize(
    ("read_one", "fields"),
    [
        (chat, {"functions": [{}]}),
        (chat, {"tool_choice": {"type": "custom"}, "tools": [TOOL]}),
        (chat, {"echo": True}),
        (chat, {"best_of": 2}),
        (completion, {"best_of": 2}),
        (completion, {"suffix": "b"}),
        (completion, {"tools": [TOOL]}),
        *((completion, {"ebnf": value}) for value in (True, 3, {"type": "object"}, ["a"], "x")),
        *((read_one, {key: "[a-z]"}) for read_one in (chat, completion) for key in UNSUPPORTED),
    ],
)
def test_unsupported_field_is_refused_by_name(read_one: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="not supported") as refused:
        read_one(**fields)
    assert (refused.value.status, refused.value.code) == (400, "unsupported")
    assert refused.value.param == next(iter(fields))


def test_unsupported_field_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ApiError, match="functions = .* is not supported by this server: give tools"):
        chat(functions=[{}])


@pytest.mark.parametrize(
    ("read_one", "fields"),
    [
        (chat, {"tools": []}),
        (chat, {"tools": [TOOL], "tool_choice": "none"}),
        (chat, {"response_format": {"type": "text"}}),
        (chat, {"tool_choice": "auto", "tools": []}),
        (completion, {"best_of": 2, "n": 2}),
        (completion, {"best_of": 1}),
        (completion, {"response_format": {"type": "text"}, "prompt_logprobs": None}),
        *((completion, {"ebnf": value}) for value in NOTHING),
    ],
)
def test_unsupported_field_with_a_harmless_value_is_accepted(read_one: Any, fields: dict[str, Any]) -> None:
    assert read_one(**fields).parsing.tool_call_parser is None


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": AS_TEXT},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": AS_TEXT}),
        ({"structured_outputs": {"json": AS_TEXT, "regex": None}}, {"json": AS_TEXT}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, {"json": AS_TEXT}),
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"guided_json": None, "structured_outputs": None}, None),
    ],
)
@pytest.mark.parametrize("read_one", [chat, completion])
def test_form_of_the_answer(read_one: Any, fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    expected = None if form is None else StructuredOutputs(**form)
    assert read_one(**fields).sampling.structured_outputs == expected


def test_structural_tag_has_two_spellings() -> None:
    tag = {"type": "structural_tag", **TAG}
    ours = chat(response_format=tag).sampling.structured_outputs
    theirs = chat(structured_outputs={"structural_tag": tag}).sampling.structured_outputs
    assert ours is not None and ours == theirs and ours.chosen[0] == "structural_tag"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "also": 1}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_json": {"type": "object", "unevaluatedProperties": False}}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, None),
        ({"guided_regex": "a", "min_tokens": 2}, None),
    ],
)
def test_form_that_cannot_be_kept_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises((ApiError, InvalidRequest)) as refused:
        completion(**fields)
    found = getattr(refused.value, "param", None)
    assert found == param or (found or "").startswith(f"{param}.")
    assert next(iter(fields)) in str(refused.value) or "structured_outputs" in str(refused.value)
    assert str(refused.value).count("structured_outputs:") <= 1


def test_value_that_is_none_of_a_list_is_answered_with_the_list() -> None:
    with pytest.raises(
        ApiError, match="'yaml', expected one of json_object, json_schema, structural_tag, text"
    ):
        completion(response_format={"type": "yaml"})


@pytest.mark.parametrize("is_special", [False, True])
def test_tags_that_are_special_tokens_stay_in_the_text(is_special: bool) -> None:
    inner = tokenizers.Tokenizer.from_file(str(resolve_model("tiny") / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken(tag, special=is_special) for tag in ("<think>", "</think>")])
    template = ChatTemplate("{{ messages[0].content.split('</think>')[-1] }}", {})
    reader = PromptReader(Tokenizer(inner), template)
    policy = ReadPolicy(model="tiny", may_use=True, max_model_len=100)
    read_body = reader.read("chat", json.dumps({"messages": MESSAGES}).encode(), policy)
    assert isinstance(read_body, AskedCall) and read_body.parsing.reasoning_parser == "qwen3"
    assert read_body.parsing.keeps_special_tokens is is_special


def test_tools_are_rendered_and_may_be_called() -> None:
    fields: dict[str, Any]
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": None}):
        call = chat(tools=[TOOL], **fields)
        assert call.parsing.tool_call_parser == "hermes" and call.parsing.is_parallel
        assert not call.sampling.skip_special_tokens
        assert "weather" in TOKENIZER.decode(call.prompts[0].token_ids, skip_special_tokens=False)
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parsing.is_parallel
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        chat(tools=[{}])


@pytest.mark.parametrize(
    ("fields", "num_entries"),
    [
        ({}, 0),  # plain text has no entries
        ({"n": 8}, 0),
        ({"echo": True}, 2),
        ({"echo": True, "n": 8}, 16),
        ({"logprobs": 0, "max_tokens": 10}, 10),
        ({"logprobs": 20, "max_tokens": 10, "n": 8}, 10 * 8 * 21),
        ({"logprobs": 20, "max_tokens": 10_000}, 98 * 21),  # the model has no room for more
        ({"logprobs": 4, "max_tokens": 3, "n": 2, "echo": True}, (2 + 3) * 2 * 5),
    ],
)
def test_number_of_entries_of_an_answer(fields: dict[str, Any], num_entries: int) -> None:
    assert completion(**fields).num_answer_entries(100) == num_entries


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatBody, {"messages": MESSAGES}),
        (CompletionBody, {"prompt": "a"}),
        (TokenizeBody, {}),
        (DetokenizeBody, {"tokens": []}),
    ],
)
def test_every_optional_field_may_be_null(kind: type[AnyBody], needed: dict[str, Any]) -> None:
    fields = dict.fromkeys(kind.__struct_fields__, None)
    assert decode(kind, **{**fields, **needed}) == decode(kind, **needed)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [MESSAGES[0]] * 2049}, "messages"),
        ({"messages": None}, "messages"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode(ChatBody, **{"messages": MESSAGES, **fields})
    assert refused.value.status == 400
    assert refused.value.param is not None and refused.value.param.startswith(param)


def test_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        decode(CompletionBody)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b'{"prompt": "a", "\xff": 1}', b"[" * 100_000, b"{} {}"]
)
def test_body_that_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(BatonError) as refused:
        decode_body(data, CompletionBody)
    assert as_api_error(refused.value).status == 400


def test_unknown_keys_are_reported_and_ignored() -> None:
    data = json.dumps({"prompt": "a", "y": {}, "user": "me", "x": 1, "n": 2}).encode()
    body, unknown = decode_body(data, CompletionBody)
    assert unknown == ["y", "x"] and body.n == 2


def test_unsupported_key_that_asks_for_nothing_is_no_unknown_key() -> None:
    """A strict gateway and `/v1/responses` refuse unknown keys."""
    data = json.dumps({"prompt": "a", "kv_transfer_params": {}, "best_of": 1}).encode()
    assert decode_body(data, CompletionBody)[1] == []


def test_early_keys_are_found_without_objects_for_the_others() -> None:
    """The event loop looks for them in whole bodies."""
    unknown = {f"k{index}": [index] for index in range(10_000)}
    data = json.dumps({**unknown, "model": "tiny", "previous_response_id": 5}).encode()
    tracemalloc.start()
    assert early_text(data, "model") == "tiny" and early_text(data, "previous_response_id") is None
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes < len(unknown)
    assert early_text(data[:-1], "model") is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_forms_of_prompts(prompt: object, expected: list[object]) -> None:
    assert list_prompts(prompt) == expected


WRONG_PROMPTS: list[object] = [None, 1, {}, [], [None], [[]], [1, "a"], ["a", 1], [True], [-1], [2**31]]
WRONG_PROMPTS += [[[1, -1]], [[True]], [1.0], [[["a"]]], ["a"] * (MAX_PROMPTS + 1)]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS)
def test_wrong_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        list_prompts(prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls"),
        ({"reasoning_effort": "vast"}, "reasoning_effort"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),  # the template reads none
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),  # without a stream
        ({"cache_salt": ""}, "cache_salt"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_key_with_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, InvalidRequest)) as refused:
        chat(tools=[TOOL], **fields)
    answer = as_api_error(refused.value)
    assert (answer.status, answer.param) == (400, param)


def test_calls_that_are_asked_for_are_a_form_of_the_answer() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        form = chat(tools=[TOOL], tool_choice=choice).sampling.structured_outputs
        assert form is not None and form.chosen[0] == "frame" and "weather" in form.chosen[1]
    assert chat(tools=[TOOL]).sampling.structured_outputs is None
    both = chat(tools=[TOOL], guided_regex="a").sampling.structured_outputs
    assert both is not None and both.regex == "a" and both.frame is not None and "@form" in both.frame
