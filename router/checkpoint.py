"""The state of a router as bytes, and a router that goes on from there.

`save` walks the objects that a router consists of; `load` gives a new router the same objects. A class needs
no code for this: its state is its attributes, or the value of `__getstate__`. An object that two others share
is shared after loading, too. `load` makes objects of Baton's value classes, of the router's classes and of
classes in the policy's module, and refuses any other name. It sets the attributes that such objects have, so
none takes the place of a method, and runs the constructors of values alone.

Left out are the parts that belong to the process: clock, connections, the link to other routers, deferred
work. The tokens of queued prompts, their tenants' salts and their forms are left out too (`bare_request`).
"""

import importlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from itertools import chain
from random import Random
from types import FunctionType, MemberDescriptorType
from typing import Any, Final

import msgspec
import numpy as np

from baton.errors import ConfigError
from baton.request import TOKEN_ID_BYTES, Request, SamplingParams, TokenIds

_ABSENT: Final = object()
# Errors that the bytes of another build, or damaged ones, lead to.
UNREADABLE: Final = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes})  # written as they are
_BUILTINS: Final[dict[str, Any]] = {each.__name__: each for each in (set, dict, list, int, float, tuple)}
_DICTS: Final = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict)}
_OURS: Final = ("baton.router.", "baton.messages.", "baton.config.")
_VALUES: Final = ("baton.clock", "baton.fair_queue", "baton.request", "baton.tenants")
# Structs of these modules hold values alone, so msgspec writes and reads them whole.
_LEAVES: Final = ("baton.messages.", "baton.config.", "baton.tenants", "baton.request")
# Names that a router's attributes may refer to, apart from builtins and the policy's module.
_REFERRED: Final = frozenset({"baton.messages.status:Times", "baton.router.in_flight:WorkerInFlight"})
# The fields that routing reads, apart from the numbers of tokens.
KEPT_REQUEST: Final = (
    *("request_id", "attempt", "choice", "is_probe"),
    *("tenant", "model", "priority", "sla", "scheduling_key"),
)
KEPT_SAMPLING: Final = ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


def without_tokens(request: Request) -> Request:
    """Return the request as routing reads it: without tokens, salt, seed and form."""
    return Request(
        token_ids=TokenIds(b""),
        sampling=SamplingParams(**{name: getattr(request.sampling, name) for name in KEPT_SAMPLING}),
        **{name: getattr(request, name) for name in KEPT_REQUEST},
    )


def with_zero_tokens(request: Request, num_prompt_tokens: int, num_generated_tokens: int) -> Request:
    """Return the request with zeros for so many tokens."""
    return msgspec.structs.replace(
        request,
        token_ids=TokenIds(bytes(TOKEN_ID_BYTES * num_prompt_tokens)),
        generated_token_ids=(0,) * num_generated_tokens,
    )


def bare_request(request: Request) -> Request:
    """Return the request `without_tokens`, with zeros for its tokens."""
    num_tokens = len(request.token_ids), len(request.generated_token_ids)
    return with_zero_tokens(without_tokens(request), *num_tokens)


def save(root: object, outside: Mapping[str, object]) -> bytes:
    """Return the state of `root` and of all that it refers to. outside: name -> a part that is left out.

    Raises TypeError for a part that cannot be written, such as an iterator.
    """
    return msgspec.msgpack.encode(_Saver(outside).value(root))


def load(state: bytes, outside: Mapping[str, object], policy_module: str = "") -> Any:
    """Return the objects that `save` wrote. outside: name -> the part in place of the one left out.

    policy_module: the module of a policy from outside the tree. Raises ConfigError for state that this build
    cannot read.
    """
    try:
        return _Loader(outside, policy_module).value(msgspec.msgpack.decode(state))
    except (msgspec.MsgspecError, *UNREADABLE) as error:
        raise ConfigError(
            f"a router's state cannot be read, perhaps it is another build's: {error}"
        ) from error


@cache
def _attribute_names(kind: type[Any]) -> Sequence[str]:
    """Return the names that instances may have: all names in the class's functions, slots and annotations."""
    names = dict[str, None]()
    for each in reversed(kind.__mro__[:-1]):
        slots = vars(each).get("__slots__", ())
        functions = [value for value in vars(each).values() if isinstance(value, FunctionType)]
        mentioned = chain.from_iterable(function.__code__.co_names for function in functions)
        names |= dict.fromkeys(chain(slots, vars(each).get("__annotations__", ()), mentioned))
    of_instances = (MemberDescriptorType, type(None))
    return [name for name in names if isinstance(getattr(kind, name, None), of_instances)]


def attributes_of(holder: object) -> dict[str, Any]:
    """Return the attributes of an object.

    `vars` would return them too, but makes Python 3.11 keep them in a dictionary from then on, which slows
    every later access: a decision took 7 % longer after one checkpoint.
    """
    kind: type[Any] = type(holder)
    found = ((name, getattr(holder, name, _ABSENT)) for name in _attribute_names(kind))  # type: ignore[arg-type]
    return {name: value for name, value in found if value is not _ABSENT}


def _name_of(named: Any) -> str:
    return f"{named.__module__}:{named.__qualname__}"


def _is_plain(values: Iterable[object]) -> bool:
    """Return whether msgpack writes all of these values as they are."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if not kinds <= _PLAIN | {int}:
        return False
    return max(value.bit_length() for value in values if type(value) is int) < 64


class _Saver:
    """Turns objects into lists that begin with a tag; plain values stay as they are."""

    def __init__(self, outside: Mapping[str, object]) -> None:
        self._outside = {id(part): name for name, part in outside.items()}
        self._numbers: dict[int, int] = {}  # id of a written object -> its number, in the order of `_Loader`
        self._alive: list[object] = []  # an id is not used again meanwhile
        self._writers: dict[type, Callable[[Any], list[Any]]] = {
            list: lambda each: self._shared(each, "list", self._items),
            tuple: lambda each: ["tuple", self._items(each)],
            set: lambda each: self._shared(each, "set", self._items),
            frozenset: lambda each: ["frozenset", self._items(each)],
            deque: lambda each: self._shared(each, "deque", lambda it: [it.maxlen, *self._items(it)]),
            array: lambda each: ["array", each.typecode, each.tobytes()],
            Random: lambda each: self._shared(each, "random", lambda it: self.value(it.getstate())),
            np.ndarray: lambda each: ["ndarray", each.dtype.str, list(each.shape), each.tobytes()],
            Request: lambda each: self._value_once(each, "request", bare_request(each)),
            **dict.fromkeys(_DICTS.values(), self._dict),
        }

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else ["int", hex(value)]
        if id(value) in self._outside:
            return ["outside", self._outside[id(value)]]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        writer = self._writers.get(kind)
        return writer(value) if writer is not None else self._other(value)

    def _other(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(value, type | FunctionType):
            return ["named", value.__name__ if value.__module__ == "builtins" else _name_of(value)]
        if isinstance(value, Enum):
            return ["enum", _name_of(kind), value.value]
        if isinstance(value, tuple):  # a NamedTuple
            return ["named_tuple", _name_of(kind), self._items(value)]
        if isinstance(value, msgspec.Struct):
            if kind.__module__.startswith(_LEAVES) and not self._has_request(value):
                return ["leaf", _name_of(kind), value]
            fields = {name: self.value(getattr(value, name)) for name in kind.__struct_fields__}
            return self._value_once(value, "struct", [_name_of(kind), fields])
        if isinstance(value, np.generic):
            return ["scalar", value.dtype.str, value.tobytes()]
        if not kind.__module__.startswith((*_OURS, *_VALUES)) and not hasattr(kind, "choose"):
            raise TypeError(f"a {_name_of(kind)} cannot be written")
        has_own = any("__getstate__" in vars(each) for each in kind.__mro__[:-1])
        state = value.__getstate__ if has_own else partial(attributes_of, value)
        return self._shared(value, "object", lambda _: [_name_of(kind), self.value(state())])

    def _has_request(self, value: msgspec.Struct) -> bool:
        return isinstance(getattr(value, "request", None), Request)

    def _number(self, value: object) -> None:
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)

    def _shared(self, value: Any, tag: str, write: Callable[[Any], Any]) -> list[Any]:
        """Number an object before its parts, which may refer to it."""
        self._number(value)
        return [tag, write(value)]

    def _value_once(self, value: object, tag: str, written: Any) -> list[Any]:
        """Number an immutable object after its parts."""
        self._number(value)
        return [tag, written]

    def _items(self, values: Any) -> list[Any]:
        return list(values) if _is_plain(values) else [self.value(each) for each in values]

    def _dict(self, value: Any) -> list[Any]:
        self._number(value)
        factory = getattr(value, "default_factory", None)
        items: Sequence[Any] = list(chain.from_iterable(value.items()))
        return ["dict", type(value).__name__, self.value(factory), self._items(items)]


class _Loader:
    """Makes the objects of what `_Saver` wrote, in the same order; `load_TAG` makes a part with that tag."""

    def __init__(self, outside: Mapping[str, object], policy_module: str) -> None:
        self._parts = outside
        self._policy_module = policy_module
        self._made: list[Any] = []  # by number
        self._classes: dict[str, Any] = {}

    def value(self, written: Any) -> Any:
        if type(written) is not list:
            return written
        return getattr(self, f"load_{written[0]}")(*written[1:])

    def _items(self, written: list[Any]) -> list[Any]:
        return [self.value(each) if type(each) is list else each for each in written]

    def _keep(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def load_int(self, text: str) -> int:
        return int(text, 16)

    def load_outside(self, name: str) -> object:
        return self._parts[name]

    def load_again(self, number: int) -> Any:
        return self._made[number]

    def load_list(self, items: list[Any]) -> list[Any]:
        made: list[Any] = self._keep([])
        made += self._items(items)
        return made

    def load_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self._items(items))

    def load_set(self, items: list[Any]) -> set[Any]:
        made: set[Any] = self._keep(set())
        made.update(self._items(items))
        return made

    def load_frozenset(self, items: list[Any]) -> frozenset[Any]:
        return frozenset(self._items(items))

    def load_deque(self, items: list[Any]) -> deque[Any]:
        made: deque[Any] = self._keep(deque(maxlen=items[0]))
        made.extend(self._items(items[1:]))
        return made

    def load_dict(self, kind: str, factory: Any, items: list[Any]) -> dict[Any, Any]:
        made = self._keep(defaultdict(self.value(factory)) if kind == "defaultdict" else _DICTS[kind]())
        flat = iter(self._items(items))
        for key, value in zip(flat, flat, strict=True):
            made[key] = value
        return made  # type: ignore[no-any-return]

    def load_array(self, typecode: str, body: bytes) -> "array[Any]":
        return array(typecode, body)

    def load_ndarray(self, dtype: str, shape: list[int], body: bytes) -> Any:
        return np.frombuffer(body, dtype).reshape(shape).copy()

    def load_scalar(self, dtype: str, body: bytes) -> Any:
        return np.frombuffer(body, dtype)[0]

    def load_random(self, state: Any) -> Random:
        made: Random = self._keep(Random())
        made.setstate(self.value(state))
        return made

    def load_request(self, written: Any) -> Request:
        made: Request = self._keep(msgspec.convert(written, Request))
        return made

    def load_named(self, name: str) -> Any:
        if name in _BUILTINS:
            return _BUILTINS[name]
        if name not in _REFERRED and name.partition(":")[0] != self._policy_module:
            raise ValueError(f"the state refers to {name}, which no router does")
        return self._found(name)

    def _found(self, name: str) -> Any:
        found = self._classes.get(name)
        if found is None:
            module, _, path = name.partition(":")
            if not module.startswith((*_OURS, *_VALUES)) and module != self._policy_module:
                raise ValueError(f"the state names {name}, which no router has")
            found = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            if not isinstance(found, type | FunctionType) or _name_of(found) != name:
                raise ValueError(f"the state names {name}, which {module} does not define")
            self._classes[name] = found
        return found

    def _class(self, name: str, base: type) -> Any:
        found = self._found(name)
        if not isinstance(found, type) or not issubclass(found, base):
            raise ValueError(f"the state has a {name} where a {base.__name__} belongs")
        return found

    def load_enum(self, kind: str, value: Any) -> Any:
        return self._class(kind, Enum)(value)

    def load_named_tuple(self, kind: str, items: list[Any]) -> Any:
        return self._class(kind, tuple)(*self._items(items))

    def load_leaf(self, kind: str, written: Any) -> Any:
        return msgspec.convert(written, self._class(kind, msgspec.Struct))

    def load_struct(self, written: tuple[str, dict[str, Any]]) -> Any:
        kind, fields = written
        values = {name: self.value(each) for name, each in fields.items()}
        return self._keep(self._class(kind, msgspec.Struct)(**values))

    def load_object(self, written: tuple[str, Any]) -> Any:
        kind = self._class(written[0], object)
        made = self._keep(kind.__new__(kind))
        state = self.value(written[1])
        if isinstance(state, dict) and (foreign := state.keys() - set(_attribute_names(kind))):
            raise ValueError(f"a {written[0]} has no attributes {', '.join(sorted(foreign))}")
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return made
        for name, each in state.items():
            object.__setattr__(made, name, each)
        return made
