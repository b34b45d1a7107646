"""Decides whether given values fit a schema, and proves that no value fits two schemas.

`fits` filters finite sets of values. Its answer is None where validators differ, such as on `format`. This is
no library because libraries match patterns with a backtracking engine, which a hostile schema keeps busy for
years. Where `are_disjoint` finds a proof, `oneOf` of both schemas is `anyOf`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, TypeAlias

from baton.json_schema.document import (
    ALL_TYPES,
    LAST_DRAFT_OF_DEPENDENCIES,
    Document,
    Schema,
    canonical,
    common_types,
    has_type,
    type_names,
    type_of,
)

Verdict: TypeAlias = bool | None
DRAFT_OF_WHOLE_NUMBERS: Final = 6  # before, 1.0 is no integer


def fits(value: Any, schema: Schema, document: Document) -> Verdict:
    """Return whether the value fits the schema, a part of the document. Raises TooLarge."""
    document.step()
    if isinstance(schema, bool):
        return schema
    found = document.constraints(schema)
    return every(
        _CHECKS[keyword](value, found, document) if keyword in _CHECKS else None
        for keyword in found
        if keyword not in _PARTS
    )


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """Return False if one is False, else None if one is None, else True."""
    known: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            known = None
    return known


def inverse(verdict: Verdict) -> Verdict:
    """Return the verdict on the negation."""
    return None if verdict is None else not verdict


def some(verdicts: Iterable[Verdict]) -> Verdict:
    """Return True if one is True, else None if one is None, else False."""
    return inverse(every(map(inverse, verdicts)))


_Found: TypeAlias = Mapping[str, Any]


def _type(value: Any, found: _Found, document: Document) -> Verdict:
    is_unclear = isinstance(value, float) and document.draft < DRAFT_OF_WHOLE_NUMBERS
    if is_unclear and type_of(value) in type_names(found["type"]):
        return None
    return has_type(value, type_names(found["type"]))


def _enum(value: Any, found: _Found, _: Document) -> Verdict:
    return canonical(value) in map(canonical, found["enum"])


def _const(value: Any, found: _Found, _: Document) -> Verdict:
    return canonical(value) == canonical(found["const"])


def _limit(keyword: str, of_type: Callable[[Any], bool], holds: Callable[[Any, Any], bool]) -> "_Check":
    """A check that a value of the type, or its size, is within the limit."""

    def check(value: Any, found: _Found, _: Document) -> Verdict:
        return not of_type(value) or holds(value, found[keyword])

    return check


def _is_number(value: Any) -> bool:
    return type_of(value) in ("integer", "number")


def _exclusive(keyword: str, inclusive: str, holds: Callable[[Any, Any], bool]) -> "_Check":
    """A check of an exclusive limit. In draft 4 the keyword may be true, and `inclusive` has the limit."""

    def check(value: Any, found: _Found, _: Document) -> Verdict:
        limit = found[keyword]
        if isinstance(limit, bool):
            limit = found.get(inclusive) if limit else None
        return limit is None or not _is_number(value) or holds(value, limit)

    return check


def _is_multiple(value: Any, divisor: Any) -> bool:
    return (Fraction(str(value)) / Fraction(str(divisor))).denominator == 1


def _pattern(value: Any, found: _Found, document: Document) -> Verdict:
    return document.patterns.matches(found["pattern"], value) if isinstance(value, str) else True


def _format(value: Any, found: _Found, _: Document) -> Verdict:
    return None if isinstance(value, str) else True


def _items(value: Any, found: _Found, document: Document) -> Verdict:
    if not isinstance(value, list):
        return True
    schemas = document.item_schemas(found)
    if schemas is None:
        return None
    first, rest = schemas
    checks = [fits(each, schema, document) for each, schema in zip(value, first, strict=False)]
    return every([*checks, *(fits(each, rest, document) for each in value[len(first) :])])


def _contains(value: Any, found: _Found, document: Document) -> Verdict:
    if not isinstance(value, list):
        return True
    verdicts = [fits(each, found["contains"], document) for each in value]
    if None in verdicts:
        return None
    low, high = found.get("minContains", 1), found.get("maxContains", len(value))
    return bool(low <= verdicts.count(True) <= high)


def _unique(value: Any, found: _Found, _: Document) -> Verdict:
    if not isinstance(value, list) or not found["uniqueItems"]:
        return True
    return len(set(map(canonical, value))) == len(value)


def _properties(value: Any, found: _Found, document: Document) -> Verdict:
    if not isinstance(value, dict):
        return True
    return every(_property(name, each, found, document) for name, each in value.items())


def _property(name: str, value: Any, found: _Found, document: Document) -> Verdict:
    named = found.get("properties", {})
    checks = [fits(value, named[name], document)] if name in named else []
    is_known: Verdict = name in named
    for pattern, schema in found.get("patternProperties", {}).items():
        is_of = document.patterns.matches(pattern, name)
        is_known = some((is_known, is_of))
        checks.append(some((inverse(is_of), fits(value, schema, document))))
    return every([*checks, some((is_known, fits(value, found.get("additionalProperties", True), document)))])


def _required(value: Any, found: _Found, _: Document) -> Verdict:
    return not isinstance(value, dict) or set(found["required"]) <= value.keys()


def _names(value: Any, found: _Found, document: Document) -> Verdict:
    if not isinstance(value, dict):
        return True
    return every(fits(name, found["propertyNames"], document) for name in value)


def _dependent(keyword: str) -> "_Check":
    def check(value: Any, found: _Found, document: Document) -> Verdict:
        if not isinstance(value, dict):
            return True
        if keyword == "dependencies" and document.draft > LAST_DRAFT_OF_DEPENDENCIES:
            return None
        wanted = [needed for name, needed in found[keyword].items() if name in value]
        return every(
            set(each) <= value.keys() if isinstance(each, list) else fits(value, each, document)
            for each in wanted
        )

    return check


def _all_of(value: Any, found: _Found, document: Document) -> Verdict:
    return every(fits(value, each, document) for each in found["allOf"])


def _any_of(value: Any, found: _Found, document: Document) -> Verdict:
    return some(fits(value, each, document) for each in found["anyOf"])


def _one_of(value: Any, found: _Found, document: Document) -> Verdict:
    verdicts = [fits(value, each, document) for each in found["oneOf"]]
    if verdicts.count(True) > 1:
        return False
    return None if None in verdicts else True in verdicts


def _not(value: Any, found: _Found, document: Document) -> Verdict:
    return inverse(fits(value, found["not"], document))


def _if(value: Any, found: _Found, document: Document) -> Verdict:
    condition = fits(value, found["if"], document)
    branches = [fits(value, found.get(name, True), document) for name in ("then", "else")]
    if condition is None:
        return branches[0] if branches[0] == branches[1] else None
    return branches[0] if condition else branches[1]


def _reference(value: Any, found: _Found, document: Document) -> Verdict:
    target = document.target(found["$ref"])
    return None if target is None else fits(value, target, document)


_Check: TypeAlias = Callable[[Any, _Found, Document], Verdict]
_SIZED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "Length": lambda value: isinstance(value, str),
    "Items": lambda value: isinstance(value, list),
    "Properties": lambda value: isinstance(value, dict),
}
_PARTS: Final = frozenset({"then", "else", "minContains", "maxContains"})  # the check of another reads them
_CHECKS: Final[Mapping[str, _Check]] = {
    **{f"min{of}": _limit(f"min{of}", is_one, lambda v, n: len(v) >= n) for of, is_one in _SIZED.items()},
    **{f"max{of}": _limit(f"max{of}", is_one, lambda v, n: len(v) <= n) for of, is_one in _SIZED.items()},
    "minimum": _limit("minimum", _is_number, lambda v, n: v >= n),
    "maximum": _limit("maximum", _is_number, lambda v, n: v <= n),
    "exclusiveMinimum": _exclusive("exclusiveMinimum", "minimum", lambda v, n: v > n),
    "exclusiveMaximum": _exclusive("exclusiveMaximum", "maximum", lambda v, n: v < n),
    "multipleOf": _limit("multipleOf", _is_number, _is_multiple),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), _items),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), _properties),
    **{key: _dependent(key) for key in ("dependencies", "dependentRequired", "dependentSchemas")},
    "type": _type,
    "enum": _enum,
    "const": _const,
    "pattern": _pattern,
    "format": _format,
    "contains": _contains,
    "uniqueItems": _unique,
    "required": _required,
    "propertyNames": _names,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _reference,
}


TEXT_LIMITS: Final = ("pattern", "minLength", "maxLength")
MAX_VALUES: Final = 256  # of a schema that is called finite
MAX_DEPTH: Final = 8
MAX_REFERENCES: Final = 16  # that lead from one to the next


def are_disjoint(
    one: Schema, other: Schema, document: Document, types: frozenset[str] = ALL_TYPES, depth: int = 0
) -> bool:
    """Return True if provably no value of these types fits both schemas. Raises TooLarge.

    depth: of these schemas within those that the caller asks about.
    """
    document.step()
    if one is False or other is False:
        return True
    if depth > MAX_DEPTH:
        return False
    both = [list(conjuncts(each, document)) for each in (one, other)]
    common = types
    for found in (*both[0], *both[1]):
        if "type" in found:
            common = common_types(common, type_names(found["type"]))
    if not common or _cannot_share(one, other, document) or _cannot_share(other, one, document):
        return True
    for side, opposite in ((both[0], other), (both[1], one)):
        if any(_branches_are_disjoint(found, opposite, document, common, depth) for found in side):
            return True
    if common == {"string"} and _have_different_texts([*both[0], *both[1]], document):
        return True
    return common == {"object"} and _differ_in_a_property(both[0], both[1], document, depth)


def conjuncts(schema: Schema, document: Document, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield keywords that a value which fits the schema satisfies: its own, and those of allOf and $ref."""
    document.step()
    if isinstance(schema, bool):
        return
    found = document.constraints(schema)
    yield found
    for part in found.get("allOf", []):
        yield from conjuncts(part, document, depth)
    if "$ref" in found and depth < MAX_REFERENCES:
        target = document.target(found["$ref"])
        yield from conjuncts(True if target is None else target, document, depth + 1)


def finite_values(schema: Schema, document: Document) -> list[Any] | None:
    """Return values among which are all that fit the schema; None where these may be many."""
    if schema is False:
        return []
    for found in conjuncts(schema, document):
        if "const" in found:
            return [found["const"]]
        if "enum" in found:
            return list(found["enum"]) if len(found["enum"]) <= MAX_VALUES else None
        if "type" in found and type_names(found["type"]) <= {"null", "boolean"}:
            of_types: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
            return [value for name in sorted(type_names(found["type"])) for value in of_types[name]]
    return None


def _cannot_share(one: Schema, other: Schema, document: Document) -> bool:
    """One schema has a few values, and none of them fits the other."""
    values = finite_values(one, document)
    if values is None:
        return False
    return all(fits(each, other, document) is False or fits(each, one, document) is False for each in values)


def _branches_are_disjoint(
    found: dict[str, Any], other: Schema, document: Document, types: frozenset[str], depth: int
) -> bool:
    return any(
        keyword in found
        and all(are_disjoint(each, other, document, types, depth + 1) for each in found[keyword])
        for keyword in ("anyOf", "oneOf")
    )


def _have_different_texts(parts: list[dict[str, Any]], document: Document) -> bool:
    limits: list[dict[str, Any]] = [{key: part[key] for key in TEXT_LIMITS if key in part} for part in parts]
    limits = [each for each in limits if each]
    return len(limits) > 1 and document.patterns.are_disjoint(limits)


def _differ_in_a_property(
    one: list[dict[str, Any]], other: list[dict[str, Any]], document: Document, depth: int
) -> bool:
    for first, second in ((one, other), (other, one)):
        for name in {name for found in first for name in found.get("required", [])}:
            if any(_is_forbidden(name, found) for found in second):
                return True
            here, there = (
                [found["properties"][name] for found in side if name in found.get("properties", {})]
                for side in (one, other)
            )
            if any(are_disjoint(a, b, document, depth=depth + 1) for a in here for b in there):
                return True
    return False


def _is_forbidden(name: str, found: dict[str, Any]) -> bool:
    if name in found.get("properties", {}):
        return found["properties"][name] is False
    return found.get("additionalProperties") is False and not found.get("patternProperties")
