"""Rewrites a JSON schema into keywords that the grammar library honours.

Grammars know no `not`, `if`, `dependencies`, `contains`, `propertyNames`, `uniqueItems`, and few cases of
`oneOf`. Each is replaced where another schema says the same:

| keyword | becomes |
|---|---|
| any of these beside `enum` or `const` | an enum of the values that fit |
| `not` | its negation (negation.py) |
| `if`, `then`, `else` | anyOf: `if` and `then`; not `if` and `else` |
| `dependencies`, `dependentRequired`, `dependentSchemas` | anyOf: the key is absent; the need is met |
| `oneOf` | anyOf; branches that overlap exclude each other |
| `propertyNames` | `properties` or `patternProperties`, and no others |
| `contains` | anyOf by the index of the item, which is among the first `MAX_INDEXES` |
| `uniqueItems` | an enum of arrays of a few values: in any order up to `MAX_ARRAYS`, else in one order |
| `minProperties` 1 | anyOf: one of the properties is required; there is one of another name |
| `format` | a pattern |
| `pattern` | the same without a fault of the library (`mended`) |

The new schema accepts no value that the old one refuses, and, apart from the two bounds above, all that it
accepts. A keyword that cannot be replaced stays, so that the library refuses the schema and names it.
"""

import re
from collections.abc import Callable, Mapping
from itertools import combinations, permutations
from math import perm
from typing import Any, Final, TypeAlias

from baton.json_schema.document import (
    ALL_TYPES,
    Document,
    Schema,
    TooLarge,
    canonical,
    common_types,
    nodes,
    pointer,
    type_names,
)
from baton.json_schema.negation import (
    Negation,
    Types,
    all_of,
    any_of,
    at,
    dependent_schemas,
    of_types,
)
from baton.json_schema.patterns import FORMATS, mended, whole
from baton.json_schema.values import are_disjoint, conjuncts, finite_values, fits

MAX_DEPENDENCIES: Final = 8  # of one object; each doubles the cases
MAX_INDEXES: Final = 8  # at which an item that `contains` asks for may be
MAX_ARRAYS: Final = 400  # that are listed
MAX_SUBSETS_OF: Final = 8  # values
REWRITTEN: Final = frozenset(
    (
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("oneOf", "propertyNames", "contains", "minContains", "uniqueItems", "minProperties", "format"),
    )
)
# Schemas without any of these words stay as they are, and are not even read.
ANY_REWRITTEN: Final = re.compile(rf'"(?:{"|".join(sorted(REWRITTEN))})"|\[\^|\\x00|\\u0000|\\[xu]\{{0')
SCHEMAS_BY_NAME: Final = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
LISTS_OF_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
OF_THE_SAME_VALUE: Final = frozenset({"allOf", "anyOf", "oneOf"})
SINGLE_SCHEMAS: Final = frozenset({"additionalProperties", "items", "additionalItems"})
ALONE: Final = ({"anyOf"}, {"pattern"}, {"enum"})  # keywords that depend on no other beside them
DEFINITIONS: Final = ("$schema", "$id", "id", "$defs", "definitions")


def rewritten(schema: Any) -> Any:
    """Return the schema in keywords that grammars honour, as far as possible; the argument is not changed.

    A schema that is too large or malformed is returned as it is: the library's error says more.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return _Rewriter(Document(schema)).document()
    except (TooLarge, RecursionError, TypeError, AttributeError, KeyError, ValueError, ArithmeticError):
        return schema


class _Rewriter:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._negation = Negation(document, self.positive)
        self._visited = set[int]()  # ids of subschemas
        references = {each["$ref"] for each in nodes(document.root) if _is_text(each, "$ref")}
        self._references = sorted(references)
        # A part of allOf has the types of the whole, unless it is also meant somewhere else.
        self._has_context = not any(OF_THE_SAME_VALUE & {*(pointer(each) or ())} for each in references)

    def document(self) -> Schema:
        """The whole document, with the subschemas that only references reach."""
        new = self.positive(self._document.root)
        for reference in self._references:
            target, path = self._document.target(reference), pointer(reference)
            if isinstance(target, dict) and id(target) not in self._visited and path:
                new = _replaced(new, path, self.positive(target))
        return self._document.root if new is False else new

    def positive(self, schema: Schema, types: Types = ALL_TYPES) -> Schema:
        """Return a schema of the values that fit, given that they have one of the types."""
        self._document.step()
        if not isinstance(schema, dict):
            return schema
        self._visited.add(id(schema))
        found = self._document.constraints(schema)
        listed = self._listed(schema)
        if listed is not None:
            return listed
        inside = common_types(types, type_names(found["type"])) if "type" in found else types
        new = {key: self._part(key, value, inside) for key, value in schema.items()}
        added = list[Schema]()
        for keyword, (dropped, rewrite) in _REWRITES.items():
            if keyword in found and keyword in new and (extra := rewrite(self, found, inside)) is not None:
                new = {key: value for key, value in new.items() if key not in dropped}
                added.append(extra)
        extra = all_of(added)
        if isinstance(extra, bool):
            return new if extra else False
        if extra.keys() in ALONE and not extra.keys() & new.keys():
            return {**new, **extra}
        return {**new, "allOf": [*new.get("allOf", []), extra]}

    def _part(self, keyword: str, value: Any, types: Types) -> Any:
        """The value of a keyword, with its subschemas rewritten."""
        if keyword == "pattern" and isinstance(value, str):
            return mended(value)
        if keyword == "patternProperties":
            return {mended(name): self.positive(each) for name, each in value.items()}
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            return {name: self.positive(each) for name, each in value.items()}
        if keyword in LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            of = types if keyword in OF_THE_SAME_VALUE and self._has_context else ALL_TYPES
            return [self.positive(each, of) for each in value]
        return self.positive(value) if keyword in SINGLE_SCHEMAS else value

    def _listed(self, schema: dict[str, Any]) -> Schema | None:
        """Return an enum of the values that fit; None if they cannot be listed or nothing needs rewriting."""
        parts = conjuncts(schema, self._document)
        if not any(REWRITTEN & part.keys() for part in parts):
            return None
        if (verdicts := self._verdicts(schema, schema)) is None:
            return None
        kept = [value for value, is_kept in verdicts if is_kept]
        definitions: dict[str, Any] = {
            key: self._part(key, schema[key], ALL_TYPES) for key in DEFINITIONS if key in schema
        }
        return {**definitions, "enum": kept} if kept else False

    def _not(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        return self._negation.of(found["not"], types)

    def _if(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        branches = [self.positive(found.get(name, True), types) for name in ("then", "else")]
        unmet = self._negation.of(found["if"], types)
        if unmet is None:
            return None
        return any_of(
            [all_of([self.positive(found["if"], types), branches[0]]), all_of([unmet, branches[1]])]
        )

    def _without_if(self, found: Mapping[str, Any], _: Types) -> Schema | None:
        return None if "if" in found else True

    def _dependent(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        needs = dependent_schemas(found)
        if len(needs) > MAX_DEPENDENCIES:
            return None
        others = of_types(types - {"object"})
        return all_of(
            any_of(
                [
                    others,
                    {"type": "object", "properties": {name: False}},
                    all_of([{"type": "object", "required": [name]}, self.positive(need, types)]),
                ]
            )
            for name, need in needs
        )

    def _one_of(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        branches = found["oneOf"]
        parts = [[self.positive(each, types)] for each in branches]
        for one, other in combinations(range(len(branches)), 2):
            if are_disjoint(branches[one], branches[other], self._document, types):
                continue
            for here, there in ((one, other), (other, one)):
                outside = self._negation.of(branches[there], types)
                if outside is None:
                    return None
                parts[here].append(outside)
        return any_of(map(all_of, parts))

    def _contains(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        if found.get("minContains", 1) == 0 and "maxContains" not in found:
            return True
        if {"minContains", "maxContains"} & found.keys():
            return None
        item, num = self.positive(found["contains"]), MAX_INDEXES
        if isinstance(most := found.get("maxItems"), int):
            num = min(num, most)
        others = of_types(types - {"array"})
        return any_of([others, *(at(index, item) for index in range(num) if item is not False)])

    def _property_names(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        names = found["propertyNames"]
        keywords = {} if isinstance(names, bool) else self._document.constraints(names)
        instead: dict[str, Any]
        if (verdicts := self._verdicts(names, names)) is not None:
            allowed: dict[str, Any] = {
                name: {} for name, is_allowed in verdicts if isinstance(name, str) and is_allowed
            }
            instead = {"properties": allowed, "additionalProperties": False}
        elif keywords.keys() == {"not"}:
            if (verdicts := self._verdicts(keywords["not"], names)) is None:
                return None
            banned = {
                name: False for name, is_allowed in verdicts if isinstance(name, str) and not is_allowed
            }
            instead = {"properties": banned}
        elif (pattern := _pattern_of(keywords)) is not None:
            instead = {"patternProperties": {pattern: {}}, "additionalProperties": False}
        else:
            return None
        return any_of([of_types(types - {"object"}), {"type": "object", **instead}])

    def _verdicts(self, finite: Schema, schema: Schema) -> list[tuple[Any, bool]] | None:
        """Each different value of a finite schema, with whether it fits the other; None if not known."""
        values = finite_values(finite, self._document)
        if values is None:
            return None
        different = {canonical(value): value for value in values}.values()
        verdicts = [(value, fits(value, schema, self._document)) for value in different]
        known = [(value, verdict) for value, verdict in verdicts if verdict is not None]
        return known if len(known) == len(verdicts) else None

    def _unique(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        most, least = found.get("maxItems"), int(found.get("minItems", 0))
        items = found.get("items", True)
        if not found["uniqueItems"] or (most is not None and most <= 1):
            return True
        if isinstance(items, list) or "prefixItems" in found:
            return None
        if (verdicts := self._verdicts(items, items)) is None:
            return None
        kept = [value for value, is_item in verdicts if is_item]
        arrays = _arrays(kept, least, len(kept) if most is None else min(int(most), len(kept)))
        if arrays is None:
            return None
        return any_of([of_types(types - {"array"}), {"enum": arrays} if arrays else False])

    def _min_properties(self, found: Mapping[str, Any], types: Types) -> Schema | None:
        least, required = found["minProperties"], set(found.get("required", ()))
        if least <= len(required):
            return True
        optional = [name for name in found.get("properties", {}) if name not in required]
        if not optional or least != 1:
            return None
        none_of_them = {"properties": dict.fromkeys(optional, False), "minProperties": 1}
        one_of_them: list[Schema] = [{"type": "object", "required": [name]} for name in optional]
        return any_of([of_types(types - {"object"}), *one_of_them, {"type": "object", **none_of_them}])

    def _format(self, found: Mapping[str, Any], _: Types) -> Schema | None:
        pattern = FORMATS.get(found["format"])
        if pattern is None:
            return None
        return {"pattern": whole(pattern)}


def _is_text(found: dict[str, Any], key: str) -> bool:
    return isinstance(found.get(key), str)


def _replaced(value: Any, path: list[str], new: Schema) -> Any:
    """The JSON value with another subschema at the path; the value as it is where it has no such path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        return [_replaced(each, rest, new) if n == int(key) else each for n, each in enumerate(value)]
    if isinstance(value, dict) and key in value:
        return {**value, key: _replaced(value[key], rest, new)}
    return value


def _pattern_of(keywords: Mapping[str, Any]) -> str | None:
    """The pattern of the names that fit keywords of strings; None for more than one constraint."""
    rest = {key: value for key, value in keywords.items() if key != "type"}
    if "type" in keywords and "string" not in type_names(keywords["type"]):
        return None
    if rest.keys() == {"pattern"}:
        return mended(rest["pattern"])
    if rest.keys() <= {"minLength", "maxLength"}:
        least, most = rest.get("minLength", 0), rest.get("maxLength", "")
        return whole(rf"[\s\S]{{{least},{most}}}")
    return None


def _arrays(values: list[Any], least: int, most: int) -> list[list[Any]] | None:
    """Arrays of different values: in any order, or in theirs if those are too many; None if all are."""
    sizes = range(least, most + 1)
    if sum(perm(len(values), size) for size in sizes) <= MAX_ARRAYS:
        return [list(each) for size in sizes for each in permutations(values, size)]
    if len(values) <= MAX_SUBSETS_OF:
        return [list(each) for size in sizes for each in combinations(values, size)]
    return None


_Rewrite: TypeAlias = Callable[[_Rewriter, Mapping[str, Any], Types], Schema | None]
_DEPENDENT: Final = ("dependencies", "dependentRequired", "dependentSchemas")
# keyword -> the keywords that go with it, and what comes instead
_REWRITES: Final[Mapping[str, tuple[tuple[str, ...], _Rewrite]]] = {
    "not": (("not",), _Rewriter._not),
    "if": (("if", "then", "else"), _Rewriter._if),
    "then": (("then",), _Rewriter._without_if),
    "else": (("else",), _Rewriter._without_if),
    **dict.fromkeys(_DEPENDENT, (_DEPENDENT, _Rewriter._dependent)),
    "oneOf": (("oneOf",), _Rewriter._one_of),
    "contains": (("contains", "minContains", "maxContains"), _Rewriter._contains),
    "propertyNames": (("propertyNames",), _Rewriter._property_names),
    "uniqueItems": (("uniqueItems",), _Rewriter._unique),
    "minProperties": (("minProperties",), _Rewriter._min_properties),
    "format": (("format",), _Rewriter._format),
}
