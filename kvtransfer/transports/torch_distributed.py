"""Page bytes through torch.distributed, at the source: gloo between CPUs, NCCL between GPUs.

1. `open` meets the destination rank: a process group of the two, which nobody else is part of. A thread does
   it, for torch lets nobody out who waits for a peer; whoever opens goes when the transport is closed.
2. A piece is cut into parts of some MiB. The sending thread packs a part into a slot and starts its message.
3. The answering thread waits for each answer in turn; it makes the part finished, or failed where the
   destination refused it, and the slot free.
4. A peer that is gone breaks the pair at once, one that is silent after `stall_s`: all its pieces fail and
   the group is aborted. A new transport with a new meeting takes its place; other pairs never notice.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Final

import msgspec
from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.ranks.pages import PageMemory, packing_of
from baton.kvtransfer.transports.base import OnEnd, Part, Piece, TransferProgress, TransferQueue, offsets_of
from baton.kvtransfer.transports.rank_pair import (
    NUM_SLOTS,
    PART_BYTES,
    SOURCE,
    GroupName,
    GroupSettings,
    PairChannel,
    join_pair,
)
from baton.kvtransfer.transports.rendezvous import Rendezvous, reach
from baton.kvtransfer.transports.tcp_streams import PartHeader, WriteOutcome, decode_answer, encode_header


class _Sent(msgspec.Struct, frozen=True):
    """A message that has not been answered yet."""

    slot: int
    part: Part
    gather_s: float


class GroupTransport:
    """From one source rank to one destination rank."""

    def __init__(
        self,
        name: GroupName,
        meet: Callable[[], Rendezvous],
        pool: Tensor | PageMemory,
        plan: TransferPlan,
        *,
        settings: GroupSettings | None = None,
        clock: Clock | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        """meet: called by `open`; the destination expects this rank then (see
        kvtransfer/transports/group_receiver.py).

        pool: the source's, contiguous [num_pages, ...]. plan: of all transfers between the two ranks.
        """
        self.name: str = name
        self._group_name: Final = name
        self._meet = meet
        self._key = b""  # of the records
        self._packing = packing_of(pool)
        self._plan = plan
        self._settings = settings or GroupSettings()
        self._clock = clock or SystemClock()
        self._transfer_queue = TransferQueue(PART_BYTES, 1, self._clock, on_end)
        self._channel: PairChannel | None = None
        self._meeting_up: Future[PairChannel] = Future()
        self._free: SimpleQueue[int | None] = SimpleQueue()  # slots; None: there will be no more
        self._sent: SimpleQueue[_Sent | None] = SimpleQueue()
        loops = (self._send_parts, self._read_answers)
        self._threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in loops]

    def open(self) -> None:
        threading.Thread(target=self._meet_up, name=f"{self.name}-meet", daemon=True).start()
        self._channel = self._meeting_up.result()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        for thread in self._threads:
            thread.start()

    def push(self, piece: Piece) -> int:
        pages = piece.transfer.source_pages
        if pages and not 0 <= min(pages) <= max(pages) < self._packing.num_pages:
            raise ValueError(f"the pool has {self._packing.num_pages} pages: {pages}")
        self._packing.note_written()
        return self._transfer_queue.push(piece)

    @property
    def is_broken(self) -> bool:
        return self._transfer_queue.end_reason is not None

    def poll(self, handle: int) -> TransferProgress:
        return self._transfer_queue.poll(handle)

    def forget(self, handle: int) -> None:
        self._transfer_queue.forget(handle)

    def abort(self, transfer: bytes) -> None:
        self._transfer_queue.abort(transfer)

    def close(self) -> None:
        self._break("the transport was closed")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._channel = None

    def _meet_up(self) -> None:
        try:
            meeting = self._meet()
            self._key = meeting.record_key
            with contextlib.closing(reach(meeting, self._settings.connect_s, self.name)) as store:
                channel = join_pair(
                    self._group_name, store, SOURCE, self._packing, self._plan, self._settings
                )
        except Exception as error:
            self._settle_meeting(error)
        else:
            if not self._settle_meeting(channel):
                channel.abort()

    def _settle_meeting(self, outcome: PairChannel | Exception) -> bool:
        """Whether this is the outcome: the first one is."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self._meeting_up.set_exception(outcome)
            else:
                self._meeting_up.set_result(outcome)
            return True
        return False

    def _run(self, loop: Callable[[PairChannel], None]) -> None:
        assert self._channel is not None
        try:
            loop(self._channel)
        except BatonError as error:
            self._break(f"{self.name}: {error}")
        except BaseException as error:
            self._break(f"{self.name}: {error!r}")
            raise

    def _break(self, reason: str) -> None:
        """Fail everything, now and later, and have both threads end."""
        self._transfer_queue.break_off(reason)
        self._settle_meeting(TransferFailed(f"{self.name}: {reason}"))
        if self._channel is not None:
            self._channel.abort()
        self._free.put(None)
        self._sent.put(None)

    def _send_parts(self, channel: PairChannel) -> None:
        num_sent = 0
        while (slot := self._free.get()) is not None:
            part = self._transfer_queue.take(wait=True)
            if part is None:
                return
            gather_s = self._pack(channel.payload(slot, part.num_bytes), part)
            transfer = part.handle.piece.transfer
            header = PartHeader(transfer.id, transfer.epoch, part.first, part.stop, part.num_bytes)
            record = encode_header(self._key, num_sent, header)
            channel.send(slot, record, part.num_bytes)
            self._sent.put(_Sent(slot, part, gather_s))
            num_sent += 1

    def _pack(self, payload: Tensor, part: Part) -> float:
        """Copy a part out of its pages, and leave them; the seconds that it took."""
        transfer, begun_s = part.handle.piece.transfer, self._clock.now_s()
        try:
            offset_N = offsets_of(transfer.plan.source, part.first, part.stop, transfer.source_pages)
            self._packing.pack(transfer.plan, offset_N, payload)
            self._packing.finish()
        finally:
            self._transfer_queue.leave(part)
        return self._clock.now_s() - begun_s

    def _read_answers(self, channel: PairChannel) -> None:
        num_answered = 0
        while (sent := self._sent.get()) is not None:
            record = channel.receive_answer(sent.slot, self._settings.stall_s)
            outcome = decode_answer(self._key, num_answered, record)
            num_answered += 1
            self._free.put(sent.slot)
            if outcome == WriteOutcome.WRITTEN:
                self._transfer_queue.finish(sent.part, 1, sent.gather_s)
            else:
                self._transfer_queue.fail(sent.part, "the destination has ended the transfer")
