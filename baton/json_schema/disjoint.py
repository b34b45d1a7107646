"""Proofs that no value fits two schemas, so that `oneOf` of both is `anyOf`."""

from collections.abc import Iterator
from typing import Any, Final

from baton.json_schema.document import ALL_TYPES, Document, Schema, common_types, type_names
from baton.json_schema.values import fits

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
