"""Stand-ins with real behaviour for parts that are slow or outside the process."""

import socket
import threading
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool
from baton.engine.scheduler.sequence import Batch, ScheduledChunk, Sequence
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.control import Hello
from baton.rpc.auth import LinkSecret, Role
from baton.rpc.connection import Connection, DroppedPeers
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset

_MULTIPLIER, _MODULUS = 6364136223846793005, 2**64


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make threads of this name fail to start, as in a process at its thread limit."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


def proved_connections(
    sockets: tuple[socket.socket, socket.socket], key: LinkSecret, dropped: DroppedPeers | None = None
) -> tuple[Connection, Connection]:
    """Return the connecting and the accepting end, past their handshake. dropped: of the accepting end."""
    connecting = Connection(sockets[0], key, Role.CONNECTING)
    accepting = Connection(sockets[1], key, Role.ACCEPTING, dropped=dropped)
    proving = threading.Thread(target=connecting.handshake)
    proving.start()
    accepting.handshake()
    proving.join()
    return connecting, accepting


class JumpingClock(ManualClock):
    """A clock that may jump, as after a suspended machine."""

    def jump(self, seconds: float) -> None:
        """Move forward or back."""
        self._now_s += seconds


class KVEntry(NamedTuple):
    """The KV entry of one token; `context` depends on the salt and on every token up to this one."""

    position: int
    token_id: int
    context: int


class HashModel:
    """A model whose next token depends on every KV entry that it reads, page by page.

    It keeps real contents of device and host pages, runs the copies of a batch in the documented order, and
    raises AssertionError when a chunk reads a slot without the sequence's own entry, or writes a page with
    another owner. A placeholder is read as the token that the last batch sampled for it.
    """

    def __init__(self, pool: PagePool, num_host_pages: int = 0, vocab_size: int = 50) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self.device: list[list[KVEntry | None]] = [[None] * pool.page_size for _ in range(pool.num_pages)]
        self.host: list[list[KVEntry | None]] = [[None] * pool.page_size for _ in range(num_host_pages)]
        self.num_computed_tokens = 0
        self.accepted: dict[int, list[int]] = {}  # of the last batch: chunk -> tokens after its first
        self._last_sampled: list[int] = []

    def run(self, batch: Batch) -> list[int | None]:
        """Execute the batch: the first sampled token of each chunk that samples, else None."""
        for device_page, host_page in batch.copies_to_host:
            self.host[host_page] = list(self.device[device_page])
        for device_page, host_page in batch.copies_to_device:
            self.device[device_page] = list(self.host[host_page])
        runs = [self._run_chunk(chunk) for chunk in batch.chunks]
        self.accepted = {index: run[1:] for index, run in enumerate(runs) if len(run) > 1}
        sampled = [run[0] if run else None for run in runs]
        self._last_sampled = [token_id for token_id in sampled if token_id is not None]
        return sampled

    def context_of(self, token_ids: Ordered[int], salt: bytes) -> int:
        context = int.from_bytes(salt, "little")
        for token_id in token_ids:
            context = _mix(context, token_id)
        return context

    def generate(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the prompt and its continuation without pages or batches.

        The answer of every correct run.
        """
        token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        context = self.context_of(token_ids, sequence.cache_salt)
        while len(token_ids) < num_tokens:
            token_ids.append(self._sample(context, sequence.choice, len(token_ids)))
            context = _mix(context, token_ids[-1])
        return token_ids

    def _run_chunk(self, chunk: ScheduledChunk) -> list[int]:
        sequence, context = chunk.sequence, int.from_bytes(chunk.sequence.cache_salt, "little")
        token_ids = [self._last_sampled[-1 - each] if each < 0 else each for each in sequence.token_ids]
        token_ids += chunk.drafts
        run: list[int] = []
        for position in range(chunk.start):
            context = _mix(context, token_ids[position])
            page, offset = self._slot(sequence, position)
            expected = KVEntry(position, token_ids[position], context)
            assert self.device[page][offset] == expected, (
                f"{sequence.key} reads page {page}: {self.device[page][offset]}, expected {expected}"
            )
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            context = _mix(context, token_ids[position])
            page, offset = self._slot(sequence, position)
            assert self._pool.owners(page) == {sequence.key}, f"{sequence.key} writes shared page {page}"
            self.device[page][offset] = KVEntry(position, token_ids[position], context)
            num_drafts = position + 1 - sequence.num_tokens
            if num_drafts == 0 or (num_drafts > 0 and run == token_ids[sequence.num_tokens : position + 1]):
                run.append(self._sample(context, sequence.choice, position + 1))
        self.num_computed_tokens += chunk.num_tokens
        return run

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        page = sequence.page_table[position // self._pool.page_size]
        assert sequence.key in self._pool.owners(page), f"{sequence.key} does not own page {page}"
        return page, position % self._pool.page_size

    def _sample(self, context: int, choice: int, position: int) -> int:
        return (_mix(_mix(context, choice), position) >> 33) % self._vocab_size


def _mix(context: int, value: int) -> int:
    return (context * _MULTIPLIER + value + 1442695040888963407) % _MODULUS


class Letter(NamedTuple):
    sender: str
    receiver: str
    message: AnyMessage


class Post:
    """Letters between processes, in order, until `take`; letters that `holds` selects wait."""

    def __init__(self) -> None:
        self.holds: Callable[[Letter], bool] = lambda letter: False
        self._letters: list[Letter] = []

    def put(self, sender: str, receiver: str, message: AnyMessage) -> None:
        """Add a message, encoded and decoded as over a connection."""
        self._letters.append(Letter(sender, receiver, decode(encode(message))))

    def take(self) -> list[Letter]:
        letters, self._letters = self._letters, []
        self._letters += [letter for letter in letters if self.holds(letter)]
        return [letter for letter in letters if not self.holds(letter)]

    def held(self) -> list[Letter]:
        return [letter for letter in self._letters if self.holds(letter)]

    def lose(self, process: str) -> None:
        """Lose the letters on the way to or from a process."""
        self._letters = [each for each in self._letters if process not in (each.sender, each.receiver)]


class PostedPeer:
    """A Peer at `owner`'s end; its messages go to a Post."""

    def __init__(self, owner: str, hello: Hello, post: Post) -> None:
        self._owner = owner
        self._hello = hello
        self._post = post
        self.is_closed = False
        self.silence_s = self.quiet_s = 0.0
        self.clock_offset: ClockOffset | None = SAME_CLOCK

    @property
    def hello(self) -> Hello:
        return self._hello

    def send(self, message: AnyMessage) -> None:
        self._post.put(self._owner, self._hello.id, message)

    def close(self) -> None:
        self.is_closed = True
