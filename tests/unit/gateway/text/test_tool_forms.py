import pytest

from baton.gateway.text.tools import FoundCalls, ToolForm, form_of, reader_of

TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOLD + '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        (TOLD + '{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
        (TOLD + "<tool_call><function=name></function></tool_call>", None),
        (TOLD + "[TOOL_CALLS]", None),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_form(template: str, form: ToolForm | None) -> None:
    assert form_of(template) == form


def test_all_or_none_of_what_stands_together_are_calls() -> None:
    calls = FoundCalls()
    assert not calls.add(['{"name": "a"}', "{"]) and not calls.calls
    assert calls.add(['{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "parameters": {"x": 1}}'])
    assert [call.arguments for call in calls.calls] == ['{"x":1}'] * 2
    assert len({call.id for call in calls.calls}) == 2


@pytest.mark.parametrize(
    ("form", "text"),
    [("hermes", '<tool_call>{"name": "a"}</tool_call>' * 2), ("llama", '{"name": "a"};{"name": "b"}')],
)
def test_calls_beside_each_other_may_be_unwanted(form: ToolForm, text: str) -> None:
    for is_parallel in (True, False):
        reader = reader_of(form, is_parallel=is_parallel, new_id=lambda: "call_1")
        assert reader.push(text) + reader.finish() == ""
        assert len(reader.found) == (2 if is_parallel else 1)
