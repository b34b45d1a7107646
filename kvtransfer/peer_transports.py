"""The transports from this rank to one peer: the best that opens carries all pieces, until it breaks.

1. `when_settled` opens a transport, in a thread: connecting may take seconds. `push` takes a piece and the
   call to make when it has ended.
2. A piece that fails is pushed again, over the next transport if this one is broken, else over the same one:
   a piece has as many tries as there are transports.
3. With no transport left, or no try, the piece has failed for good. The next transfer tries all of them anew.

All calls but `close` are made by the rank's thread, `post` brings the others' news there.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from baton.errors import TransferFailed
from baton.kvtransfer.choose import TransportCounters, TransportName
from baton.kvtransfer.message_stream import Call, Post
from baton.kvtransfer.transport import OnEnd, Piece, Progress, TransferStatus, Transport

logger = logging.getLogger(__name__)

Made: TypeAlias = Callable[[TransportName, OnEnd], Transport]
Ended: TypeAlias = Callable[[Progress], None]


class _Delivery:
    def __init__(self, piece: Piece, on_end: Ended) -> None:
        self.piece = piece
        self.on_end = on_end
        self.num_tries = 0
        self.is_cancelled = False


class PeerTransports:
    def __init__(
        self, names: Sequence[TransportName], make: Made, post: Post, counters: TransportCounters
    ) -> None:
        """names: best first, as of choose.order."""
        self._all_names = tuple(names)
        self._names = list(names)  # those that have not failed
        self._num_names = len(names)
        self._generation = 0  # of transports: tells the tickets of one from those of the next
        self._make = make
        self._post = post
        self._counters = counters
        self._transport: Transport | None = None
        self._opening: tuple[threading.Thread, Transport] | None = None
        self._waiting: list[_Delivery] = []  # for a transport to open
        self._unsettled: list[Call] = []  # as well
        self._under_way: dict[int, _Delivery] = {}  # by ticket of the present transport
        self._lock = threading.Lock()  # a thread is started before it is joined
        self._is_closed = False

    @property
    def name(self) -> str | None:
        """Of the transport that is open now."""
        return self._transport.name if self._transport is not None else None

    def when_settled(self, call: Call) -> None:
        """Make the call once a transport is open, or none is left: a peer may want to see us come first.

        Where all have failed they are tried once more: what broke them may have passed.
        """
        if self._transport is not None or not self._all_names:
            call()
            return
        if not self._names and self._opening is None:
            self._names = list(self._all_names)
        self._unsettled.append(call)
        self._open_next()

    def push(self, piece: Piece, on_end: Ended) -> None:
        """on_end: called later, never from within, with the outcome."""
        self._deliver(_Delivery(piece, on_end))

    def abort(self, transfer: bytes) -> None:
        """On return nobody here reads or writes for the transfer; its pieces' `on_end` are not called."""
        for delivery in (*self._waiting, *self._under_way.values()):
            delivery.is_cancelled |= delivery.piece.transfer.id == transfer
        if self._transport is not None:
            self._transport.abort(transfer)

    def close(self) -> None:
        """From any thread."""
        with self._lock:
            self._is_closed = True
        if self._opening is not None:
            thread, transport = self._opening
            transport.close()
            thread.join()
            transport.close()
        if self._transport is not None:
            self._transport.close()

    def _deliver(self, delivery: _Delivery) -> None:
        if delivery.is_cancelled:
            return
        if self._transport is None:
            self._waiting.append(delivery)
            self._open_next()
            return
        delivery.num_tries += 1
        ticket = self._transport.push(delivery.piece)
        self._under_way[ticket] = delivery

    def _open_next(self) -> None:
        if self._opening is not None:
            return
        if not self._names or self._is_closed:
            self._counters.recomputed()
            self._settle()
            waiting, self._waiting = self._waiting, []
            for delivery in waiting:
                failed = Progress(TransferStatus.FAILED, reason="no transport is left")
                self._post(partial(self._tell, delivery, failed))
            return
        name = self._names[0]
        self._generation += 1
        generation = self._generation
        transport = self._make(name, lambda ticket: self._post(partial(self._ended, generation, ticket)))
        thread = threading.Thread(target=self._open, args=(name, transport), name="kv-open", daemon=True)
        try:
            with self._lock:
                if not self._is_closed:
                    thread.start()
                    self._opening = thread, transport
        except RuntimeError as error:  # the process may have no more threads
            logger.warning("%s could not be opened: %s", name, error)
            transport.close()
            self._use_next()

    def _open(self, name: TransportName, transport: Transport) -> None:
        try:
            transport.open()
        except Exception as error:
            if not isinstance(error, TransferFailed):
                logger.exception("%s could not be opened", name)
            transport.close()
            self._post(partial(self._opened, name, None))
        else:
            self._post(partial(self._opened, name, transport))

    def _opened(self, name: TransportName, transport: Transport | None) -> None:
        if self._is_closed or self._opening is None:
            return
        self._opening[0].join()
        self._opening = None
        if transport is None:
            self._use_next()
            return
        self._counters.opened(name, self._num_names - len(self._names))
        self._transport = transport
        self._settle()
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            self._deliver(delivery)

    def _use_next(self) -> None:
        self._counters.failed(self._names.pop(0))
        self._open_next()

    def _ended(self, generation: int, ticket: int) -> None:
        if self._transport is None or generation != self._generation:
            return  # of a transport that was given up: its pieces have been taken over
        delivery = self._under_way.pop(ticket)
        progress = self._transport.poll(ticket)
        self._transport.forget(ticket)
        if progress.status is TransferStatus.DONE or delivery.is_cancelled:
            self._tell(delivery, progress)
            return
        if self._transport.is_broken:
            self._give_up_transport()
        if delivery.num_tries >= self._num_names:
            self._tell(delivery, progress)
        else:
            self._deliver(delivery)

    def _give_up_transport(self) -> None:
        assert self._transport is not None
        self._counters.failed(self._names.pop(0))
        self._transport.close()
        self._transport = None
        self._waiting += self._under_way.values()
        self._under_way = {}
        if self._waiting:
            self._open_next()

    def _settle(self) -> None:
        calls, self._unsettled = self._unsettled, []
        for call in calls:
            call()

    def _tell(self, delivery: _Delivery, progress: Progress) -> None:
        if not delivery.is_cancelled:
            delivery.on_end(progress)
