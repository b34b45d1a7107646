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
            _check(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:  # without its excerpt of the file, where there may be a key
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"cannot be read: {where}{error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}") from None


def _check(root: yaml.Node) -> None:
    """Refuse a repeated key, and aliases that expand a small file to a huge or an endless one.

    Raises MarkedYAMLError. A key that overrides a merged one is not repeated: nothing is merged yet.
    """
    num_values: dict[int, int] = {}  # of each node with all that is in it; 0 while it is being counted

    def count(node: yaml.Node) -> int:
        known = num_values.get(id(node))
        if known == 0:
            raise _error(node, "the anchor contains an alias of itself")
        if known is not None:
            return known
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        num_values[id(node)] = 0
        num_values[id(node)] = found = 1 + sum(map(count, _inside(node)))
        if found > MAX_VALUES:
            raise _error(node, f"expected at most {MAX_VALUES} values, aliases expand to more")
        return found

    count(root)


def _check_keys(mapping: yaml.MappingNode) -> None:
    seen = set[tuple[str, str]]()
    for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
        if (key.tag, key.value) in seen:
            raise _error(key, f"the key {str(key.value)[:64]!r} is repeated")
        seen.add((key.tag, key.value))


def _inside(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (each for pair in node.value for each in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """As in PyYAML, which raises many kinds of errors for a value that does not go with its tag."""
        try:
            return super().construct_object(node, deep=deep)
        except (AttributeError, LookupError, TypeError, ValueError):  # their texts may show the value, a key
            raise _error(node, f"expected a valid {node.tag.rpartition(':')[2]}") from None
