"""Messages and tools of one chat to prompt text, by the model's own chat template.

`read_messages` checks the messages of a request. `ChatTemplate.render` writes the prompt.

The template comes from the model directory, never from a request. Messages come from requests, so rendering
is bounded in steps and in output, and a failure is an error of that one request. Memory is not bounded:
docs/decisions/0004 says why.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, TypeAlias

import minijinja
import msgspec

from baton.errors import ConfigError, InvalidRequest, ModelError, shown
from baton.gateway.api.body import TEXT_KEYS, check_depth
from baton.tokenizer_file import read_text, read_tokenizer_config

TEMPLATE_FILE: Final = "chat_template.jinja"
TOOLS_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
MAX_STEPS: Final = 5_000_000  # of the template engine; 2,048 messages take a few hundred thousand
MAX_OUTPUT_CHARS: Final = 8 * 2**20
MAX_INDENT: Final = 64  # spaces, of JSON
NAME: Final = "chat template"
TOOLS_NAME: Final = "chat template for tools"
# Faults of the template itself, independent of the messages.
TEMPLATE_FAULTS: Final = frozenset(
    {"SyntaxError", "UnknownFilter", "UnknownFunction", "UnknownTest", "UnknownMethod", "TemplateNotFound"}
)
# Marks the assistant's text for training; the tag renders its body.
GENERATION_TAG: Final = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")

# minijinja drops the new line after this tag, Jinja2 does not; "+" keeps it.
RAW_TAG: Final = re.compile(r"(\{%[-+]?\s*raw\s*)(%\})")

# A loop over the parts of a message's content, by the rule of vLLM.
PARTS_LOOP: Final = re.compile(
    r"\{%[-+]?\s*for\s+\w+\s+in\s+(content|\w+\.content|\w+\[\s*['\"]content['\"]\s*\])(?![\w.(\[])"
)

# Names that the renderer sets itself or that vLLM refuses, and functions of the environment.
RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "template_name"}
    | {"raise_exception", "strftime_now", "continue_final_message", "documents"}
)

REASONING_KEYS: Final = ("reasoning", "reasoning_content")  # of a message: vLLM's, and its former one
# OpenAI's newer name of the role "system". Most templates do not know it; many leave its messages out.
DEVELOPER: Final = "developer"
KNOWS_DEVELOPERS: Final = re.compile(r"""["']developer["']""")  # in a template
REASONING_EFFORT: Final = "reasoning_effort"  # a key of bodies, and a variable of templates, as in vLLM
EXAMPLE: Final = '{"role": "user", "content": "Hi"}'

CONTINUE: Final = "continue_final_message"  # a key of bodies
END_MARK: Final = "\ue000end of the last message\ue001 "  # of private characters; the space shows stripping

Message: TypeAlias = Mapping[str, object]


class ChatTemplate:
    """Renders messages as the prompt text that the model was trained on."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        default_kwargs: Mapping[str, object] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template. Raises ModelError when `source` is no template.

        tool_source: a separate template for chats with tools. default_kwargs: of callers that do not set
        them; raises ConfigError for a name that no template reads. now: for templates that show a date.
        """
        self.source = source if tool_source is None else tool_source  # that tells the forms of answers
        self._has_own_for_tools = tool_source is not None
        self._special_tokens = dict(special_tokens)
        sources = {NAME: source, TOOLS_NAME: tool_source or ""}
        self._reads_parts = {name: PARTS_LOOP.search(each) is not None for name, each in sources.items()}
        self._knows_developers = {
            name: KNOWS_DEVELOPERS.search(each) is not None for name, each in sources.items()
        }
        self._environment = minijinja.Environment(
            debug=False,  # debug output would carry one request's messages into an error text
            fuel=MAX_STEPS,
            lstrip_blocks=True,
            trim_blocks=True,
        )
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", lambda form: now().strftime(form))
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_test("iterable", lambda value: isinstance(value, Iterable))  # as in Jinja2
        try:
            self._environment.add_template(NAME, _without_generation_tags(source))
            if tool_source is not None:
                self._environment.add_template(TOOLS_NAME, _without_generation_tags(tool_source))
            # Variables that a caller may set, by template.
            self._variables = {
                name: frozenset(self._environment.undeclared_variables_in_template(name))
                for name in ((NAME,) if tool_source is None else (NAME, TOOLS_NAME))
            }
        except minijinja.TemplateError as error:
            raise ModelError(f"the chat template is damaged: {error}") from None
        self._default_kwargs = dict(default_kwargs or {})
        for name in self._default_kwargs:
            if self._is_reserved(name) or not any(name in read for read in self._variables.values()):
                raise ConfigError(
                    f"gateway.default_chat_template_kwargs: the chat template reads no {name!r} of callers"
                )

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        file: str | None = None,
        default_kwargs: Mapping[str, object] | None = None,
    ) -> "ChatTemplate | None":
        """Read the model's template, from `chat_template.jinja` first, as in `transformers`.

        A separate template for chats with tools lies in `additional_chat_templates`, or in the older list of
        tokenizer_config.json.

        Returns None when the model has no template: it completes text and cannot chat. file: a template in
        place of the model's own; raises ConfigError when it cannot be read. default_kwargs: see `__init__`.
        """
        config = read_tokenizer_config(directory)
        tool_source = None
        if file is not None:
            source: str | None = _given(Path(file))
        elif (source := read_text(directory / TEMPLATE_FILE)) is not None:
            tool_source = read_text(directory / TOOLS_TEMPLATE_FILE)
        else:
            source, tool_source = config.template("default"), config.template("tool_use")
        if source is not None:
            return cls(
                source, config.special_tokens(), tool_source=tool_source, default_kwargs=default_kwargs
            )
        if default_kwargs:
            raise ConfigError("gateway.default_chat_template_kwargs: the model has no chat template")
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt; encode it without adding special tokens. Raises InvalidRequest on bad messages.

        continue_final_message: the prompt ends with the content of the last message, which the answer
        continues; `add_generation_prompt` must be False. kwargs: the caller's own variables of the template,
        such as `enable_thinking`. Raises InvalidRequest, which names the key, for a last message that cannot
        be continued, for a reserved name and for a name that the template does not read.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(f"{CONTINUE}: add_generation_prompt must be false beside it")
            return self._render_open(messages, tools, kwargs)
        name = self._name_of(has_tools=bool(tools))
        variables = self._variables[name]
        self._check_kwargs(kwargs or {}, variables)
        defaults = {key: value for key, value in self._default_kwargs.items() if key in variables}
        try:
            prompt = self._environment.render_template(
                name,
                messages=[self._as_read(each, name) for each in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{**defaults, **(kwargs or {})},
                **self._special_tokens,
            )
        except minijinja.TemplateError as error:
            raise _translate(error) from None
        except TypeError as error:  # of the functions that we lend to templates
            raise ModelError(f"the chat template calls a function wrongly: {error}") from None
        except RecursionError:
            raise InvalidRequest("the messages are nested too deep for the chat template") from None
        if len(prompt) > MAX_OUTPUT_CHARS:
            raise InvalidRequest(
                f"the prompt should be at most {MAX_OUTPUT_CHARS} characters, got {len(prompt)}"
            )
        return prompt

    def _render_open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        kwargs: Mapping[str, object] | None,
    ) -> str:
        """Return the prompt up to the end of the last message's content."""
        *before, last = messages
        content = _with_text(last).get("content")
        if not isinstance(content, str) or last.get("tool_calls"):
            raise InvalidRequest(f"{CONTINUE}: the last message has no text, or calls tools")
        marked = {**last, "content": content + END_MARK}
        text = self.render([*before, marked], tools=tools, add_generation_prompt=False, kwargs=kwargs)
        end = text.rfind(END_MARK.rstrip())
        if end < 0:
            raise InvalidRequest(f"{CONTINUE}: the chat template leaves out the text of the last message")
        # As in transformers: a template that strips contents would have stripped this one as well.
        is_stripped = not text.startswith(END_MARK, end)
        return text[:end].rstrip() if is_stripped else text[:end]

    def _as_read(self, message: Message, name: str) -> Message:
        """Return a message in the form that the template of this name reads."""
        if message.get("role") == DEVELOPER and not self._knows_developers[name]:
            message = {**message, "role": "system"}
        return _with_text(message, keeps_parts=self._reads_parts[name])

    def reads(self, name: str, *, has_tools: bool = False) -> bool:
        """Tell whether the template, or the one for chats with tools, reads a variable of this name."""
        return name in self._variables[self._name_of(has_tools=has_tools)]

    def _name_of(self, *, has_tools: bool) -> str:
        return TOOLS_NAME if has_tools and self._has_own_for_tools else NAME

    def _is_reserved(self, name: str) -> bool:
        return name in RESERVED or name in self._special_tokens

    def _check_kwargs(self, kwargs: Mapping[str, object], variables: Collection[str]) -> None:
        for name in kwargs:
            key = name if name == REASONING_EFFORT else "chat_template_kwargs"
            if self._is_reserved(name):
                raise InvalidRequest(f"{key}: {name!r} is not for callers to set")
            if name not in variables:
                raise InvalidRequest(f"{key}: the chat template of this model reads no {name!r}")


def _given(file: Path) -> str:
    try:
        source = read_text(file)
    except ModelError as error:
        raise ConfigError(f"gateway.chat_template: {error}") from None
    if source is None:
        raise ConfigError(f"gateway.chat_template: {file}: there is no such file")
    return source


def _translate(error: minijinja.TemplateError) -> InvalidRequest | ModelError:
    if error.kind in TEMPLATE_FAULTS:
        return ModelError(f"the chat template cannot be used: {error}")
    if error.kind == "OutOfFuel":
        return InvalidRequest(f"the messages take more than {MAX_STEPS} steps of the chat template")
    return InvalidRequest(f"the messages do not fit the chat template: {error}")


def _without_generation_tags(source: str) -> str:
    source = RAW_TAG.sub(r"\1+\2", source)
    return GENERATION_TAG.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)


def _raise_exception(message: str) -> None:
    raise InvalidRequest(message)


def _to_json(value: object, *, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise ModelError(f"the chat template indents JSON by {indent}: expected 0 to {MAX_INDENT} spaces")
    # Not minijinja's own, which escapes < and > for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def read_messages(messages: object) -> list[Message]:
    """Check one conversation and return it in the form that chat templates read.

    `content` becomes text, or a list of several parts such as `{"type": "text", "text": "Hi"}`. Raises
    InvalidRequest that names the message and its key.
    """
    if isinstance(messages, Mapping):
        raise InvalidRequest(f"messages: expected a list of messages such as [{EXAMPLE}], got one message")
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages: expected a list such as [{EXAMPLE}], got {shown(messages)}")
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not read:
        raise InvalidRequest("messages: expected at least one message, got none")
    return read


def _read_message(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: expected a dict such as {EXAMPLE}, got {shown(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{name}: role: expected text such as 'user', got {_value(message, 'role')}")
    reasoning = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    if reasoning and message["role"] == "assistant":  # templates read either
        message = {**message, **dict.fromkeys(REASONING_KEYS, reasoning[0])}
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        read = [_read_tool_call(call, f"{name}: tool_calls[{index}]") for index, call in enumerate(calls)]
        message = {**message, "tool_calls": read}
    elif calls is not None:
        raise InvalidRequest(f"{name}: tool_calls: expected a list of calls, got {shown(calls)}")
    if not calls and "tool_calls" in message:  # templates may ask whether there is the key
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if content is None and "content" in message and message["role"] == "assistant":
        return {**message, "content": ""}
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{name}: content: expected text or a list of text parts, got {_value(message, 'content')}"
        )
    texts = [_text(part, f"{name}: content[{index}]") for index, part in enumerate(content)]
    if len(texts) > 1:
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return {**message, "content": "".join(texts)}


def _with_text(message: Message, *, keeps_parts: bool = False) -> Message:
    """Make a line of each part of a message's content, as vLLM does for templates that read text.

    keeps_parts: keep the parts of users' messages. Templates that loop over parts may read only the first
    part of other roles' messages.
    """
    content = message.get("content")
    if not isinstance(content, list) or (keeps_parts and message.get("role") == "user"):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _read_tool_call(call: object, name: str) -> object:
    """Decode the arguments: templates write them as JSON, and text would come out in quotes."""
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{name}: expected a dict with the function that is called, got {shown(call)}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest(
            f"{name}: arguments: expected the JSON of an object, got {shown(arguments)}"
        ) from None
    check_depth(arguments.encode("utf-8", "replace"), f"{name}: arguments: the JSON")
    return {**call, "function": {**function, "arguments": read}}


def _text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    got = shown(part)
    if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str):
        if kind not in TEXT_KEYS:
            got = f"a part of the type {kind[:80]!r}: models read text alone"
        elif isinstance(text := part.get(TEXT_KEYS[kind]), str):
            return text
    raise InvalidRequest(f'{name}: expected {{"type": "text", "text": "..."}}, got {got}')


def _value(message: Mapping[str, object], key: str) -> str:
    return shown(message[key]) if key in message else "nothing"
