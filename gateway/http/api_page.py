"""`/docs`: the routes and the bodies of `/openapi.json` on one page, without a script or any other file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import minijinja

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
NAME: Final = "api_page.html"  # minijinja escapes values because of the ending
METHODS: Final = ("get", "post", "delete")
MAX_VALUES: Final = 8  # of an enumeration that are shown
Schema: TypeAlias = Mapping[str, Any]


def api_page(openapi: Schema) -> str:
    """Return the page. openapi: the whole document."""
    environment = minijinja.Environment(
        templates={NAME: Path(__file__).with_name("api_page.jinja").read_text("utf-8")}
    )
    info = openapi["info"]
    return environment.render_template(
        NAME, title=info["title"], version=info["version"], routes=list(_routes(openapi))
    )


def _routes(openapi: Schema) -> Iterator[Schema]:
    schemas = openapi.get("components", {}).get("schemas", {})
    for path, methods in openapi["paths"].items():
        for method in METHODS:
            if (route := methods.get(method)) is None:
                continue
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = _resolved(content.get("schema", {}), schemas)
            yield {
                "method": method.upper(),
                "path": path,
                "summary": route.get("description") or route.get("summary", ""),
                "keys": list(_keys(body, schemas)),
                "parameters": [each["name"] for each in route.get("parameters", ())],
                "responses": [
                    {"status": status, "description": answer.get("description", "")}
                    for status, answer in route.get("responses", {}).items()
                ],
            }


def _keys(body: Schema, schemas: Schema) -> Iterator[Schema]:
    """Yield the keys of a body, those that are required first."""
    required = set(body.get("required", ()))
    properties = body.get("properties", {})
    for name in sorted(properties, key=lambda name: name not in required):
        yield {
            "name": name,
            "type": _type(properties[name], schemas),
            "is_required": name in required,
        }


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    reference = schema.get("$ref")
    found: Schema = schema if reference is None else schemas.get(reference.rpartition("/")[2], {})
    return found


def _type(schema: Schema, schemas: Schema, depth: int = 0) -> str:
    """Return a schema in words, such as "text or list of integer"."""
    schema = _resolved(schema, schemas)
    if depth > 2:
        return "..."
    if "anyOf" in schema:
        kinds = [_type(each, schemas, depth) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        values = [str(value) for value in schema["enum"] if value is not None]
        return ", ".join(values[:MAX_VALUES]) + (", ..." if len(values) > MAX_VALUES else "")
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), schemas, depth + 1)}"
    if kind == "object":
        names = ", ".join(schema.get("properties", {}))
        return f"object ({names})" if names else "object"
    return {"string": "text", "boolean": "true or false"}.get(kind, str(kind))
