"""Schemas of the values that do not fit a schema, in keywords that grammars honour.

`Negation.of` returns None where there is no such schema: each negation is exact.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final, TypeAlias

from baton.json_schema.document import (
    ALL_TYPES,
    LAST_DRAFT_OF_DEPENDENCIES,
    Document,
    Schema,
    common_types,
    has_type,
    type_names,
)
from baton.json_schema.patterns import excluding
from baton.json_schema.values import are_disjoint, finite_values

Types: TypeAlias = frozenset[str]
Alternatives: TypeAlias = list[Schema]
MAX_BRANCHES: Final = 6  # of a oneOf that is negated
# Keywords that constrain values of one type alone.
OF_TYPE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("contains", "uniqueItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    "multipleOf": "number",
}
SIZES: Final = {"Length": "string", "Items": "array", "Properties": "object"}
PARTS: Final = frozenset({"then", "else", "additionalItems"})  # the negation of another keyword has them


def any_of(schemas: Iterable[Schema]) -> Schema:
    """Return a schema of the values that fit one of the schemas at least."""
    parts: list[Schema] = []
    for each in schemas:
        if each is True or each == {}:
            return True
        if each is not False and each not in parts:
            parts.append(each)
    return parts[0] if len(parts) == 1 else {"anyOf": parts} if parts else False


def all_of(schemas: Iterable[Schema]) -> Schema:
    """Return a schema of the values that fit all of the schemas."""
    parts: list[Schema] = []
    for each in schemas:
        if each is False:
            return False
        if each is not True and each != {} and each not in parts:
            parts.append(each)
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


def of_types(types: Types) -> Schema:
    """Return a schema of the values of these types."""
    if types == ALL_TYPES:
        return True
    names = sorted(types)
    return {"type": names[0] if len(names) == 1 else names} if names else False


class Negation:
    """Negates parts of one document."""

    def __init__(self, document: Document, positive: Callable[[Schema, Types], Schema]) -> None:
        """positive: returns a schema in keywords that grammars honour, given it and the types of values."""
        self._document = document
        self._positive = positive
        self._open: list[str] = []  # references that are being followed

    def of(self, schema: Schema, types: Types = ALL_TYPES) -> Schema | None:
        """Return a schema of the values of these types that do not fit `schema`. Raises TooLarge."""
        self._document.step()
        if isinstance(schema, bool):
            return False if schema else of_types(types)
        found = self._document.constraints(schema)
        inside, alternatives = types, list[Schema]()
        if "type" in found:
            outside = _without(types, type_names(found.pop("type")))
            if outside is None:
                return None
            inside = common_types(types, type_names(schema["type"]))
            alternatives.append(of_types(outside))
        for keyword in found:
            more = self._of_keyword(keyword, found, inside)
            if more is None:
                return None
            alternatives += more
        return any_of(alternatives)

    def _of_keyword(self, keyword: str, found: dict[str, Any], types: Types) -> Alternatives | None:
        of_type = OF_TYPE.get(keyword)
        if keyword in PARTS or (of_type is not None and not common_types(types, frozenset({of_type}))):
            return []
        negate = _NEGATIONS.get(keyword)
        return None if negate is None else negate(self, found, types)

    def _each(self, schemas: Iterable[Schema], types: Types = ALL_TYPES) -> Alternatives | None:
        """Return the negations of all schemas; None if one has none."""
        negated = [self.of(each, types) for each in schemas]
        return None if None in negated else [each for each in negated if each is not None]

    def _enum(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        if "enum" in found and "const" in found:
            return None
        return _outside([found["const"]] if "const" in found else found["enum"], types)

    def _required(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        return [{"type": "object", "properties": {name: False}} for name in found["required"]]

    def _properties(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        negated = self._each(found["properties"].values())
        if negated is None:
            return None
        return [
            {"type": "object", "required": [name], "properties": {name: value}}
            for name, value in zip(found["properties"], negated, strict=True)
            if value is not False
        ]

    def _pattern_properties(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        return self._nothing(found["patternProperties"].values())

    def _additional_properties(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        return self._nothing([found["additionalProperties"]])

    def _nothing(self, schemas: Iterable[Schema]) -> Alternatives | None:
        """Return no alternative if all values fit the schemas, else None."""
        return [] if all(self.of(each) is False for each in schemas) else None

    def _items(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        schemas = self._document.item_schemas(found)
        if schemas is None:
            return None
        first, rest = schemas
        negated = self._each(first)
        if negated is None or self.of(rest) is not False:
            return None
        return [at(index, item) for index, item in enumerate(negated) if item is not False]

    def _contains(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        item = None if {"minContains", "maxContains"} & found.keys() else self.of(found["contains"])
        if item is None:
            return None
        return [{"type": "array", **({"items": item} if item is not False else {"maxItems": 0})}]

    def _unique(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        return None if found["uniqueItems"] else []

    def _names(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        """Return an alternative for each name that does not fit; None if the names cannot be listed."""
        names = found["propertyNames"]
        if not isinstance(names, dict) or self._document.constraints(names).keys() != {"not"}:
            return self._nothing([names])
        values = finite_values(names["not"], self._document)
        if values is None:
            return None
        return [{"type": "object", "required": [name]} for name in values if isinstance(name, str)]

    def _dependent(self, found: dict[str, Any], _: Types) -> Alternatives | None:
        if "dependencies" in found and self._document.draft > LAST_DRAFT_OF_DEPENDENCIES:
            return None
        needs = dependent_schemas(found)
        negated = self._each([schema for _, schema in needs])
        if negated is None:
            return None
        return [
            all_of([{"type": "object", "required": [name]}, schema])
            for (name, _), schema in zip(needs, negated, strict=True)
            if schema is not False
        ]

    def _not(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        return [all_of([of_types(types), self._positive(found["not"], types)])]

    def _all(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        return self._each(found["allOf"], types)

    def _any(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        negated = self._each(found["anyOf"], types)
        return None if negated is None else [all_of(negated)]

    def _one(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        branches = found["oneOf"]
        negated = self._each(branches, types)
        if negated is None or len(branches) > MAX_BRANCHES:
            return None
        pairs = [
            all_of([of_types(types), self._positive(one, types), self._positive(other, types)])
            for one, other in combinations(branches, 2)
            if not are_disjoint(one, other, self._document, types)
        ]
        return [all_of(negated), *pairs]

    def _if(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        unmet = self.of(found["if"], types)
        negated = self._each([found.get("then", True), found.get("else", True)], types)
        if unmet is None or negated is None:
            return None
        return [all_of([self._positive(found["if"], types), negated[0]]), all_of([unmet, negated[1]])]

    def _reference(self, found: dict[str, Any], types: Types) -> Alternatives | None:
        reference = found["$ref"]
        target = self._document.target(reference)
        if target is None or reference in self._open:
            return None
        self._open.append(reference)
        try:
            return self._each([target], types)
        finally:
            self._open.pop()


def dependent_schemas(found: Mapping[str, Any]) -> list[tuple[str, Schema]]:
    """Return (name, schema of objects that have a property of that name)."""
    return [
        (name, {"required": need} if isinstance(need, list) else need)
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas")
        for name, need in found.get(keyword, {}).items()
    ]


def at(index: int, item: Schema) -> dict[str, Any]:
    """Return a schema of arrays with such an item at the index."""
    return {"type": "array", "minItems": index + 1, "items": [*[{}] * index, item]}


def _without(types: Types, names: Types) -> Types | None:
    """The types of the values that have none of the names; None for numbers that are no integers."""
    if "integer" in names and "number" in types:
        return None
    return types - names - ({"integer"} if "number" in names else set())


def _outside(values: Sequence[Any], types: Types) -> Alternatives | None:
    """The values of the types, but not these."""
    alternatives: Alternatives = []
    for of_type in sorted(types):
        same = [value for value in values if has_type(value, frozenset({of_type}))]
        more = _OUTSIDE[of_type](same) if same else [of_types(frozenset({of_type}))]
        if more is None:
            return None
        alternatives += more
    return alternatives


def _other_numbers(of_type: str) -> Callable[[list[Any]], Alternatives | None]:
    def outside(values: list[Any]) -> Alternatives | None:
        limits = sorted(set(values))
        between: Alternatives = [
            {"type": of_type, "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(limits)
            if of_type == "number" or high - low > 1
        ]
        below: Schema = {"type": of_type, "exclusiveMaximum": limits[0]}
        return [below, *between, {"type": of_type, "exclusiveMinimum": limits[-1]}]

    return outside


def _other_texts(values: list[Any]) -> Alternatives | None:
    pattern = excluding(frozenset(values))
    return None if pattern is None else [{"type": "string", "pattern": pattern}]


def _not_empty(of_type: str, keyword: str) -> Callable[[list[Any]], Alternatives | None]:
    """Return a function that excludes the empty value; other values cannot be excluded."""
    return lambda values: None if any(values) else [{"type": of_type, keyword: 1}]


_OUTSIDE: Final[Mapping[str, Callable[[list[Any]], Alternatives | None]]] = {
    "null": lambda _: [],
    "boolean": lambda values: [{"enum": [each]} for each in (False, True) if each not in values],
    "number": _other_numbers("number"),
    "integer": _other_numbers("integer"),
    "string": _other_texts,
    "array": _not_empty("array", "minItems"),
    "object": _not_empty("object", "minProperties"),
}


def _number_type(types: Types) -> str:
    return "number" if "number" in types else "integer"


_Negate: TypeAlias = Callable[[Negation, dict[str, Any], Types], Alternatives | None]


def _bound(keyword: str, exclusive: str, opposite: str, opposite_exclusive: str) -> _Negate:
    """Return a negation: the numbers beyond a limit. In draft 4 `exclusive` may be true."""

    def negate(_: Negation, found: dict[str, Any], types: Types) -> Alternatives | None:
        is_exclusive = found.get(exclusive) is True
        beyond = opposite if is_exclusive else opposite_exclusive
        return [{"type": _number_type(types), beyond: found[keyword]}]

    return negate


def _exclusive_bound(keyword: str, opposite: str) -> _Negate:
    def negate(_: Negation, found: dict[str, Any], types: Types) -> Alternatives | None:
        limit = found[keyword]
        return [] if isinstance(limit, bool) else [{"type": _number_type(types), opposite: limit}]

    return negate


def _smaller(of: str) -> _Negate:
    def negate(_: Negation, found: dict[str, Any], types: Types) -> Alternatives | None:
        least = int(found[f"min{of}"])
        return [{"type": SIZES[of], f"max{of}": least - 1}] if least > 0 else []

    return negate


def _larger(of: str) -> _Negate:
    return lambda _, found, types: [{"type": SIZES[of], f"min{of}": int(found[f"max{of}"]) + 1}]


_NEGATIONS: Final[Mapping[str, _Negate]] = {
    "minimum": _bound("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    "maximum": _bound("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "exclusiveMinimum": _exclusive_bound("exclusiveMinimum", "maximum"),
    "exclusiveMaximum": _exclusive_bound("exclusiveMaximum", "minimum"),
    **{f"min{of}": _smaller(of) for of in SIZES},
    **{f"max{of}": _larger(of) for of in SIZES},
    **dict.fromkeys(("enum", "const"), Negation._enum),
    **dict.fromkeys(("items", "prefixItems"), Negation._items),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), Negation._dependent),
    "required": Negation._required,
    "properties": Negation._properties,
    "patternProperties": Negation._pattern_properties,
    "additionalProperties": Negation._additional_properties,
    "contains": Negation._contains,
    "uniqueItems": Negation._unique,
    "propertyNames": Negation._names,
    "not": Negation._not,
    "allOf": Negation._all,
    "anyOf": Negation._any,
    "oneOf": Negation._one,
    "if": Negation._if,
    "$ref": Negation._reference,
}
