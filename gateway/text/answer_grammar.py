"""Grammars of answers with calls of tools and with reasoning, in Lark's syntax with llguidance's additions.

A call's text follows the form that the model's parser reads (`CallForm`), and its arguments follow the JSON
schema of the tool. Tags that are tokens of the vocabulary are written as `<[token id]>`, others as text.
`AnswerGrammar` describes a whole answer: reasoning, if the model reasons, and then calls, text, or the form
that the request asks for, which is `@form` here (`StructuredOutputs.frame`).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from baton.errors import InvalidRequest
from baton.request import JSON_WHITESPACE

ANY_ARGUMENTS: Final = {"type": "object"}
# Arguments that follow no schema.
ANY_PYTHON: Final = r"""([^"'()]|"([^"\\]|\\.)*"|'([^'\\]|\\.)*'|\([^()]*\))*"""
ANY_TAGS: Final = r"(/<parameter=[^>]*>\n([^<]|<[^\/])*<\/parameter>\n/)*"
NO_ARGUMENTS: Final = {"type": "object", "additionalProperties": False}
# Keys that describe a schema to readers and constrain nothing.
NOTES: Final = frozenset({"description", "title", "examples", "$comment", "default", "deprecated"})
MAPS_OF_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
LITERAL_KEYS: Final = frozenset({"enum", "const"})
PARAMETER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


Arguments: TypeAlias = Literal["json", "python", "tags"]  # the writing of arguments


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The text of calls: `begin`, then each call between `before` and `after`, with `between`, then `end`.

    `before` has the name of the tool for {name}.
    """

    before: str
    after: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Arguments = "json"
    # Begins calls within text, as the beginning of `begin` or of `before`. "": an answer is calls or text.
    trigger: str = ""
    not_text: str = ""  # without a trigger: characters with which no text begins
    is_single: bool = False  # an answer has at most one call
    # Calls begin as JSON does, so that no lexer can tell them from it: an answer of a form is no call.
    begins_as_json: bool = False


class CallableTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that an answer may call."""

    name: str
    schema: dict[str, Any] | None  # of its arguments; None: any object
    key: str  # of the body, for error messages


class AskedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and the calls that it asks for or allows."""

    tools: list[CallableTool]
    shown: list[dict[str, Any]] = []  # all tools of the body, which the prompt describes
    is_required: bool = False  # the answer calls one at least
    is_named: bool = False  # the answer calls the one tool that the body names
    is_parallel: bool = True
    is_limited: bool = False  # the prompt describes further tools, which may not be called
    text_arguments: dict[str, frozenset[str]] = {}  # by tool, the arguments that are text

    @property
    def is_constrained(self) -> bool:
        """A grammar must enforce what the request asks for."""
        return self.is_required or self.is_limited or any(tool.schema is not None for tool in self.tools)


class Tags:
    """The added tokens of a vocabulary. Made once for a model: some have a thousand."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """tokens: their ids, by their text."""
        self.token_ids = tokens
        marks = "|".join(re.escape(each) for each in sorted(tokens, key=len, reverse=True) if each)
        self._marks = re.compile(f"({marks})" if marks else r"(?!)")

    def split(self, text: str) -> list[str]:
        """Return the parts of a text: tokens, and what is between them."""
        return [part for part in self._marks.split(text) if part]


class AnswerGrammar:
    """The grammar of one answer, written rule by rule."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._rules: list[str] = ["TEXT: /(.|\\n)*/"]

    def text(self, text: str) -> str:
        """Return an expression of exactly this text."""
        ids = self._tags.token_ids
        return " ".join(f"<[{ids[p]}]>" if p in ids else _quoted(p) for p in self._tags.split(text))

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def until(self, name: str, tag: str) -> str:
        """Add a rule of any text up to the first `tag`, and with it; return its name."""
        if tag in self._tags.token_ids:
            return self.rule(name, f"TEXT {self.text(tag)}")
        return self.rule(f"{name}[lazy]", f"TEXT {_quoted(tag)}").removesuffix("[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression of JSON that follows the schema."""
        return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema})

    def written(self, start: str) -> str:
        """Return the grammar; start: the expression of the whole answer."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def calls(
        self,
        form: CallForm,
        tools: Sequence[CallableTool],
        *,
        is_parallel: bool,
        has_text: bool,
        before_text: str = "",
    ) -> str:
        """Return an expression of calls: one or, with `is_parallel`, several.

        has_text: there may be text before calls, or no call at all. before_text: an expression of what begins
        an answer that has no call. Raises InvalidRequest that names the key of a tool with arguments that
        cannot be described.
        """
        cut = form.trigger if has_text else ""
        begin = form.begin.removeprefix(cut) if form.begin else ""
        cut_of_call = "" if form.begin else cut
        names = []
        for number, tool in enumerate(tools):
            before = form.before.format(name=tool.name).removeprefix(cut_of_call)
            arguments = self.rule(f"arguments_{number}", self._arguments(form, tool))
            parts = [self.text(before), arguments, self.text(form.after)]
            names.append(self.rule(f"call_{number}", " ".join(part for part in parts if part)))
        call = self.rule("call", " | ".join(names))
        repeats = is_parallel and not form.is_single
        is_list = repeats and bool(form.begin or not cut)
        more = f"({self.text(form.between)} call)*" if is_list else ""
        parts = [self.text(begin), call, more, self.text(form.end)]
        calls = self.rule("calls", " ".join(part for part in parts if part))
        if not has_text:
            return calls
        if not form.trigger:
            pattern = rf"/([^{re.escape(form.not_text)}](.|\n)*)?/" if form.not_text else "TEXT"
            return f"{calls} | {before_text} {self.rule('other', pattern)}"
        opened = self.until("opened", form.trigger)
        return f"({opened} {calls})* TEXT" if repeats else f"{opened} {calls} | TEXT"

    def _arguments(self, form: CallForm, tool: CallableTool) -> str:
        schema = tool.schema
        if form.arguments == "json":
            return self.json(ANY_ARGUMENTS if schema is None else schema)
        if schema is None:
            return f"/{ANY_PYTHON}/" if form.arguments == "python" else ANY_TAGS
        properties, required = _properties(schema, tool)
        if form.arguments == "tags":
            return self._tagged(properties, required, schema, tool)
        return self._python(properties, required, schema)

    def _tagged(
        self,
        properties: Mapping[str, Any],
        required: Collection[str],
        schema: Mapping[str, Any],
        tool: CallableTool,
    ) -> str:
        parts = []
        for name, of_value in properties.items():
            begin = self.text(f"<parameter={name}>\n")
            value = f"{begin} {self._bare_value(name, of_value, schema, tool)}"
            parts.append(value if name in required else f"({value})?")
        return " ".join(parts) or '""'

    def _bare_value(self, name: str, of_value: Any, schema: Mapping[str, Any], tool: CallableTool) -> str:
        """Return an expression of a value and the end of its parameter; text has no quotes."""
        end = "\n</parameter>\n"
        if not is_text(of_value):
            return f"{self.json(_within(of_value, schema))} {self.text(end)}"
        if unkept := sorted({"pattern", "format"} & set(of_value)):
            message = f"{unkept[0]!r} of {name!r} cannot be kept in the form of this model's calls"
            raise InvalidRequest(f"{tool.key}: {message}")
        allowed = [of_value["const"]] if "const" in of_value else of_value.get("enum")
        if allowed is not None:
            texts = [self.text(each) for each in allowed if isinstance(each, str)]
            return f"({' | '.join(texts)}) {self.text(end)}"
        name = f"value_{len(self._rules)}"
        if (length := _length_of(of_value)) is not None:
            bounded = self.rule(name, f"/[^<]{length}/")
            return f"{bounded} {self.text(end)}"
        return self.rule(f"{name}[lazy]", f"TEXT {_quoted(end)}").removesuffix("[lazy]")

    def _python(
        self, properties: Mapping[str, Any], required: Collection[str], schema: Mapping[str, Any]
    ) -> str:
        """Return an expression of `name=value, ...`, in order: a rule for each rest of the list."""
        names, first = [*properties], len(self._rules)
        needed = [number for number, name in enumerate(names) if name in required]
        last_needed = max(needed, default=-1)
        rest = ""
        for number, name in reversed([*enumerate(names)]):
            here = f"{self.text(f'{name}=')} {self._python_value(properties[name], schema)}"
            if rest:
                here += f' ", " {rest}' if number < last_needed else f' (", " {rest})?'
            body = here if name in required or not rest else f"{here} | {rest}"
            rest = self.rule(f"parameters_{first}_{number}", body)
        if not rest:
            return '""'
        return rest if needed else f"{rest}?"

    def _python_value(self, of_value: Any, schema: Mapping[str, Any]) -> str:
        kind = of_value.get("type") if isinstance(of_value, dict) else None
        if kind == "boolean" and "enum" not in of_value and "const" not in of_value:
            return '("True" | "False")'
        if kind == "null":
            return '"None"'
        return self.json(_within(of_value, schema))


def _length_of(schema: Mapping[str, Any]) -> str | None:
    """Return the bounds of a text's length as in a regular expression; None for text of any length."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"{{{low},{high}}}" if low or high != "" else None


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, without notes for readers.

    Raises InvalidRequest for a schema of anything else.
    """
    if not parameters:
        return NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"expected the schema of an object, got type {parameters['type']!r}")
    slim = _without_notes(parameters)
    assert isinstance(slim, dict)
    return {"type": "object", **slim}


def text_arguments(parameters: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of the arguments that are text."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return frozenset()
    return frozenset(name for name, schema in properties.items() if is_text(schema))


def is_text(schema: Any) -> bool:
    """Return whether the schema allows only text."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    return isinstance(allowed, list) and bool(allowed) and all(isinstance(each, str) for each in allowed)


def _without_notes(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    slim: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            slim[key] = {name: _without_notes(each) for name, each in value.items()}
        elif key in LITERAL_KEYS:
            slim[key] = value
        elif key not in NOTES:
            slim[key] = _without_notes(value)
    return slim


def _properties(schema: Mapping[str, Any], tool: CallableTool) -> tuple[Mapping[str, Any], Collection[str]]:
    """Return the properties of arguments that are written one by one, and the names that are required."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, dict) or not is_list:
        raise InvalidRequest(f"{tool.key}: expected an object of properties, and a list of required names")
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
    if unknown := sorted(set(schema) - known):
        message = f"{unknown[0]!r} beside properties cannot be kept in the form of this model's calls"
        raise InvalidRequest(f"{tool.key}: {message}")
    for name in properties:
        if not PARAMETER_NAME.fullmatch(name):
            raise InvalidRequest(f"{tool.key}: {name!r} cannot be an argument in this model's calls")
    if missing := [name for name in required if name not in properties]:
        raise InvalidRequest(f"{tool.key}: {missing[0]!r} is required and is not among the properties")
    return properties, frozenset(required)


def _within(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the definitions that it may refer to."""
    defs = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**defs, **schema} if isinstance(schema, dict) else dict(defs)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
