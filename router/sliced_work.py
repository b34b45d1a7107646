"""Long work of a router, done in slices, so that messages are handled in between.

`SlicedWork` does the slices in turns of the event loop. `PromptKeys` computes page keys, of long prompts in
slices.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Final, TypeAlias

from baton.messages.bounds import MAX_PULLED_PAGES, SHORT_KEY_BYTES
from baton.messages.workers import Worker
from baton.pages import PageKeys, short_keys
from baton.request import AttemptKey, Request
from baton.router.checkpoint import attributes_of

PIECES_PER_EXTRA_SLICE: Final = 8
CallSoon: TypeAlias = Callable[[Callable[[], None]], object]


class SlicedWork:
    """Does work in turns of the host's event loop.

    Work is an iterator; each step is a slice. A turn of the loop does one slice, and one more for every
    PIECES_PER_EXTRA_SLICE waiting pieces of work, round robin.
    """

    def __init__(self, call_soon: CallSoon | None = None) -> None:
        """call_soon: has the host make a call in its next turn. None: all work is done when it is added."""
        self._call_soon = call_soon
        self._work: deque[Iterator[None]] = deque()
        self._is_scheduled = False  # the host makes the call

    @property
    def is_deferred(self) -> bool:
        """True when added work is finished in later turns."""
        return self._call_soon is not None

    @property
    def num_waiting(self) -> int:
        """The number of pieces of work that later turns finish."""
        return len(self._work)

    def add(self, work: Iterator[None]) -> None:
        """Do the first slice now, and the others in later turns."""
        if self._call_soon is None:
            for _ in work:
                pass
        elif _advance(work):
            self._work.append(work)
            self._schedule()

    def _run_slices(self) -> None:
        self._is_scheduled = False
        try:
            for _ in range(1 + len(self._work) // PIECES_PER_EXTRA_SLICE):
                work = self._work.popleft()
                if _advance(work):
                    self._work.append(work)
        finally:  # work that failed is dropped, and holds up no other
            self._schedule()

    def _schedule(self) -> None:
        if self._work and not self._is_scheduled and self._call_soon is not None:
            self._is_scheduled = True
            self._call_soon(self._run_slices)


def _advance(work: Iterator[None]) -> bool:
    """Do one slice. Returns False when no work is left."""
    for _ in work:
        return True
    return False


MAX_PREPARED: Final = 64  # attempts with prepared keys
Family: TypeAlias = tuple[str, str, int]  # fingerprint, kv_dtype, page_size: equal ones name pages alike


def family_of(worker: Worker) -> Family:
    """The family of a worker."""
    return (worker.fingerprint, worker.kv_dtype, worker.page_size)


PAGES_PER_SLICE: Final = 512  # computing or expecting their keys takes less than half a millisecond


class PromptKeys:
    """Computes the page keys of prompts.

    `prepare` computes the keys of a long prompt in slices, before its attempt is queued. They are kept until
    the attempt leaves the queue: each try to dispatch it needs them.
    """

    def __init__(self, pages_per_slice: int | None = None) -> None:
        """pages_per_slice: None computes the keys of every prompt at once."""
        self.on_keys: Callable[[AttemptKey, Family, bytes], object] | None = None  # called with computed keys
        # In a replay: all keys, of prompts without tokens. Pages that are not there have key 0.
        self.known: Mapping[tuple[AttemptKey, Family], bytes] | None = None
        self._families: dict[Family, PageKeys] = {}
        self._pages_per_slice = pages_per_slice
        self._kept: OrderedDict[AttemptKey, dict[Family, bytes]] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return attributes_of(self) | {"on_keys": None, "known": None, "_families": {}}

    def keys(self, family: Family, request: Request) -> bytes:
        """The `short_keys` of the pages that the prompt and the tokens of earlier attempts fill."""
        kept = self._kept.get(request.key, {}).get(family)
        if kept is not None:
            return kept
        keys: list[bytes] = []
        for _ in self._extend(keys, family, request):
            pass
        return self._computed(request.key, family, keys)

    def are_ready(self, families: Set[Family], request: Request) -> bool:
        """Return True when `keys` is quick: the prompt is short, or `prepare` has computed its keys."""
        if self._pages_per_slice is None or not families:
            return True
        if request.num_tokens <= self._pages_per_slice * min(page_size for _, _, page_size in families):
            return True
        return self._kept.get(request.key, {}).keys() >= families

    def prepare(self, families: Collection[Family], request: Request) -> Iterator[None]:
        """Compute and keep the keys of a prompt; yields after each slice."""
        kept: dict[Family, bytes] = {}
        for family in families:
            keys: list[bytes] = []
            for _ in self._extend(keys, family, request):
                yield
            kept[family] = self._computed(request.key, family, keys)
        self._kept[request.key] = kept
        if len(self._kept) > MAX_PREPARED:
            self._kept.popitem(last=False)

    def forget(self, key: AttemptKey) -> None:
        """Drop the keys of an attempt that has left the queue."""
        self._kept.pop(key, None)

    def _extend(self, keys: list[bytes], family: Family, request: Request) -> Iterator[None]:
        fingerprint, dtype, page_size = family
        page_keys = self._families.get(family)
        if page_keys is None:
            page_keys = PageKeys(model_fingerprint=fingerprint, dtype=dtype, page_size=page_size)
            self._families[family] = page_keys
        token_ids = request.all_token_ids
        num_pages = min(len(token_ids) // page_size, MAX_PULLED_PAGES)
        known = None if self.known is None else self.known.get((request.key, family), b"")
        while len(keys) < num_pages:
            until = min(num_pages, len(keys) + (self._pages_per_slice or num_pages))
            if known is None:
                page_keys.extend(keys, token_ids, until, request.page_salt)
            else:
                starts = range(SHORT_KEY_BYTES * len(keys), SHORT_KEY_BYTES * until, SHORT_KEY_BYTES)
                keys += [known[at : at + SHORT_KEY_BYTES] or bytes(SHORT_KEY_BYTES) for at in starts]
            yield

    def _computed(self, key: AttemptKey, family: Family, keys: list[bytes]) -> bytes:
        joined = short_keys(keys)
        if self.on_keys is not None:
            self.on_keys(key, family, joined)
        return joined
