"""Page bytes through torch.distributed: gloo between CPUs, NCCL between GPUs.

1. The source connects to the destination's listener. Both prove that they hold the key of page links. The
   source names the largest size of a message; the destination agrees or refuses.
2. Over that connection the two form a process group of their own (kvtransfer/transports/rank_pair.py). Each
   end does so in a thread of its own: a thread that waits in torch for a peer cannot be stopped.
3. A piece is cut into parts. The sending thread takes the parts that wait, of any transfers, as one batch:
   a record announces them, then it packs each part into a slot and starts its payload. Over NCCL the parts of
   a batch are packed, moved and unpacked on several CUDA streams, the lanes, part p on lane p % num_lanes.
4. The destination's thread receives each part into staging memory, so a source that stops in the middle of a
   part has written no page of it. It unpacks the part into the pages that the registration of its transfer
   names, or drops the part where the registration admits no writer. One answer has the outcomes of a batch.
5. The answering thread of the source waits for each answer in turn. An answer finishes the batch's parts, or
   fails those that the destination refused, and frees their slots.
6. A peer that is gone breaks the pair at once, a silent peer breaks it after `stall_s`: all pieces fail and
   the group is aborted. A wrong record ends the destination's pair. Other pairs are unaffected.
"""

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Annotated, Final, NamedTuple, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.base import LocalRank, Part, QueueSender
from baton.kvtransfer.transports.pages import DevicePages, PagePacking, on_stream
from baton.kvtransfer.transports.rank_pair import (
    DESTINATION,
    FOREVER,
    NUM_SLOTS,
    SOURCE,
    GlooChannel,
    PairGroup,
    PairStore,
    StoreEntry,
    Work,
    join_gloo,
    part_size,
    staging,
    translated,
)
from baton.kvtransfer.transports.records import (
    MAX_BATCH,
    MAX_PART_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answers,
    decode_headers,
    encode_answers,
    encode_headers,
    stream_key,
)
from baton.messages.bounds import schema_hash
from baton.messages.codec import decode_as
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from baton.rpc.listener import Listener, listen, log_end, port_of

logger = logging.getLogger(__name__)
MAX_PAIRS: Final = 256  # of one destination rank; each has NUM_SLOTS parts of staging memory


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time limits of both ends of a pair."""

    connect_s: float = 10.0  # for both ranks to join
    stall_s: float = 5.0  # without an answer


class PairRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source to destination: form a pair with this rank.

    gloo ends a process that is sent more than it has made room for.
    """

    payload_bytes: Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]  # of the largest message


class PairReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destination to source: an empty refusal lets the source join."""

    refusal: Annotated[str, Meta(max_length=512)] = ""


PAIR_SCHEMA: Final = schema_hash(PairRequest, PairReply, StoreEntry)


class GroupTransport(ABC):
    """The common part of gloo and NCCL."""

    name: str
    is_automatic: bool
    device: str  # of both ranks
    part_bytes = 8 * 2**20  # as a rule; smaller parts wait longer for each other than they travel

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return source.device == destination.device == self.device

    def listen(self, rank: LocalRank) -> "GroupListener | None":
        return GroupListener(self, rank) if rank.device == self.device else None

    def connect(self, rank: LocalRank, peer: PeerRank) -> "GroupSender":
        return GroupSender(self, rank, peer)

    @abstractmethod
    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        """Join the rank at the other end of the store. TransferFailed when that rank does not join in time.

        rank: SOURCE or DESTINATION. host: the address to listen on. num_bytes: the most that a payload has.
        """


class GlooTransport(GroupTransport):
    """Serves CPU ranks on request: shm and tcp are faster, and gloo's sockets have no key."""

    name = "gloo"
    is_automatic = False
    device = "cpu"

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        return GlooChannel(join_gloo(store, rank, host, timeout_s), 1 - rank, staging(num_bytes))


class NcclTransport(GroupTransport):
    """Serves GPU ranks where torch has NCCL."""

    name = "nccl"
    is_automatic = True
    device = "cuda"
    # A batch costs a record and an answer over gloo, some 0.1 ms; at 200 GB/s this part travels 0.17 ms.
    part_bytes = 32 * 2**20

    def listen(self, rank: LocalRank) -> "GroupListener | None":
        return super().listen(rank) if torch.distributed.is_nccl_available() else None

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        if not isinstance(packing, DevicePages):
            raise TransferFailed("nccl: the pages are not on a GPU")
        records, bulk = join_gloo(store, rank, host, timeout_s), join_nccl(store, rank, timeout_s)
        channel = NcclChannel(records, bulk, 1 - rank, num_bytes, packing)
        channel.connect(rank, timeout_s)
        return channel


def join_nccl(store: Store, rank: int, timeout_s: float) -> PairGroup:
    """Form an NCCL group of two, which connects with its first message. TransferFailed without NCCL.

    torch ends the process when one of its own deadlines passes. Baton's deadlines and `abort` come long
    before that. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 prevents torch from ending the process for a peer that died
    on another host: `config.prepare_nccl` sets it when an engine is loaded.
    """
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds
    except ImportError as error:
        raise TransferFailed("this build of torch has no NCCL") from error
    with translated("nccl"):
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = FOREVER
        prefixed = PrefixStore("nccl", store)
        prefixed.set_timeout(timedelta(seconds=timeout_s))
        return cast(PairGroup, ProcessGroupNCCL(prefixed, rank, 2, options))


class NcclChannel(GlooChannel):
    """A pair that moves payloads from GPU to GPU over NCCL, and records and answers over gloo.

    Both ends know a payload's length before NCCL moves it. NCCL sends what its lane has packed before. At the
    destination a lane waits for its payload, and the part is unpacked behind it, while NCCL receives the
    payloads of the other lanes.
    """

    def __init__(
        self, group: PairGroup, bulk: PairGroup, peer: int, num_bytes: int, packing: DevicePages
    ) -> None:
        """group: of gloo. bulk: of NCCL. num_bytes: the most that a payload has."""
        super().__init__(group, peer, [packing.staging(num_bytes) for _ in range(NUM_SLOTS)])
        self._bulk = bulk
        self._bulk_work: list[Work | None] = [None] * NUM_SLOTS
        self._packing = packing

    def connect(self, rank: int, timeout_s: float) -> None:
        """Exchange a first message: NCCL fails to connect here, not in the middle of a transfer."""
        if rank == SOURCE:
            with translated("nccl"), on_stream(self._packing.streams[0]):
                self._bulk.send([self.payload(0, 1)], self._peer, 0).wait()
            self._packing.finish(timeout_s)
        else:
            self.expect_payload(0, 1, 0)
            self.fetch_payload(0, 1, 0, timeout_s)

    def send_payload(self, part: int, num_bytes: int, lane: int) -> None:
        with translated("nccl"), on_stream(self._packing.streams[lane]):
            work = self._bulk.send([self.payload(part, num_bytes)], self._peer, 0)
        self._bulk_work[part % NUM_SLOTS] = work

    def post_payload(self, part: int) -> None:
        """Post nothing: NCCL receives in `expect_payload`, which knows the length."""

    def expect_payload(self, part: int, num_bytes: int, lane: int) -> None:
        with translated("nccl"), on_stream(self._packing.streams[lane]):
            work = self._bulk.recv([self.payload(part, num_bytes)], self._peer, 0)
            work.wait()  # blocks the lane, not this thread
        self._bulk_work[part % NUM_SLOTS] = work

    def fetch_payload(self, part: int, num_bytes: int, lane: int, timeout_s: float) -> Tensor:
        # Until this returns, nothing is enqueued on the lane: a receive may never end, and an unpack has to.
        self._packing.finish(timeout_s, lane)
        return self.payload(part, num_bytes)

    def abort(self) -> None:
        super().abort()
        with contextlib.suppress(RuntimeError):  # the group may have ended already
            self._bulk.abort()


# The source.


class _Sent(NamedTuple):
    """A batch that has not been answered yet."""

    first: int  # number of its first part
    parts: list[Part]


class GroupSender(QueueSender):
    """A `Sender` from one source rank to one destination rank."""

    def __init__(
        self,
        transport: GroupTransport,
        rank: LocalRank,
        peer: PeerRank,
        settings: GroupSettings | None = None,
    ) -> None:
        plan = plan_transfer(rank.settings.layout, peer.layout, rank.settings.rank, peer.rank)
        part_bytes = part_size(plan, transport.part_bytes)
        super().__init__(rank, part_bytes, 1, rank.settings.num_streams)
        self._payload_bytes = part_bytes + plan.sent_unit_bytes
        self._transport = transport
        self._name = transport.name
        self._address = peer.host, port_of(peer.listeners.addresses[transport.name])
        self._settings = settings or GroupSettings()
        self._key = b""  # of the records
        self._channel: GlooChannel | None = None
        self._freed: SimpleQueue[int] = SimpleQueue()  # numbers of slots; 0: there will be no more
        self._num_free = NUM_SLOTS  # the sending thread's
        self._sent: SimpleQueue[_Sent | None] = SimpleQueue()
        loops = (self._send_parts, self._read_answers)
        name = f"{transport.name}-source"
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True) for loop in loops
        ]

    def open(self) -> None:
        timeout_s, connection = self._settings.connect_s, self._connect()
        self._key = stream_key(connection.session_key)
        with contextlib.closing(PairStore(connection, timeout_s)) as store:
            self._channel = self._transport.join(
                store, SOURCE, self._rank.settings.host, self._packing, self._payload_bytes, timeout_s
            )
        if self.is_broken:
            raise TransferFailed(f"{self._name}: {self._queue.end_reason}")
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._break("the transport was closed")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _connect(self) -> Connection:
        """Return a connection over which the destination has agreed to form a pair.

        Raises TransferFailed when the destination refuses or cannot be reached.
        """
        rank, timeout_s = self._rank, self._settings.connect_s
        request = PairRequest(payload_bytes=self._payload_bytes)
        host, port = self._address
        connection: Connection | None = None
        try:
            sock = socket.create_connection(self._address, timeout_s)
            connection = rank.connect(sock, Role.CONNECTING, timeout_s, PAIR_SCHEMA)
            connection.send(msgspec.msgpack.encode(request))
            reply = connection.recv_message(lambda body: decode_as(PairReply, body, "pair"), timeout_s)
            if reply.refusal:
                raise TransferFailed(reply.refusal)
        except (OSError, BatonError) as error:
            if connection is not None:
                connection.close()
            raise TransferFailed(f"{self._name} {host}:{port}: {error}") from error
        return connection

    def _run(self, loop: Callable[[GlooChannel], None]) -> None:
        channel = self._channel
        try:
            if channel is not None:  # None: closed at once
                loop(channel)
        except BatonError as error:
            self._break(f"{self._name}: {error}")
        except BaseException as error:
            self._break(f"{self._name}: {error!r}")
            raise

    def _break(self, reason: str) -> None:
        """Fail all pieces, now and later, and end both threads."""
        self._queue.break_off(reason)
        if self._channel is not None:
            self._channel.abort()
        self._freed.put(0)
        self._sent.put(None)

    def _send_parts(self, channel: GlooChannel) -> None:
        num_batches = num_parts = 0
        while parts := self._take_batch():
            self._send_batch(channel, num_batches, num_parts, parts)
            self._sent.put(_Sent(num_parts, parts))
            num_batches += 1
            num_parts += len(parts)

    def _take_batch(self) -> list[Part]:
        """Return the next part, and the parts that wait behind it with a free slot; none after the end."""
        while not self._num_free or not self._freed.empty():
            num_freed = self._freed.get()
            if not num_freed:
                return []
            self._num_free += num_freed
        parts: list[Part] = []
        while len(parts) < min(MAX_BATCH, self._num_free):
            part = self._queue.take(wait=not parts)
            if part is None:
                break
            parts.append(part)
        self._num_free -= len(parts)
        return parts

    def _send_batch(self, channel: GlooChannel, batch: int, first: int, parts: list[Part]) -> None:
        """Announce, pack and send parts, and leave their pages."""
        packing = self._packing
        numbers, headers = range(first, first + len(parts)), [part.header for part in parts]
        num_packed = num_left = 0
        try:
            for index, part in enumerate(parts):
                while num_packed < min(index + packing.num_lanes, len(parts)):
                    number, next_part = numbers[num_packed], parts[num_packed]
                    num_packed += 1
                    self._pack(channel.payload(number, next_part.num_bytes), next_part, number)
                lane = numbers[index] % packing.num_lanes
                packing.finish(lane=lane)
                self._queue.leave(part)
                num_left += 1
                # After the first pack: a pack may wait for a step, and a peer gives up announced parts after
                # `stall_s`.
                if index == 0:
                    channel.send_record(batch, encode_headers(self._key, first, headers), numbers)
                channel.send_payload(numbers[index], part.num_bytes, lane)
        finally:
            try:
                for lane in range(packing.num_lanes if num_left < num_packed else 0):
                    packing.finish(lane=lane)
            finally:
                for part in parts[num_left:]:
                    self._queue.leave(part)
        channel.end_batch()

    def _pack(self, payload: Tensor, part: Part, number: int) -> None:
        """Start to copy a part out of its pages."""
        piece = part.piece
        offset_N = piece.plan.source.offsets(part.first, part.stop, piece.source_pages)
        self._packing.pack(piece.plan, offset_N, payload, number % self._packing.num_lanes)

    def _read_answers(self, channel: GlooChannel) -> None:
        num_answered = 0  # batches
        while (sent := self._sent.get()) is not None:
            numbers = range(sent.first, sent.first + len(sent.parts))
            record = channel.receive_answer(num_answered, numbers, self._settings.stall_s)
            outcomes = decode_answers(self._key, sent.first, record, len(sent.parts))
            num_answered += 1
            self._freed.put(len(sent.parts))
            for part, outcome in zip(sent.parts, outcomes, strict=True):
                self._queue.answered(part, outcome)


# The destination.


class GroupListener:
    """A `TransportListener`. Each source forms a pair with the rank."""

    def __init__(
        self, transport: GroupTransport, rank: LocalRank, settings: GroupSettings | None = None
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._settings = settings or GroupSettings()
        listener = listen(rank.settings.host)
        self.address = str(listener.getsockname()[1])
        self._acceptor = Listener(listener, self._greet, transport.name, rank.dropped)

    def close(self) -> None:
        self._acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        """Form a pair with a source that proves itself, and serve it; called in a thread for this source."""
        rank, settings = self._rank, self._settings
        connection = rank.connect(sock, Role.ACCEPTING, settings.connect_s, PAIR_SCHEMA)
        request = connection.recv_message(
            lambda body: decode_as(PairRequest, body, "pair"), settings.connect_s
        )
        try:
            pair = ReceivePair(self._transport, rank, settings, request.payload_bytes, connection)
        except RuntimeError as error:  # of CUDA
            raise TransferFailed(f"a source has formed no pair: {error}") from error
        if not self._acceptor.keep(sock, pair.stop, MAX_PAIRS):
            refusal = f"{self._transport.name}: no more than {MAX_PAIRS} pairs at once"
            connection.send(msgspec.msgpack.encode(PairReply(refusal=refusal)))
            raise TransferFailed(refusal)
        pair.run()


class ReceivePair:
    """One source rank at the destination; one thread runs it."""

    def __init__(
        self,
        transport: GroupTransport,
        rank: LocalRank,
        settings: GroupSettings,
        payload_bytes: int,
        connection: Connection,
    ) -> None:
        """payload_bytes: the most that a payload has."""
        self._transport = transport
        self._rank = rank
        self._settings = settings
        self._payload_bytes = payload_bytes
        self._connection = connection
        self._key = stream_key(connection.session_key)
        # Of its own: a stalled source holds up no other source.
        self._packing = rank.packing(rank.settings.num_streams)
        self._lock = threading.Lock()
        self._channel: GlooChannel | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End the pair's thread soon. Any thread may call."""
        with self._lock:
            self._is_stopped = True
            channel = self._channel
        self._connection.close()
        if channel is not None:
            channel.abort()

    def run(self) -> None:
        """Serve the source until it is gone or breaks a rule."""
        try:
            self._serve(self.join())
        except BatonError as error:
            if isinstance(error, WireError):
                self._rank.dropped.add(error.reason)
            log_end(f"a {self._transport.name} pair ended", error)
        except RuntimeError:  # of CUDA
            logger.exception("a %s pair failed", self._transport.name)
        finally:
            self.stop()
            if self._channel is not None:
                self._channel.close()

    def join(self) -> GlooChannel:
        """Tell the source that the pair can be formed, and form it."""
        timeout_s = self._settings.connect_s
        self._connection.send(msgspec.msgpack.encode(PairReply()))
        with contextlib.closing(PairStore(self._connection, timeout_s)) as store:
            channel = self._transport.join(
                store, DESTINATION, self._rank.settings.host, self._packing, self._payload_bytes, timeout_s
            )
        with self._lock:
            self._channel = channel
            if self._is_stopped:
                raise TransferFailed("the listener was closed while the source joined")
        return channel

    def _serve(self, channel: GlooChannel) -> None:
        for number in range(NUM_SLOTS):
            channel.post_record(number)
            channel.post_payload(number)
        num_batches = num_parts = 0
        while True:
            headers = decode_headers(self._key, num_parts, channel.receive_record(num_batches))
            channel.post_record(num_batches + NUM_SLOTS)
            largest = max(header.num_bytes for header in headers)
            if largest > self._payload_bytes:
                raise WireError(f"a part of {largest} bytes exceeds the message", reason="length")
            outcomes = self._receive_batch(channel, num_parts, headers)
            record = encode_answers(self._key, num_parts, outcomes)
            channel.answer(num_batches, record, self._settings.stall_s)
            num_batches += 1
            num_parts += len(headers)

    def _receive_batch(
        self, channel: GlooChannel, first: int, headers: tuple[PartHeader, ...]
    ) -> list[WriteOutcome]:
        """Receive parts and put them into their pages. A lane gets its next part once it has unpacked one."""
        num_lanes, stall_s = self._packing.num_lanes, self._settings.stall_s
        outcomes: list[WriteOutcome] = []
        num_expected = 0
        for index, header in enumerate(headers):
            while num_expected < min(index + num_lanes, len(headers)):
                number = first + num_expected
                channel.expect_payload(number, headers[num_expected].num_bytes, number % num_lanes)
                num_expected += 1
            number = first + index
            payload = channel.fetch_payload(number, header.num_bytes, number % num_lanes, stall_s)
            outcomes.append(self._write_part(payload, header, number % num_lanes))
            channel.post_payload(number + NUM_SLOTS)
        return outcomes

    def _write_part(self, payload: Tensor, header: PartHeader, lane: int) -> WriteOutcome:
        """Unpack a part that has arrived, if its registration admits it."""
        registrations = self._rank.registrations
        writing = registrations.begin(*header)
        if writing is None:
            return WriteOutcome.REFUSED
        is_whole = False
        try:
            self._packing.unpack(writing.registration.plan, writing.offsets(), payload, lane)
            self._packing.finish(lane=lane)
            is_whole = True
        finally:
            registrations.end(writing, is_whole=is_whole)
        return WriteOutcome.WRITTEN
