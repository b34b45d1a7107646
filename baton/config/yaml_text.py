"""Reads YAML that people write.

A repeated key is an error, and aliases cannot expand a small file to a huge one.
"""

from collections.abc import Iterable
from typing import Any, Final

import yaml

from baton.errors import ConfigError

MAX_VALUES: Final = 2**22  # of a file with its aliases expanded


def load_yaml(text: str) -> Any:
    """Return the plain values of YAML. Raises ConfigError for other text and for a repeated key."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_size(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:  # without its excerpt of the file, where there may be a key
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"cannot be read: {where}{error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from None
    except (AttributeError, LookupError, TypeError):  # of PyYAML, and it may have a key's text
        raise ConfigError("cannot be read: a tag does not go with its value") from None


def _check_size(root: yaml.Node) -> None:
    """Raise ConfigError when aliases expand a small file to a huge or an endless one."""
    num_values: dict[int, int] = {}  # of each node with all that is in it; 0 while it is being counted

    def count(node: yaml.Node) -> int:
        known = num_values.get(id(node))
        if known == 0:
            raise ConfigError(f"line {node.start_mark.line + 1}: the anchor contains an alias of itself")
        if known is not None:
            return known
        num_values[id(node)] = 0
        num_values[id(node)] = found = 1 + sum(map(count, _inside(node)))
        if found > MAX_VALUES:
            raise ConfigError(f"expected at most {MAX_VALUES} values, aliases expand to more")
        return found

    count(root)


def _inside(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (each for pair in node.value for each in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {str(key.value)[:64]!r} is repeated"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)
