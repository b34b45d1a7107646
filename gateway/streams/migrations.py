"""Migrations: a running stream moves to another decode worker, without a replay.

1. An operator orders a move, or a decode worker drains. At most MAX_MIGRATIONS streams move at once.
2. The stream's next attempt is submitted as a `Migration`, while the present attempt runs on. The router
   chooses a decode worker, which fetches the pages of the running attempt.
3. `prepared`: that worker has the pages. It takes over after the last token of the log, the former attempt is
   cancelled, and the stream is at the new attempt.
4. `give_up`: any failure before the switch ends the migration alone, and the stream stays at its worker.

The log decides which tokens the client has: tokens of the former worker count until the switch and not after
it, and the new worker computes them again. A worker that is lost after the switch is lost as any other.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from baton.clock import Clock
from baton.errors import WireError
from baton.gateway.streams.request_stream import MIGRATED, Migration, RequestStream, StreamState
from baton.gateway.streams.routers import AttemptReports
from baton.messages.bounds import MAX_REASON_CHARS, Kind
from baton.messages.control import AttemptFailed, Cancel, Prepared, Routed, Submit, TakeOver, age_s
from baton.messages.operations import Migrate, Migrated
from baton.messages.workers import WorkerRole
from baton.request import AttemptKey
from baton.rpc.peers import Peer, PeerRegistry

MAX_MIGRATIONS: Final = 4  # at once, of one gateway: each copies the pages of a whole context
MAX_MIGRATION_S: Final = 60.0  # until a stream has its turn, and again until its pages are there
RETRY_S: Final = 1.0  # of a stream at a draining worker; twice as long after each failure
MAX_RETRY_S: Final = 16.0


class OrderedMoves:
    """The moves of one operator's order, which is answered when all of them have ended."""

    def __init__(
        self, order: Migrate, request_ids: Iterable[str], answer: Callable[[Migrated], None]
    ) -> None:
        self.order = order
        self._answer = answer
        self._open = set(request_ids)
        self._num_moved = self._num_left = 0
        self._reason = "it does not run" if order.request_id and not self._open else ""
        self._tell_if_over()

    def ended(self, request_id: str, reason: str = "") -> None:
        """Count the end of a move. reason: why the request stays; "": it has moved."""
        if request_id in self._open:
            self._open.remove(request_id)
            self._num_moved += not reason
            self._num_left += bool(reason)
            self._reason = reason or self._reason
            self._tell_if_over()

    def _tell_if_over(self) -> None:
        if not self._open:
            self._answer(
                Migrated.answer_to(
                    self.order,
                    num_moved=self._num_moved,
                    num_left=self._num_left,
                    reason=self._reason[:MAX_REASON_CHARS],
                )
            )


class Migrations:
    """The migrations of one gateway's streams."""

    def __init__(
        self,
        streams: Mapping[str, RequestStream],
        stop_attempt: Callable[[RequestStream], None],
        peer_registry: PeerRegistry,
        reports: AttemptReports,
        clock: Clock,
        counters: Counter[str],
    ) -> None:
        """streams: the open ones, by request id. stop_attempt: at its worker, and at the router."""
        self._streams = streams
        self._stop_attempt = stop_attempt
        self._peer_registry = peer_registry
        self._reports = reports
        self._clock = clock
        self._counters = counters
        self._wanted: dict[str, float] = {}  # moves that wait for their turn, and since when; by request id
        self._running: dict[str, RequestStream] = {}  # with a migration, by request id
        self._moves: dict[str, OrderedMoves] = {}  # of those that an operator has ordered, by request id

    def order(self, order: Migrate, answer: Callable[[Migrated], None]) -> None:
        """Move the streams of an operator's order; `answer` is called once, when all have moved or stay."""
        found = [
            stream.request_id
            for stream in self._streams.values()
            if stream.request_id == order.request_id or (order.worker and stream.decode == order.worker)
        ]
        moves, now_s = OrderedMoves(order, found, answer), self._clock.now_s()
        for request_id in found:
            if request_id in self._running or request_id in self._wanted:
                moves.ended(request_id, "it is about to move already")
            else:
                self._wanted[request_id], self._moves[request_id] = now_s, moves
        self._begin_wanted()

    def tick(self, draining: Collection[str]) -> None:
        """Give up what takes too long, and have streams leave draining workers."""
        now_s = self._clock.now_s()
        for stream in list(self._running.values()):
            if stream.migration is not None and now_s - stream.migration.since_s > MAX_MIGRATION_S:
                self.give_up(stream, f"its pages were not there in {MAX_MIGRATION_S:.0f} s")
        for request_id, since_s in list(self._wanted.items()):
            if now_s - since_s > MAX_MIGRATION_S:
                self._forget_wanted(request_id, f"it had no turn in {MAX_MIGRATION_S:.0f} s")
        self._leave(draining, now_s)
        self._begin_wanted()

    def routed(self, router: Peer, routed: Routed) -> bool:
        """Take the worker of a migration; False when no stream has this attempt as its migration."""
        stream = self._migrating(routed.key)
        if stream is None or stream.migration is None:
            return False
        stream.migration.routed, stream.migration.router_clock = routed, router.clock_offset
        self._cancel(routed.key, stream.migration.prepared - {routed.decode})
        if self._peer_registry.peer(routed.decode) is None:
            self.give_up(stream, "its new worker is not connected")
        else:
            self._take_over(stream, stream.migration)
        return True

    def rejected(self, key: AttemptKey, reason: str) -> None:
        """End a migration that the router has rejected."""
        stream = self._migrating(key)
        if stream is not None:
            self.give_up(stream, reason)

    def failed(self, peer: Peer, failed: AttemptFailed) -> None:
        """End a migration that its new worker, or the router, says has failed."""
        stream = self._migrating(failed.key)
        migration = None if stream is None else stream.migration
        if stream is None or migration is None:
            return
        if peer.hello.process is not Kind.WORKER or migration.decode in ("", peer.hello.id):
            self.give_up(stream, failed.reason)

    def prepared(self, peer: Peer, prepared: Prepared) -> None:
        """Have the new worker take over, or give the attempt up there if no stream waits for it.

        A Prepared may come before the Routed that names the worker: they come over different links.
        """
        stream, worker = self._migrating(prepared.key), peer.hello.id
        if stream is None or stream.migration is None or stream.migration.decode not in ("", worker):
            peer.send(Cancel(request_id=prepared.request_id, attempt=prepared.attempt))
            return
        stream.migration.prepared.add(worker)
        self._take_over(stream, stream.migration)

    def _take_over(self, stream: RequestStream, migration: Migration) -> None:
        """Have the new worker of a migration take over, once the router has named it and it is prepared."""
        if migration.decode not in migration.prepared:
            return
        now_s, stream.migration = self._clock.now_s(), None
        self._peer_registry.tell(
            migration.decode,
            TakeOver(
                request_id=stream.request_id,
                attempt=migration.attempt,
                token_ids=tuple(stream.log[migration.num_tokens :]),
            ),
        )
        self._stop_attempt(stream)
        stream.marks.ended(MIGRATED, stream.num_answered, now_s)
        stream.switch(migration, now_s)
        attempt = stream.marks.attempts[-1]
        attempt.routed, attempt.router_clock = migration.routed, migration.router_clock
        attempt.decode = self._peer_registry.name(stream.decode)
        self._counters["migrations"] += 1
        self._ended(stream)

    def give_up(self, stream: RequestStream, reason: str) -> None:
        """End the migration of a stream, if it has one; its present attempt continues."""
        migration, stream.migration = stream.migration, None
        if migration is None:
            return
        self._counters["migrations_given_up"] += 1
        stream.num_failed_migrations += 1
        wait_s = min(MAX_RETRY_S, RETRY_S * 2 ** (stream.num_failed_migrations - 1))
        stream.migrates_after_s = self._clock.now_s() + wait_s
        key = (stream.request_id, migration.attempt)
        self._cancel(key, {migration.decode} | migration.prepared)
        self._reports.ended(migration.router, key, 0)
        self._ended(stream, reason)

    def _cancel(self, key: AttemptKey, workers: Iterable[str]) -> None:
        """End an attempt at workers that hold pages for it."""
        for worker in workers:
            self._peer_registry.tell(worker, Cancel(request_id=key[0], attempt=key[1]))

    def forget(self, stream: RequestStream) -> None:
        """End the migration of a stream that has ended."""
        self._forget_wanted(stream.request_id, "it has ended")
        self.give_up(stream, "it has ended")

    def lose_worker(self, worker: str) -> None:
        """Give up the migrations to a worker that is not connected any more."""
        for stream in list(self._running.values()):
            if stream.migration is None:
                continue
            stream.migration.prepared.discard(worker)
            if stream.migration.decode == worker:
                self.give_up(stream, "its new worker is gone")

    def lose_router(self, router: str) -> None:
        """Give up the migrations that a router has not answered."""
        for stream in list(self._running.values()):
            migration = stream.migration
            if migration is not None and migration.router == router and migration.routed is None:
                self.give_up(stream, "its router is gone")

    def _leave(self, draining: Collection[str], now_s: float) -> None:
        """Queue moves of the streams at draining workers, if another decode worker takes work."""
        decoders = self._peer_registry.of_role(WorkerRole.DECODE)
        if not any(each in draining for each in decoders) or all(each in draining for each in decoders):
            return
        for request_id, stream in self._streams.items():
            if (
                stream.decode in draining
                and stream.is_decoding
                and now_s >= stream.migrates_after_s
                and request_id not in self._running
            ):
                self._wanted.setdefault(request_id, now_s)

    def _begin_wanted(self) -> None:
        for request_id in list(self._wanted):
            if len(self._running) >= MAX_MIGRATIONS:
                return
            if request_id not in self._wanted:
                continue  # the end of another move has begun it
            stream = self._streams[request_id]  # `forget` has removed all others
            if stream.state is StreamState.ROUTED and stream.is_decoding:
                del self._wanted[request_id]
                self._begin(stream)

    def _begin(self, stream: RequestStream) -> None:
        """Submit the next attempt of a stream while the present one runs."""
        router = self._peer_registry.router_for(stream.request.tenant)
        request = stream.request_of(stream.last_attempt + 1)
        moves = self._moves.get(stream.request_id)
        to = moves.order.to if moves is not None else ""
        reason = "no router is connected" if router is None else ""
        if request is None:
            reason = "its tokens are too many for one message"
        if to and to == stream.decode:
            reason = "it runs there already"
        if reason or router is None or request is None:
            self._end_move(stream.request_id, reason)
            return
        now_s = self._clock.now_s()
        submit = Submit(
            request=request,
            sticky_worker=to,
            age_s=age_s(request, now_s),
            avoid=tuple(stream.avoid),
            is_begun=True,
            migrates_from=stream.decode,
        )
        self._reports.flush()
        stream.migrate(router.hello.id, now_s)
        self._running[stream.request_id] = stream
        try:
            router.send(submit)
        except WireError as error:
            self.give_up(stream, str(error))

    def _ended(self, stream: RequestStream, reason: str = "") -> None:
        del self._running[stream.request_id]
        self._end_move(stream.request_id, reason)
        self._begin_wanted()

    def _forget_wanted(self, request_id: str, reason: str) -> None:
        if self._wanted.pop(request_id, None) is not None:
            self._end_move(request_id, reason)

    def _end_move(self, request_id: str, reason: str) -> None:
        """Count the end of a move for the order that wants it. reason: see OrderedMoves.ended."""
        moves = self._moves.pop(request_id, None)
        if moves is not None:
            moves.ended(request_id, reason)

    def _migrating(self, key: AttemptKey) -> RequestStream | None:
        """Return the stream that has this attempt as its migration."""
        stream = self._running.get(key[0])
        if stream is None or stream.migration is None or stream.migration.attempt != key[1]:
            return None
        return stream
