"""What two hosts of the simulation say and do to each other: links that break, bytes in flight, deaths.

What may not happen raises AssertionError where it happens: a write into a page without the writer's hold,
a second end of a transfer, an adopted page that does not hold what was sent.
"""

from collections.abc import Iterable
from typing import Final

from baton.clock import ManualClock
from baton.kvtransfer.protocol.destination import DestinationHandoff, TransferSize
from baton.kvtransfer.protocol.handoff import (
    Action,
    Finished,
    HandoffOutcome,
    Send,
    answer_to_unknown,
)
from baton.kvtransfer.protocol.messages import (
    AnyMessage,
    EndpointHello,
    Grant,
    ListenerAddresses,
    PullRequest,
    decode,
    encode,
)
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    OpenShard,
    PushEnded,
    PushUnits,
    ReachPeer,
    ShardCommand,
    ShardEvent,
    ShardOpened,
    ShardReached,
    ShardStopped,
    ShardVerified,
    StopShard,
    UnitsHashed,
    VerifyShard,
    WriterStopped,
)
from baton.kvtransfer.transports.base import PieceOutcome
from tests.numbered_pages import NumberedPages
from tests.unit.kvtransfer.simulated_host import Hint, Host, Pick, Registration, Sequence
from tests.unit.kvtransfer.simulated_writes import FLIPPED, Flight, PushJob

UNITS_PER_PAGE: Final = ((1, 1), (2, 1), (1, 2))  # source, destination
CUTS: Final = (  # (source rank, destination rank) of each shard
    ((0, 0),),
    ((0, 0), (0, 1)),
    ((0, 0), (1, 0)),
    ((0, 0), (1, 1)),
    ((0, 0), (0, 1), (1, 2), (1, 3)),
)
MAX_UNITS: Final = 6


class SimulatedNetwork:
    """`pick` chooses wherever chance does."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.clock = ManualClock()
        self.units_per_page = UNITS_PER_PAGE[pick(len(UNITS_PER_PAGE))]
        self.cut = CUTS[pick(len(CUTS))]
        self.num_shards = len(self.cut)
        self.num_made = 0
        self.outcomes: dict[HandoffOutcome, int] = {}
        self.is_direct: dict[bytes, bool] = {}
        self.expected: dict[bytes, dict[tuple[int, int], int]] = {}  # transfer -> what must arrive
        self.requests: dict[bytes, TransferSize] = {}
        self.grants: dict[tuple[Host, bytes], tuple[Grant | PullRequest, Host]] = {}
        self.hints: list[Hint] = []
        self.peers: dict[tuple[Host, bytes], Host] = {}  # with whom an end began its transfer
        self.jobs: list[PushJob] = []
        self.flights: list[Flight] = []
        self.stopping: list[tuple[Host, bytes]] = []  # transfers whose pushes must end
        self.fences: list[tuple[Host, Host]] = []  # (survivor, dead peer) not known for certain yet
        self.is_linked = True
        self.may_flip = True
        self.source = self._new_host("source")
        self.destination = self._new_host("destination")

    def _new_host(self, name: str) -> Host:
        side = 0 if name == "source" else 1
        ranks = tuple(pair[side] for pair in self.cut)
        return Host(name, self._number(), self.units_per_page[side], ranks)

    def _number(self) -> int:
        self.num_made += 1
        return self.num_made

    def _any(self, things: Iterable[object]) -> object | None:
        listed = list(things)
        return listed[self.pick(len(listed))] if listed else None

    # The links.

    def step_deliver(self) -> None:
        self._deliver_to((self.source, self.destination)[self.pick(2)])

    def _deliver_to(self, host: Host) -> None:
        if host.has_lost_peer:
            host.has_lost_peer = False
            for handoff in host.handoffs():
                self._do(host, handoff.transfer, handoff.peer_lost())
        elif host.inbox:
            self._receive(host, decode(host.inbox.pop(0)))

    def _receive(self, host: Host, message: AnyMessage) -> None:
        assert not isinstance(message, EndpointHello | ListenerAddresses)
        transfer = message.transfer
        if isinstance(message, Grant):
            source = self._new_source(host, message)
            if host.lost_rank is not None:
                self._do(host, transfer, source.fail("a rank is lost"))
            elif transfer.hex() not in host.sequences:
                self._do(host, transfer, source.abort("the prompt is not here"))
            else:
                self._do(host, transfer, source.begin())
        elif isinstance(message, PullRequest):
            source = self._new_source(host, message)
            is_whole = host.lost_rank is None
            self._do(host, transfer, source.begin() if is_whole else source.fail("a rank is lost"))
            self._open(host, transfer)
        else:
            known: SourceHandoff | DestinationHandoff | None = host.sources.get(transfer)
            known = known or host.destinations.get(transfer)
            answer = answer_to_unknown(message)
            if known is None and answer is not None:
                self._send(host, answer)
            elif known is not None and self.peers[host, transfer] is self._peer(host):
                self._do(host, transfer, known.receive(message))

    def _new_source(self, host: Host, request: Grant | PullRequest) -> SourceHandoff:
        context = host.context(self.clock, self.units_per_page)
        source = SourceHandoff(request, context, host.incarnation, NumberedPages(host.pool))
        host.sources[request.transfer] = source
        self.grants[host, request.transfer] = request, self._peer(host)
        self.peers[host, request.transfer] = self.destination
        return source

    def _open(self, host: Host, transfer: bytes) -> None:
        """The transports of a source are open, if they are being opened."""
        if transfer in host.unopened:
            host.unopened.remove(transfer)
            for shard in range(self.num_shards):
                self._emit(host, ShardReached(transfer=transfer, shard=shard, transport=""))

    def step_cut(self) -> None:
        """The link breaks; what it held is lost. Each host hears of it in its own time."""
        if self.is_linked:
            self.is_linked = False
            for host in (self.source, self.destination):
                host.inbox.clear()
                host.has_lost_peer = True

    def step_join(self) -> None:
        if not self.is_linked and not self.source.has_lost_peer and not self.destination.has_lost_peer:
            self.is_linked = True

    def _peer(self, host: Host) -> Host:
        return self.destination if host is self.source else self.source

    # Death.

    def step_crash(self) -> None:
        """A process dies, with its writers; the other one hears first that the link is gone."""
        dead = (self.source, self.destination)[self.pick(2)]
        survivor = self._peer(dead)
        self.step_cut()
        dead.is_dead = True
        self.jobs = [job for job in self.jobs if job.source is not dead]
        self.stopping = [(host, transfer) for host, transfer in self.stopping if host is not dead]
        self.flights = [flight for flight in self.flights if flight.job.destination is not dead]
        for job in self.jobs:
            job.has_failed |= job.destination is dead and not job.is_direct
        self.fences = [(host, peer) for host, peer in self.fences if host is not dead]
        self.fences.append((survivor, dead))
        if dead is self.source:
            self.source = self._new_host("source")
        else:
            self.destination = self._new_host("destination")

    def step_fence(self) -> None:
        """A dead process is known to be dead: its writers can't write any more."""
        if not self.fences:
            return
        survivor, dead = self.fences.pop(self.pick(len(self.fences)))
        for transfer in list(survivor.destinations):
            if self.peers[survivor, transfer] is dead and self.is_direct[transfer]:
                for shard in range(self.num_shards):
                    self._writer_stopped(survivor, transfer, shard)

    def _writer_stopped(self, host: Host, transfer: bytes, shard: int) -> None:
        self._emit(host, WriterStopped(transfer=transfer, shard=shard))

    def _emit(self, host: Host, event: ShardEvent) -> None:
        """Have the host's hand-off process an event of one of its ranks."""
        handoff = host.sources.get(event.transfer) or host.destinations[event.transfer]
        self._do(host, event.transfer, handoff.on_shard_event(event))

    def _new_destination(self, size: TransferSize) -> DestinationHandoff:
        host = self.destination
        context = host.context(self.clock, self.units_per_page)
        handoff = DestinationHandoff(size, host.next_epoch(), context)
        host.destinations[size.transfer] = handoff
        self.peers[host, size.transfer] = self.source
        return handoff

    # Bytes.

    def step_write(self) -> None:
        job = self._any(job for job in self.jobs if job.source.device.has_passed(job.after))
        if not isinstance(job, PushJob):
            return
        if job.has_failed or (job.must_stop and job.carried is None):
            self._end_job(job)
        elif job.is_direct:
            if job.next_unit < job.stop:
                job.step_directly()
        elif job.next_unit < job.stop:
            self.flights.append(Flight(job, job.next_unit, job.read_next()))
            job.next_unit += 1
        if job.is_written:
            self._end_job(job)

    def _end_job(self, job: PushJob) -> None:
        if job not in self.jobs:
            return
        self.jobs.remove(job)
        if job.source.is_lost(job.shard):
            self._end_stops()
            return  # nobody hears of it
        handoff = job.source.sources[job.transfer]
        if job.is_written:
            self._emit(job.source, UnitsHashed(**job.units, digests=bytes(job.digests)))
        elif handoff.state is not SourceState.STOPPING:  # else ShardStopped tells of all at once
            refused = PieceOutcome(is_done=False, reason="refused")
            self._emit(job.source, PushEnded(**job.units, outcome=refused))
        self._end_stops()

    def _end_stops(self) -> None:
        for host, transfer in list(self.stopping):
            is_unheard = host.lost_rank is not None and not host.is_rank_dead
            jobs = (job for job in self.jobs if job.source is host and job.transfer == transfer)
            if not is_unheard and not any(jobs):
                self.stopping.remove((host, transfer))
                for shard in range(self.num_shards):
                    self._emit(host, ShardStopped(transfer=transfer, shard=shard))

    def step_arrive(self) -> None:
        flight = self._any(self.flights)
        if not isinstance(flight, Flight):
            return
        if self.may_flip and not self.pick(12):
            flight.contents ^= FLIPPED
        if flight.arrive():
            self.flights.remove(flight)
            self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        registration, job = flight.registration, flight.job
        is_heard = not job.destination.is_lost(job.shard)
        if registration is not None and not registration.is_open and not registration.num_inside and is_heard:
            self._writer_stopped(job.destination, job.transfer, job.shard)

    def step_verify(self) -> None:
        host = self.destination
        if not host.verifications:
            return
        transfer, shard, digests = host.verifications.pop(self.pick(len(host.verifications)))
        pages = host.destinations[transfer].pages
        found = [host.read(pages, unit, shard) for unit in range(len(digests) // 8)]
        corrupt = [
            unit for unit, value in enumerate(found) if value.to_bytes(8, "big") != digests[unit * 8 :][:8]
        ]
        self._emit(host, ShardVerified(transfer=transfer, shard=shard, corrupt_units=tuple(corrupt)))

    # What the machines ask for.

    def _do(self, host: Host, transfer: bytes, actions: list[Action]) -> None:
        """Carry the actions out in order; commands behind one that waits for the device wait too."""
        for action in actions:
            if isinstance(action, Send):
                self._send(host, action.message)
            elif isinstance(action, Finished):
                self._finish(host, transfer, action.outcome)
            elif transfer in host.waiting:
                host.waiting[transfer].append(action)
            elif isinstance(action, OpenShard) and not host.device.has_passed(action.after):
                host.waiting[transfer] = [action]
            else:
                self._carry_out(host, transfer, action)

    def step_device(self) -> None:
        """A device gets further with what it was told to write."""
        self._go_on((self.source, self.destination)[self.pick(2)])

    def _go_on(self, host: Host) -> None:
        if host.device.unwritten:
            host.device.write(1 + self.pick(len(host.device.unwritten)))
        for transfer in list(host.waiting):
            self._do(host, transfer, [*host.waiting.pop(transfer)])

    def _carry_out(self, host: Host, transfer: bytes, command: ShardCommand) -> None:
        match command:
            case ReachPeer():
                host.unopened.add(transfer)
            case PushUnits():
                self._push(host, transfer, command)
            case StopShard(shard=0):  # the other shards are stopped with it
                for job in self.jobs:
                    is_told = job.source is host and not host.is_lost(job.shard)
                    job.must_stop |= is_told and job.transfer == transfer
                self.stopping.append((host, transfer))
                self._end_stops()
            case OpenShard(shard=shard):
                host.registrations[transfer, shard] = Registration(command.epoch)
                self._emit(host, ShardOpened(transfer=transfer, shard=shard))
            case CloseShard(shard=shard) if host.is_lost(shard):
                if host.is_rank_dead:
                    self._writer_stopped(host, transfer, shard)
            case CloseShard(shard=shard, is_confirmed=is_confirmed):
                registration = host.registrations[transfer, shard]
                registration.is_open = False
                if is_confirmed if self.is_direct[transfer] else not registration.num_inside:
                    self._writer_stopped(host, transfer, shard)
            case VerifyShard(shard=shard, digests=digests) if not host.is_lost(shard):
                host.verifications.append((transfer, shard, digests))

    def _send(self, host: Host, message: AnyMessage) -> None:
        if self.is_linked:
            self._peer(host).inbox.append(encode(message))

    def _push(self, host: Host, transfer: bytes, push: PushUnits) -> None:
        grant, destination = self.grants[host, transfer]
        handoff = host.sources[transfer]
        job = PushJob(
            host,
            destination,
            transfer,
            handoff.epoch,
            push.shard,
            push.first,
            push.stop,
            list(handoff.pages),
            grant.pages,
            grant.generations,
            self.is_direct[transfer],
            push.after,
        )
        job.has_failed = destination.is_dead and not job.is_direct
        self.jobs.append(job)

    def _finish(self, host: Host, transfer: bytes, outcome: HandoffOutcome) -> None:
        assert transfer not in host.finished, f"ended as {host.finished[transfer]} and {outcome}"
        host.finished[transfer] = outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if outcome is HandoffOutcome.ADOPTED:
            handoff = host.destinations[transfer]
            (adopter,) = host.pool.owners(handoff.pages[0])
            sequence = Sequence(str(adopter), handoff.pages, self.expected[transfer])
            host.check_reads(sequence)
            host.sequences[sequence.name] = sequence
