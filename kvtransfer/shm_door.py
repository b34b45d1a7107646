"""The destination's side of the shm transport: it gives its pool to sources on the same host.

1. A source connects to a unix socket that has an address but no file, and proves that it holds the cluster
   key. It must be a process of the same user.
2. It says its incarnation, and gets the pool to write and the table of generations to read.
3. Its process is watched from then on. The landings hear of its death, and of nothing less: a connection
   that closes says nothing about what is mapped.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.challenge import LinkSecret
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, WireError
from baton.kvtransfer.acceptor import Acceptor
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.page_memory import PageGenerations, SharedPool
from baton.kvtransfer.process_watch import ProcessWatch, peer_process, peer_user
from baton.wire import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

INCARNATION_BYTES: Final = 16
HANDSHAKE_S: Final = 5.0
MAX_WRITERS: Final = 256  # each is watched, which takes an open file; the rest come over tcp


class PoolOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes with the two descriptors: pages, then generations."""

    num_pages: Annotated[int, Meta(ge=1, le=2**31)]
    page_bytes: Annotated[int, Meta(ge=1, le=2**40)]


# What a source gets to reach the pages with: a message, and descriptors of the caller's.
Offer = Callable[[], tuple[bytes, tuple[int, ...]]]


class PoolDoor:
    """`address` is what a source needs, with the cluster key, to open the pool."""

    def __init__(
        self,
        offer: Offer,
        generations: PageGenerations,
        landings: Landings,
        key: LinkSecret,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        """on_death: told, in a thread of the door, which open transfers a dead process has left behind."""
        self._offer = offer
        self._landings = landings
        self._key = key
        self._on_death = on_death
        self._clock = clock or SystemClock()
        self._dropped = dropped or DroppedPeers()
        self._read_only = generations.file.read_only()
        self._watch = ProcessWatch()
        self._lock = threading.Lock()
        self._incarnations: set[bytes] = set()  # of processes that are watched
        self._is_closed = False
        self.address = f"\0baton-kv-{secrets.token_hex(16)}"  # abstract: nothing in any folder
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(128)
        self._acceptor = Acceptor(listener, self._serve, "shm", self._dropped)

    def close(self) -> None:
        """Give the pool to nobody any more. Who has mapped it can still write, and is watched no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._acceptor.close()
        self._watch.close()
        os.close(self._read_only)

    def _serve(self, sock: socket.socket) -> None:
        try:
            user = peer_user(sock)
            if user != os.getuid():
                self._dropped.add("user")
                raise WireError(f"user {user} may not open a pool of user {os.getuid()}", reason="user")
            process = peer_process(sock)
            try:
                connection = Connection(
                    sock, self._key, Role.ACCEPTING, dropped=self._dropped, clock=self._clock
                )
                self._give(connection.handshake(HANDSHAKE_S), process)
            finally:
                os.close(process)
        except WireError as error:
            logger.warning("a source was not given the pool: %s", error)
        except (BatonError, OSError) as error:
            logger.info("a source was not given the pool: %s", error)
        finally:
            sock.close()

    def _give(self, connection: Connection, process: int) -> None:
        """process: the caller closes this descriptor."""
        with contextlib.closing(connection):
            incarnation = connection.recv(HANDSHAKE_S)
            if len(incarnation) != INCARNATION_BYTES:
                raise connection.drop(WireError("an incarnation has 16 bytes", reason="length"))
            with self._lock:
                is_new = incarnation not in self._incarnations
                has_room = not is_new or len(self._incarnations) < MAX_WRITERS
                if is_new and has_room:  # watched before it can write, by whichever of its connections
                    watched = os.dup(process)  # OSError: no descriptor is free, and nothing has changed
                    self._incarnations.add(incarnation)
                    self._landings.writer_came(incarnation)
                    self._watch.add(watched, lambda: self._bury(incarnation))
            if not has_room:
                raise connection.drop(WireError(f"{MAX_WRITERS} processes have the pool", reason="crowd"))
            message, descriptors = self._offer()
            connection.send(message, (*descriptors, self._read_only))
            with contextlib.suppress(BatonError, TimeoutError):
                connection.recv(HANDSHAKE_S)  # until the source has what it needs and closes

    def _bury(self, incarnation: bytes) -> None:
        with self._lock:
            self._incarnations.discard(incarnation)
        self._on_death(self._landings.writer_died(incarnation))


class ShmDoor(PoolDoor):
    """The door of a pool in shared memory."""

    def __init__(
        self,
        pool: SharedPool,
        landings: Landings,
        key: LinkSecret,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        memory = pool.memory
        message = msgspec.msgpack.encode(PoolOffer(num_pages=memory.num_pages, page_bytes=memory.page_bytes))
        super().__init__(
            lambda: (message, (pool.file.descriptor,)),
            pool.generations,
            landings,
            key,
            on_death,
            clock=clock,
            dropped=dropped,
        )
