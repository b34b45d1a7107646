"""Reads the keys of a body that ask for a form: `response_format`, `structured_outputs`, `guided_*`."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.gateway.api.errors import invalid
from baton.request import StructuredOutputs

MAX_CHOICES_OF_FORM: Final = 4096
Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES_OF_FORM)]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`. A schema holds with and without `strict`."""

    schema: dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format` of OpenAI, and vLLM's structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None


class StructuredOutputsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM. The names are those of `StructuredOutputs`."""

    json: dict[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: dict[str, object] | str | None = None


class AskedForm(msgspec.Struct, frozen=True):
    """A form, and the key of the body that asks for it."""

    key: str
    form: StructuredOutputs


class FormKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body that ask for a form. A body may ask for one form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    # vLLM's older keys
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def form(self) -> AskedForm | None:
        """Return the form that the body asks for. ApiError 400 names the key of one that cannot be read."""
        asked = list(self._forms())
        if len(asked) > 1:
            raise invalid(
                f"{asked[1][0]}: the body asks for a form by {asked[0][0]} already", param=asked[1][0]
            )
        for key, fields in asked:
            try:
                return AskedForm(key, msgspec.convert(fields, StructuredOutputs))
            except (msgspec.ValidationError, InvalidRequest) as error:
                raise invalid(f"{key}: {error}", param=key) from None
        return None

    def _forms(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Each key that asks for a form, with the fields of `StructuredOutputs`."""
        wanted = self.response_format
        if wanted is not None and wanted.type != "text":
            yield "response_format", _of_response_format(wanted)
        if (given := self.structured_outputs) is not None:
            fields = msgspec.structs.asdict(given)
            texts = {name: _text(fields[name]) for name in ("json", "structural_tag")}
            yield "structured_outputs", {k: v for k, v in (fields | texts).items() if v is not None}
        if self.guided_json is not None:
            yield "guided_json", {"json": _text(self.guided_json)}
        for name in ("regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                yield f"guided_{name}", {name: value}


def _of_response_format(wanted: ResponseFormat) -> dict[str, object]:
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        fields = {"type": wanted.type, "structures": wanted.structures, "triggers": wanted.triggers}
        return {"structural_tag": _text(fields)}
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema is needed for this type", param="response_format")
    return {"json": _text(wanted.json_schema.schema)}


def _text(value: object) -> str | None:
    """JSON as text; text stays as it is."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
