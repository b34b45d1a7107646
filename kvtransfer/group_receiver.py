"""Page bytes through torch.distributed, at the destination.

1. `invite` makes a meeting for one source rank and starts the pair's thread, which joins within a deadline.
2. The thread waits for a message, as long as it takes. Its bytes arrive in staging memory, so a source that
   stops in the middle has written no page.
3. The record says which units they are; where they go is for the landing to say, and for nobody else. They
   are unpacked into the pages, or left where the landing lets nobody in; then the answer.
4. A record that is not the one due, or a source that is gone, ends this pair and no other.
"""

import contextlib
import logging
import threading
from typing import Final

from torch import Tensor

from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.page_memory import PageMemory
from baton.kvtransfer.page_packing import packing_of
from baton.kvtransfer.pair import DESTINATION, GroupName, GroupSettings
from baton.kvtransfer.pair_channel import NUM_SLOTS, PairChannel, join_pair, payload_bytes
from baton.kvtransfer.rendezvous import Meeting, MeetingPlace
from baton.kvtransfer.tcp_receiver import OnWritten
from baton.kvtransfer.tcp_records import Outcome, PartHeader, decode_header, encode_answer
from baton.kvtransfer.transfer_plan import TransferPlan
from baton.wire import DroppedPeers

logger = logging.getLogger(__name__)

MAX_PAIRS: Final = 256  # each has some 40 MiB of staging memory


class GroupReceiver:
    """The pairs of one destination rank with any number of source ranks."""

    def __init__(
        self,
        name: GroupName,
        landings: Landings,
        pool: Tensor | PageMemory,
        *,
        settings: GroupSettings | None = None,
        dropped: DroppedPeers | None = None,
        on_written: OnWritten | None = None,
    ) -> None:
        """pool: the destination's, contiguous [num_pages, ...]."""
        self.name: GroupName = name
        self.landings = landings
        self.pool = pool
        self.settings = settings or GroupSettings()
        self.dropped = dropped or DroppedPeers()
        self.on_written = on_written
        self.place = MeetingPlace(self.settings.host, self.settings.connect_s, self.dropped)
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._is_closed = False

    def invite(self, plan: TransferPlan, secret: bytes) -> Meeting:
        """Expect one source rank that knows the secret. TransferFailed: too many pairs, or no thread."""
        pair = _Pair(self, plan, self.place.meeting(secret))
        try:
            with self._lock:
                if self._is_closed or len(self._pairs) >= MAX_PAIRS:
                    raise TransferFailed(f"{self.name}: no more than {MAX_PAIRS} pairs at once")
                pair.thread.start()
                self._pairs.add(pair)
        except (TransferFailed, RuntimeError) as error:
            self.place.cancel(pair.meeting)
            raise TransferFailed(str(error)) from error
        return pair.meeting

    def num_pairs(self) -> int:
        with self._lock:
            return len(self._pairs)

    def remove(self, pair: "_Pair") -> None:
        with self._lock:
            self._pairs.discard(pair)

    def close(self) -> None:
        """End all pairs; no page is written any more when it returns."""
        with self._lock:
            self._is_closed = True
            pairs = list(self._pairs)
        self.place.close()  # whoever waits there for a source waits no more
        for pair in pairs:
            pair.stop()
        for pair in pairs:
            pair.thread.join()


class _Pair:
    """One source rank, in a thread of its own."""

    def __init__(self, receiver: GroupReceiver, plan: TransferPlan, meeting: Meeting) -> None:
        self.meeting = meeting
        self.thread = threading.Thread(target=self._run, name=f"{receiver.name}-receive", daemon=True)
        self._receiver = receiver
        self._plan = plan
        self._packing = packing_of(receiver.pool)  # of its own: a stalled source holds up no other
        self._lock = threading.Lock()
        self._channel: PairChannel | None = None
        self._is_stopped = False

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            channel = self._channel
        if channel is not None:
            channel.abort()

    def _run(self) -> None:
        receiver = self._receiver
        try:
            self._serve(self._join())
        except WireError as error:
            receiver.dropped.add(error.reason)
            logger.warning("a %s pair was dropped: %s", receiver.name, error)
        except BatonError as error:
            logger.info("a %s pair ended: %s", receiver.name, error)
        finally:
            self.stop()
            receiver.remove(self)

    def _join(self) -> PairChannel:
        receiver = self._receiver
        with contextlib.closing(receiver.place.wait_for_source(self.meeting)) as store:
            channel = join_pair(
                receiver.name, store, DESTINATION, self._packing, self._plan, receiver.settings
            )
        with self._lock:
            self._channel = channel
            if self._is_stopped:
                raise TransferFailed("closed while the source was on its way")
        return channel

    def _serve(self, channel: PairChannel) -> None:
        for slot in range(NUM_SLOTS):
            channel.post(slot)
        num_received = 0
        while True:
            slot = num_received % NUM_SLOTS
            header = decode_header(self.meeting.record_key, num_received, channel.receive(slot))
            if header.num_bytes > payload_bytes(self._plan):
                raise WireError(f"a part of {header.num_bytes} bytes is no part of ours", reason="length")
            self._land(channel, slot, num_received, header)
            num_received += 1

    def _land(self, channel: PairChannel, slot: int, number: int, header: PartHeader) -> None:
        receiver = self._receiver
        landings, stall_s = receiver.landings, receiver.settings.stall_s
        payload = channel.fetch(slot, header.num_bytes, stall_s)
        writing = landings.begin(header.transfer, header.epoch, header.first, header.stop, header.num_bytes)
        is_whole = False
        try:
            if writing is not None:
                self._packing.unpack(writing.landing.plan, writing.offsets(), payload)
                self._packing.finish()
            channel.post(slot)
            outcome = Outcome.REFUSED if writing is None else Outcome.WRITTEN
            channel.answer(slot, encode_answer(self.meeting.record_key, number, outcome), stall_s)
            is_whole = True
            if writing is not None and receiver.on_written is not None:
                receiver.on_written(writing)
        finally:
            if writing is not None:
                landings.end(writing, is_whole=is_whole)
