"""A JSON schema as a document: its draft, its references, and a bound on the work that it causes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from baton.json_schema.patterns import Patterns

Schema: TypeAlias = bool | dict[str, Any]

MAX_STEPS: Final = 10_000  # visits of subschemas; they take some 70 ms
LATEST_DRAFT: Final = 2020
DRAFTS: Final[Mapping[str, int]] = {
    "draft-03": 4,  # keywords of draft 3 alone are refused later
    "draft-04": 4,
    "draft-06": 6,
    "draft-07": 7,
    "2019-09": 2019,
}
# Keywords that constrain a value, with the first draft that has each.
FIRST_DRAFT: Final[Mapping[str, int]] = {
    **dict.fromkeys(("$ref", "type", "enum", "allOf", "anyOf", "oneOf", "not"), 4),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), 4),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), 4),
    **dict.fromkeys(("items", "additionalItems", "minItems", "maxItems", "uniqueItems"), 4),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "dependencies"), 4),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), 4),
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
ALL_TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
LAST_DRAFT_OF_SOLE_REFERENCES: Final = 7  # up to this draft, keywords beside $ref mean nothing
LAST_DRAFT_OF_DEPENDENCIES: Final = 7
LAST_DRAFT_OF_LISTS: Final = 2019  # as the value of `items`


class TooLarge(Exception):
    """The schema takes more than `MAX_STEPS`."""


class Document:
    """A schema that is read and never changed, with its draft and a count of the steps taken."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.patterns = Patterns()
        uri = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.draft = next((draft for name, draft in DRAFTS.items() if name in uri), LATEST_DRAFT)
        self._num_steps = 0
        self._has_bases = any(  # of references, other than the root
            isinstance(each.get(key), str)
            for each in nodes(root)
            for key in ("$id", "id" if self.draft == DRAFTS["draft-04"] else "$id")
            if each is not root
        )

    def step(self) -> None:
        """Count one visit of a subschema. Raises TooLarge."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise TooLarge

    def constraints(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of a subschema that constrain a value in this draft."""
        if "$ref" in schema and self.draft <= LAST_DRAFT_OF_SOLE_REFERENCES:
            return {"$ref": schema["$ref"]}
        return {key: value for key, value in schema.items() if FIRST_DRAFT.get(key, 9999) <= self.draft}

    def item_schemas(self, found: Mapping[str, Any]) -> tuple[list[Schema], Schema] | None:
        """Return the schemas of the first items, and of all later ones; None for `items` of another draft."""
        first, rest = found.get("prefixItems", []), found.get("items", True)
        if not isinstance(rest, list):
            return first, rest
        return None if self.draft > LAST_DRAFT_OF_LISTS else (rest, found.get("additionalItems", True))

    def target(self, reference: Any) -> Schema | None:
        """Return the subschema that `$ref` names; None where it is in another document or absent."""
        parts = pointer(reference)
        if parts is None or self._has_bases:
            return None
        found: Any = self.root
        for part in parts:
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        return found if isinstance(found, bool | dict) else None


def pointer(reference: Any) -> list[str] | None:
    """Return the steps from the root that a reference within its document takes; None for any other."""
    if reference == "#":
        return []
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return None
    return [part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/")]


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value: every subschema, and other objects such as `properties`."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


def type_names(value: Any) -> frozenset[str]:
    """Return the types of a `type` keyword, without "integer" beside "number"."""
    names = frozenset([value] if isinstance(value, str) else value)
    return names - {"integer"} if "number" in names else names


def common_types(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the types of the values that have a type of both."""
    both = one & other
    if "integer" in one | other and {"number", "integer"} & one and {"number", "integer"} & other:
        return both | {"integer"}
    return both


def type_of(value: Any) -> str:
    """Return the type of a JSON value; "integer" for any number without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def has_type(value: Any, names: frozenset[str]) -> bool:
    """Return whether a JSON value has one of the types."""
    of_type = type_of(value)
    return of_type in names or (of_type == "integer" and "number" in names)


def canonical(value: Any) -> str:
    """Return the same text for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def read_json(text: str) -> Any:
    """Return the JSON value of a text. Raises ValueError for other text, and for numbers beyond a float."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if abs(number) != float("inf") else _refuse(text)
