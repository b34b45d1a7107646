"""The transports from one rank to one rank of a peer: the best one that opens carries all pieces until it
breaks.

1. `when_settled` connects and opens a transport in a thread: that may take seconds. `push` takes a piece and
   the call to make when the piece has ended.
2. The pieces of a transport that breaks are pushed again, over the next one. A piece that fails over a
   transport that works has failed for good: the destination has refused it.
3. With no transport left, pieces fail. The next transfer tries all transports again.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.transports.base import (
    LocalRank,
    OnEnd,
    Piece,
    PieceOutcome,
    Sender,
    Transport,
    TransportSet,
)
from baton.rpc.connection import Call, Post

logger = logging.getLogger(__name__)
Start: TypeAlias = Callable[[Call], None]  # RuntimeError: the process may have no more threads


class PeerTransports:
    """The transports to one rank of a peer.

    The rank's thread makes all calls but `close`. Other threads report to it through `post`.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        connect: Callable[[Transport], Sender],
        post: Post,
        start: Start,
        counts: Counter[str],
    ) -> None:
        """transports: best first. connect: a sender that is not open; TransferFailed when there is none.

        start: makes the call that opens a sender, which may take seconds, in another thread.
        counts: receives the events of these transports: opened_NAME, failed_NAME (did not open, or broke
        later), fallbacks (not the first choice was opened) and recomputes (no transport was left).
        """
        self._all = tuple(transports)
        self._left = list(transports)  # transports that have not failed
        self._connect = connect
        self._post = post
        self._start = start
        self._counts = counts
        self._sender: Sender | None = None
        self._opening: Sender | None = None  # a thread opens it, and closes it if it is late
        # Pieces that have not ended, in order: under way over the present sender, or waiting for one to open.
        self._pieces: dict[int, tuple[Piece, OnEnd]] = {}
        self._numbers = count()
        self._unsettled: list[Call] = []
        self._is_closed = False

    @property
    def name(self) -> str | None:
        """Return the name of the open transport, or None."""
        return self._left[0].name if self._sender is not None else None

    @property
    def best(self) -> str | None:
        """Return the name of the first choice; any other open transport is a fallback."""
        return self._all[0].name if self._all else None

    def when_settled(self, call: Call) -> None:
        """Make the call once a transport is open, or none is left.

        When all have failed, they are tried once more: the cause may have passed.
        """
        if self._sender is not None or not self._all:
            call()
            return
        if not self._left and self._opening is None:
            self._left = list(self._all)
        self._unsettled.append(call)
        self._open_next()

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Send a piece. on_end: called later, never from within, with the outcome."""
        number = next(self._numbers)
        self._pieces[number] = piece, on_end
        if self._sender is None:
            self._open_next()
        else:
            self._send(self._sender, number)

    def abort(self, transfer: bytes) -> None:
        """Drop the transfer's pieces, without calling their `on_end`.

        On return this process neither reads nor writes for the transfer.
        """
        aborted = [number for number, (piece, _) in self._pieces.items() if piece.transfer == transfer]
        for number in aborted:
            del self._pieces[number]
        if self._sender is not None:
            self._sender.abort(transfer)

    def close(self) -> None:
        """Close the senders. Any thread may call, any number of times."""
        self._is_closed = True
        for sender in (self._opening, self._sender):
            if sender is not None:
                sender.close()

    def _send(self, sender: Sender, number: int) -> None:
        piece, _ = self._pieces[number]
        sender.push(piece, lambda outcome: self._post(partial(self._ended, sender, number, outcome)))

    def _open_next(self) -> None:
        if self._opening is not None:
            return
        if not self._left or self._is_closed:
            self._counts["recomputes"] += 1
            failed = PieceOutcome(is_done=False, reason="no transport is left")
            for number in list(self._pieces):
                self._post(partial(self._end, number, failed))
            self._settle()
            return
        name = self._left[0].name
        sender: Sender | None = None
        try:
            self._opening = sender = self._connect(self._left[0])  # before the thread: `close` may come now
            self._start(partial(self._open, name, sender))
        except (TransferFailed, RuntimeError) as error:  # RuntimeError: the process may have no more threads
            logger.warning("%s could not be opened: %s", name, error)
            self._opening = None
            if sender is not None:
                sender.close()
            self._use_next()

    def _open(self, name: str, sender: Sender) -> None:
        try:
            sender.open()
        except Exception as error:
            if not isinstance(error, TransferFailed):
                logger.exception("%s could not be opened", name)
            sender.close()
            self._post(partial(self._opened, None))
        else:
            if self._is_closed:
                sender.close()
            self._post(partial(self._opened, sender))

    def _opened(self, sender: Sender | None) -> None:
        if self._is_closed or self._opening is None:
            return
        self._sender, self._opening = sender, None  # in this order: `close` may come meanwhile
        if sender is None:
            self._use_next()
            return
        self._counts[f"opened_{self._left[0].name}"] += 1
        if len(self._left) < len(self._all):
            self._counts["fallbacks"] += 1
        for number in list(self._pieces):
            self._send(sender, number)
        self._settle()

    def _use_next(self) -> None:
        self._counts[f"failed_{self._left.pop(0).name}"] += 1
        self._open_next()

    def _ended(self, sender: Sender, number: int, outcome: PieceOutcome) -> None:
        if sender is not self._sender:
            return  # the sender was given up, and its pieces go over the next one
        if number in self._pieces and sender.is_broken and not outcome.is_done:
            self._sender = None
            sender.close()
            self._use_next()
        else:
            self._end(number, outcome)

    def _settle(self) -> None:
        calls, self._unsettled = self._unsettled, []
        for call in calls:
            call()

    def _end(self, number: int, outcome: PieceOutcome) -> None:
        """Report the end of a piece, unless it has ended or was aborted."""
        piece = self._pieces.pop(number, None)
        if piece is not None:
            piece[1](outcome)


class RankTransports:
    """One rank's senders to all ranks of all peers. All calls but `stop` are made by the rank's thread."""

    def __init__(
        self,
        rank: LocalRank,
        own: RankListenerAddresses,
        transports: TransportSet,
        post: Post,
        start: Start,
    ) -> None:
        """own: the rank's own listeners. start: see PeerTransports."""
        self.counts: Counter[str] = Counter()  # see PeerTransports
        self._rank = rank
        self._own = own
        self._transports = transports
        self._post = post
        self._start = start
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, int], PeerTransports] = {}  # (link, the peer's rank)
        self._is_stopped = False

    def to(self, link: int, peer: PeerRank) -> PeerTransports:
        """Return the transports to this rank over this link. After `stop`, none of them opens."""
        with self._lock:
            found = self._peers.get((link, peer.rank))
            if found is None:
                order = () if self._is_stopped else self._transports.order(self._own, peer.listeners)
                found = self._peers[link, peer.rank] = PeerTransports(
                    order,
                    lambda transport: transport.connect(self._rank, peer),
                    self._post,
                    self._start,
                    self.counts,
                )
        return found

    def in_use(self) -> list[tuple[int, str, str]]:
        """Return the link, the open transport and the first choice of each pair of ranks."""
        with self._lock:
            peers = [(link, peer.name, peer.best) for (link, _), peer in self._peers.items()]
        return [(link, name, best) for link, name, best in peers if name is not None and best is not None]

    def drop(self, link: int) -> None:
        """Close the senders of a link that has ended."""
        with self._lock:
            keys = [key for key in self._peers if key[0] == link]
            dropped = [self._peers.pop(key) for key in keys]
        for peer in dropped:
            peer.close()

    def stop(self) -> None:
        """Close all senders; none will open. Any thread may call, any number of times."""
        with self._lock:
            self._is_stopped = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
