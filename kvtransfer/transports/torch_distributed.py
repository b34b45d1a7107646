"""Page bytes through torch.distributed: gloo between CPUs, NCCL between GPUs.

1. The source connects to the destination's listener. Both prove that they hold the key of page links. The
   source says which rank it is and how its pages are cut; the destination agrees or refuses.
2. Over that connection the two form a process group of their own (kvtransfer/transports/rank_pair.py). Each
   end does so in a thread, because a thread that waits in torch for a peer cannot be stopped.
3. A piece is cut into parts. The sending thread packs a part into a slot and starts its message. The
   destination's thread receives the message into staging memory, so a source that stops in the middle has
   written no page. It unpacks the bytes into the pages that the registration of the transfer names, or drops
   the bytes where the registration admits no writer, and answers.
4. The answering thread of the source waits for each answer in turn. An answer finishes its part, or fails the
   part where the destination refused it, and frees the slot.
5. A peer that is gone breaks the pair at once, one that is silent after `stall_s`: all pieces fail and the
   group is aborted. A wrong record ends the destination's pair. Other pairs are unaffected.
"""

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from queue import SimpleQueue
from typing import Annotated, Final, NamedTuple, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses, exceeds_limits
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transports.base import LocalRank, Part, QueueSender
from baton.kvtransfer.transports.listener import Listener, decode_greeting, listen, port_of
from baton.kvtransfer.transports.pages import DevicePages, PagePacking
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
    part_bytes,
    payload_bytes,
    staging,
    translated,
)
from baton.kvtransfer.transports.records import (
    PartHeader,
    WriteOutcome,
    decode_answer,
    decode_header,
    encode_answer,
    encode_header,
    stream_key,
)
from baton.messages.bounds import schema_hash
from baton.pages import PageLayout
from baton.rpc.auth import Role
from baton.rpc.connection import Connection

logger = logging.getLogger(__name__)
MAX_PAIRS: Final = 256  # of one destination rank; each has NUM_SLOTS payloads of staging memory


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time limits of both ends of a pair."""

    connect_s: float = 10.0  # for both ranks to join
    stall_s: float = 5.0  # without an answer


class PairRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source to destination: form a pair with this rank.

    gloo ends a process that is sent more than it has made room for, so the two agree on `payload_bytes`, the
    most that a message has.
    """

    transport: Annotated[str, Meta(max_length=16)]
    layout: PageLayout
    rank: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    payload_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class PairReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destination to source: an empty refusal lets the source join."""

    refusal: Annotated[str, Meta(max_length=512)] = ""


PAIR_SCHEMA: Final = schema_hash(PairRequest, PairReply, StoreEntry)


class GroupTransport(ABC):
    """The common part of gloo and NCCL."""

    name: str
    is_automatic: bool
    device: str  # of both ranks
    part_bytes: int  # as a rule; smaller parts wait longer for each other than they travel

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
    part_bytes = 8 * 2**20

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        return GlooChannel(join_gloo(store, rank, host, timeout_s), 1 - rank, staging(num_bytes))


class NcclTransport(GroupTransport):
    """Serves GPU ranks where torch has NCCL."""

    name = "nccl"
    is_automatic = True
    device = "cuda"
    # A part costs a record and an answer over gloo, some 0.1 ms; at 200 GB/s this part travels 0.17 ms.
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

    Both ends know the payload's length before NCCL moves it. The work of NCCL is ordered by the packing's
    stream.
    """

    def __init__(
        self, group: PairGroup, bulk: PairGroup, peer: int, num_bytes: int, packing: DevicePages
    ) -> None:
        """group: of gloo. bulk: of NCCL. num_bytes: the most that a payload has."""
        super().__init__(group, peer, [packing.staging(num_bytes) for _ in range(NUM_SLOTS)])
        self._bulk = bulk
        self._bulk_work: list[Work | None] = [None] * NUM_SLOTS
        self._packing = packing

    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        payload = self.payload(slot, num_bytes)
        with translated("nccl"), torch.cuda.stream(self._packing.stream):
            work = self._bulk_work[slot] = self._bulk.recv([payload], self._peer, 0)
            work.wait()  # blocks the stream, not this thread
        self._packing.finish(timeout_s)  # nothing is enqueued behind a receive that may never end
        return payload

    def connect(self, rank: int, timeout_s: float) -> None:
        """Exchange a first message: NCCL fails to connect here, not in the middle of a transfer."""
        if rank == SOURCE:
            with translated("nccl"), torch.cuda.stream(self._packing.stream):
                self._bulk.send([self.payload(0, 1)], self._peer, 0).wait()
            self._packing.finish(timeout_s)
        else:
            self.fetch(0, 1, timeout_s)

    def abort(self) -> None:
        super().abort()
        with contextlib.suppress(RuntimeError):  # the group may have ended already
            self._bulk.abort()

    def _send_payload(self, slot: int, num_bytes: int) -> None:
        with translated("nccl"), torch.cuda.stream(self._packing.stream):
            self._bulk_work[slot] = self._bulk.send([self.payload(slot, num_bytes)], self._peer, 0)

    def _post_payload(self, slot: int) -> None:
        """Nothing to post: NCCL receives in `fetch`, which knows the payload's length."""


# The source.


class _Sent(NamedTuple):
    """A message that has not been answered yet."""

    slot: int
    part: Part
    gather_s: float


class GroupSender(QueueSender):
    """A `Sender` from one source rank to one destination rank."""

    def __init__(
        self,
        transport: GroupTransport,
        rank: LocalRank,
        peer: PeerRank,
        settings: GroupSettings | None = None,
    ) -> None:
        self._plan = plan_transfer(rank.layout, peer.layout, rank.rank, peer.rank)
        super().__init__(rank, part_bytes(self._plan, transport.part_bytes), 1)
        self._transport = transport
        self._name = transport.name
        self._address = peer.host, port_of(peer.listeners.addresses[transport.name])
        self._settings = settings or GroupSettings()
        self._key = b""  # of the records
        self._channel: GlooChannel | None = None
        self._joined: Future[GlooChannel] = Future()
        self._free: SimpleQueue[int | None] = SimpleQueue()  # slots; None: there will be no more
        self._sent: SimpleQueue[_Sent | None] = SimpleQueue()
        loops = (self._send_parts, self._read_answers)
        self._threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in loops]

    def open(self) -> None:
        threading.Thread(target=self._join, name=f"{self._name}-join", daemon=True).start()
        self._channel = self._joined.result()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
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

    def _join(self) -> None:
        """In a thread of its own, which `close` does not wait for."""
        settings = self._settings
        try:
            connection = self._connect()
            self._key = stream_key(connection.session_key)
            with contextlib.closing(PairStore(connection, settings.connect_s)) as store:
                channel = self._transport.join(
                    store,
                    SOURCE,
                    self._rank.host,
                    self._packing,
                    payload_bytes(self._plan, self._transport.part_bytes),
                    settings.connect_s,
                )
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                self._joined.set_exception(error)
            return
        try:
            self._joined.set_result(channel)
        except InvalidStateError:  # closed meanwhile
            channel.close()

    def _connect(self) -> Connection:
        """A connection over which the destination has agreed to form a pair, else TransferFailed."""
        rank, timeout_s = self._rank, self._settings.connect_s
        request = PairRequest(
            transport=self._name,
            layout=rank.layout,
            rank=rank.rank,
            payload_bytes=payload_bytes(self._plan, self._transport.part_bytes),
        )
        host, port = self._address
        connection: Connection | None = None
        try:
            sock = socket.create_connection(self._address, timeout_s)
            connection = rank.connection(sock, Role.CONNECTING, PAIR_SCHEMA)
            connection.handshake(timeout_s)
            connection.send(msgspec.msgpack.encode(request))
            reply = decode_greeting(connection.recv(timeout_s), PairReply, "pair")
            if reply.refusal:
                raise TransferFailed(reply.refusal)
        except (OSError, BatonError) as error:
            if connection is not None:
                connection.close()
            raise TransferFailed(f"{self._name} {host}:{port}: {error}") from error
        return connection

    def _run(self, loop: Callable[[GlooChannel], None]) -> None:
        assert self._channel is not None
        try:
            loop(self._channel)
        except BatonError as error:
            self._break(f"{self._name}: {error}")
        except BaseException as error:
            self._break(f"{self._name}: {error!r}")
            raise

    def _break(self, reason: str) -> None:
        """Fail all pieces, now and later, and end both threads."""
        self._queue.break_off(reason)
        with contextlib.suppress(InvalidStateError):
            self._joined.set_exception(TransferFailed(f"{self._name}: {reason}"))
        if self._channel is not None:
            self._channel.abort()
        self._free.put(None)
        self._sent.put(None)

    def _send_parts(self, channel: GlooChannel) -> None:
        num_sent = 0
        while (slot := self._free.get()) is not None:
            part = self._queue.take(wait=True)
            if part is None:
                return
            gather_s = self._pack(channel.payload(slot, part.num_bytes), part)
            transfer = part.transfer
            header = PartHeader(transfer.id, transfer.epoch, part.first, part.stop, part.num_bytes)
            channel.send(slot, encode_header(self._key, num_sent, header), part.num_bytes)
            self._sent.put(_Sent(slot, part, gather_s))
            num_sent += 1

    def _pack(self, payload: Tensor, part: Part) -> float:
        """Copy a part out of its pages, and leave the pages; the seconds that this took."""
        transfer, clock = part.transfer, self._rank.clock
        begun_s = clock.now_s()
        try:
            offset_N = transfer.plan.source.offsets(part.first, part.stop, transfer.source_pages)
            self._packing.pack(transfer.plan, offset_N, payload)
            self._packing.finish()
        finally:
            self._queue.leave(part)
        return clock.now_s() - begun_s

    def _read_answers(self, channel: GlooChannel) -> None:
        num_answered = 0
        while (sent := self._sent.get()) is not None:
            record = channel.receive_answer(sent.slot, self._settings.stall_s)
            outcome = decode_answer(self._key, num_answered, record)
            num_answered += 1
            self._free.put(sent.slot)
            if outcome == WriteOutcome.WRITTEN:
                self._queue.finish(sent.part, 1, sent.gather_s)
            else:
                self._queue.fail(sent.part, "the destination has ended the transfer")


# The destination.


class GroupListener:
    """A `TransportListener`. Each source forms a pair with the rank."""

    def __init__(
        self, transport: GroupTransport, rank: LocalRank, settings: GroupSettings | None = None
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._settings = settings or GroupSettings()
        listener = listen(rank.host)
        self.address = str(listener.getsockname()[1])
        self._acceptor = Listener(listener, self._greet, transport.name, rank.dropped)

    def close(self) -> None:
        self._acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        """Form a pair with a source that proves itself, and serve it; called in a thread for this source."""
        rank, timeout_s = self._rank, self._settings.connect_s
        try:
            connection = rank.connection(sock, Role.ACCEPTING, PAIR_SCHEMA)
        except OSError as error:  # the peer has left already
            logger.info("a source has formed no pair: %s", error)
            sock.close()
            return
        try:
            connection.handshake(timeout_s)
            pair = self._form_pair(sock, connection, self._receive_request(connection))
        except (BatonError, TimeoutError, OSError, RuntimeError) as error:  # CUDA raises RuntimeError
            logger.warning("a source has formed no pair: %s", error)
            if isinstance(error, TransferFailed):
                with contextlib.suppress(BatonError, TimeoutError):
                    connection.send(msgspec.msgpack.encode(PairReply(refusal=str(error)[:512])))
            connection.close()
            return
        pair.run()

    def _receive_request(self, connection: Connection) -> PairRequest:
        try:
            request = decode_greeting(connection.recv(self._settings.connect_s), PairRequest, "pair")
            if exceeds_limits(request.layout):
                raise WireError(f"a layout beyond all models: {request.layout}", reason="pair")
        except WireError as error:
            raise connection.drop(error) from None
        return request

    def _form_pair(self, sock: socket.socket, connection: Connection, request: PairRequest) -> "ReceivePair":
        """Return the pair. Raises TransferFailed, for the source to read, when the ranks cannot form one."""
        rank, name = self._rank, self._transport.name
        try:
            plan = plan_transfer(request.layout, rank.layout, request.rank, rank.rank)
        except (ValueError, BatonError) as error:
            raise TransferFailed(str(error)) from error
        if request.transport != name:
            raise TransferFailed(f"this is a listener of {name}")
        num_bytes = payload_bytes(plan, self._transport.part_bytes)
        if num_bytes != request.payload_bytes:
            raise TransferFailed(f"messages of {num_bytes} bytes here, of {request.payload_bytes} there")
        pair = ReceivePair(self._transport, rank, self._settings, plan, connection)
        if not self._acceptor.keep(sock, pair.stop, MAX_PAIRS):
            raise TransferFailed(f"{name}: no more than {MAX_PAIRS} pairs at once")
        return pair


class ReceivePair:
    """One source rank at the destination; one thread runs it."""

    def __init__(
        self,
        transport: GroupTransport,
        rank: LocalRank,
        settings: GroupSettings,
        plan: TransferPlan,
        connection: Connection,
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._settings = settings
        self._plan = plan
        self._num_bytes = payload_bytes(plan, transport.part_bytes)
        self._connection = connection
        self._key = stream_key(connection.session_key)
        self._packing = rank.packing()  # of its own: a stalled source holds up no other source
        self._lock = threading.Lock()
        self._channel: GlooChannel | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """From any thread: the pair's thread ends soon."""
        with self._lock:
            self._is_stopped = True
            channel = self._channel
        self._connection.close()
        if channel is not None:
            channel.abort()

    def run(self) -> None:
        """Serve the source until it is gone or breaks a rule."""
        name = self._transport.name
        try:
            self._serve(self.join())
        except WireError as error:
            self._rank.dropped.add(error.reason)
            logger.warning("a %s pair was dropped: %s", name, error)
        except BatonError as error:
            logger.info("a %s pair ended: %s", name, error)
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
                store, DESTINATION, self._rank.host, self._packing, self._num_bytes, timeout_s
            )
        with self._lock:
            self._channel = channel
            if self._is_stopped:
                raise TransferFailed("the listener was closed while the source joined")
        return channel

    def _serve(self, channel: GlooChannel) -> None:
        for slot in range(NUM_SLOTS):
            channel.post(slot)
        num_received = 0
        while True:
            slot = num_received % NUM_SLOTS
            header = decode_header(self._key, num_received, channel.receive(slot))
            if header.num_bytes > self._num_bytes:
                raise WireError(f"a part of {header.num_bytes} bytes exceeds the message", reason="length")
            self._receive_part(channel, slot, num_received, header)
            num_received += 1

    def _receive_part(self, channel: GlooChannel, slot: int, number: int, header: PartHeader) -> None:
        registrations, stall_s = self._rank.registrations, self._settings.stall_s
        payload = channel.fetch(slot, header.num_bytes, stall_s)
        writing = registrations.begin(
            header.transfer, header.epoch, header.first, header.stop, header.num_bytes
        )
        is_whole = False
        try:
            if writing is not None:
                self._packing.unpack(writing.registration.plan, writing.offsets(), payload)
                self._packing.finish()
            channel.post(slot)
            outcome = WriteOutcome.REFUSED if writing is None else WriteOutcome.WRITTEN
            channel.answer(slot, encode_answer(self._key, number, outcome), stall_s)
            is_whole = True
        finally:
            if writing is not None:
                registrations.end(writing, is_whole=is_whole)
