"""Messages to prompt text by the model's own chat template.

The template comes from the model directory, never from a request. Messages come from requests, so rendering
is bounded in steps and in output, and a failure is an error of that one request. Memory is not bounded:
docs/decisions/0004 says why.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import minijinja

from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.gateway.text.model_files import TEMPLATE_FILE, read_text, read_tokenizer_config
from baton.gateway.text.tools import form_of

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

# Names that the renderer sets itself or that vLLM refuses, and functions of the environment.
RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "template_name"}
    | {"raise_exception", "strftime_now", "continue_final_message", "documents"}
)

Message = Mapping[str, object]


class ChatTemplate:
    """Renders messages as the prompt text that the model was trained on."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template. Raises ModelError when `source` is no template.

        tool_source: a separate template for chats with tools. now: the time for templates that show a date.
        """
        self.tool_form = form_of(source if tool_source is None else tool_source)
        self._has_own_for_tools = tool_source is not None
        self._special_tokens = dict(special_tokens)
        self._environment = minijinja.Environment(
            debug=False,  # debug output would carry one request's messages into an error text
            fuel=MAX_STEPS,
            lstrip_blocks=True,
            trim_blocks=True,
        )
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", lambda form: now().strftime(form))
        self._environment.add_filter("tojson", _to_json)
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

    @classmethod
    def from_directory(cls, directory: Path, file: str | None = None) -> "ChatTemplate | None":
        """Read the model's template, from `chat_template.jinja` first, as in `transformers`.

        Returns None when the model has no template: it completes text and cannot chat. file: a template in
        place of the model's own; raises ConfigError when it cannot be read.
        """
        config = read_tokenizer_config(directory)
        source = read_text(directory / TEMPLATE_FILE) if file is None else _given(Path(file))
        if source is not None:
            return cls(source, config.special_tokens())
        source = config.template("default")
        if source is None:
            return None
        return cls(source, config.special_tokens(), tool_source=config.template("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt; encode it without adding special tokens. Raises InvalidRequest on bad messages.

        kwargs: the caller's own variables of the template, such as `enable_thinking`. Raises InvalidRequest
        for a reserved name and for a name that the template does not read.
        """
        self._check_kwargs(kwargs or {}, has_tools=bool(tools))
        try:
            prompt = self._environment.render_template(
                TOOLS_NAME if tools and self._has_own_for_tools else NAME,
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **(kwargs or {}),
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

    def _check_kwargs(self, kwargs: Mapping[str, object], *, has_tools: bool) -> None:
        variables = self._variables[TOOLS_NAME if has_tools and self._has_own_for_tools else NAME]
        for name in kwargs:
            if name in RESERVED or name in self._special_tokens:
                raise InvalidRequest(f"chat_template_kwargs: {name!r} is not for callers to set")
            if name not in variables:
                raise InvalidRequest(f"the chat template of this model reads no {name!r}")


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
    return GENERATION_TAG.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)


def _raise_exception(message: str) -> None:
    raise InvalidRequest(message)


def _to_json(value: object, *, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise ModelError(f"the chat template indents JSON by {indent}: expected 0 to {MAX_INDENT} spaces")
    # Not minijinja's own, which escapes < and > for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)
