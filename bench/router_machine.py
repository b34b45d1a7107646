"""What a simulated worker is: how long its work takes, and which pages it keeps."""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; of a token where nothing else is said. The default: a 70B model on eight A800, by roofline."""

    prefill_s: float = 0.01
    prefill_token_s: float = 1.2e-4
    prefill_pair_s: float = 2e-9  # of a new token and one that it attends to
    step_s: float = 0.02
    step_sequence_s: float = 5e-5
    step_context_s: float = 1e-8
    kv_token_bytes: int = 320 * 1024
    transfer_s: float = 5e-3
    transfer_bytes_per_s: float = 10e9
    handoff_s: float = 5e-3  # not hidden behind the prompt's computation
    chunk_tokens: int = 2048  # of a prompt in a decode worker's step

    def compute_s(self, num_new: int, num_tokens: int) -> float:
        pairs = num_new * (num_tokens - num_new / 2)
        return self.prefill_s + num_new * self.prefill_token_s + pairs * self.prefill_pair_s

    def pull_s(self, num_tokens: int) -> float:
        return self.transfer_s + num_tokens * self.kv_token_bytes / self.transfer_bytes_per_s


class PageStore:
    """Keys of pages, the least lately used first; a page leaves before those that come before it."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # key -> page id
        self._free = list(range(num_pages))

    def num_held(self, keys: tuple[bytes, ...]) -> int:
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def keep(self, keys: tuple[bytes, ...]) -> Iterator[tuple[bytes, int]]:
        """Changes: a key, and its page or -1."""
        keys = keys[: self._num_pages]
        new = [key for key in keys if key not in self._pages]
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)
        while len(self._free) < len(new):
            key, page = self._pages.popitem(last=False)
            self._free.append(page)
            yield key, -1
        for key in reversed(new):
            self._pages[key] = self._free.pop()
            yield key, self._pages[key]
