"""Two hosts, the links between them and everything that can go wrong, one step at a time.

Whoever drives calls steps by name with a `pick` that chooses. After any steps `settle` lets all that is under
way end, and checks that every page of both ledgers is free. What may not happen raises AssertionError where
it happens: a read of something else than was written, a write into a page without the writer's hold, a
second end of a transfer.
"""

from typing import Final

from baton.kvtransfer.protocol.destination import DestinationHandoff, DestinationState, TransferSize
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from tests.numbered_pages import wanted_pages
from tests.unit.kvtransfer.simulated_host import Hint, Host, Sequence
from tests.unit.kvtransfer.simulated_ranks import SimulatedRanks

UNITS_PER_PAGE: Final = ((1, 1), (2, 1), (1, 2))  # source, destination
MAX_UNITS: Final = 6
DEADLINE_S: Final = 60.0


class HandoffWorld(SimulatedRanks):
    """Steps are named `step_...`; those of links, bytes and deaths are inherited."""

    # Work of the source.

    def step_request(self) -> None:
        """A prompt arrives at both hosts: the source allocates pages, the destination grants as many.

        A host that has no room, or has lost a rank, does not join in: the other gives the transfer up.
        """
        host, num_units = self.source, 1 + self.pick(MAX_UNITS)
        if host.lost_rank is not None or not host.make_room(host.num_pages_for(num_units)):
            return
        transfer = self._number().to_bytes(16, "big")
        sequence = self._new_sequence(host, f"prompt-{self.num_made}", num_units)
        host.sequences[transfer.hex()] = sequence
        size = TransferSize(transfer, num_units, self.num_shards, DEADLINE_S)
        self._expect(transfer, size, sequence.contents)
        destination = self.destination
        if destination.lost_rank is None and destination.make_room(destination.num_pages_for(num_units)):
            handoff = self._new_destination(size)
            self._do(destination, transfer, handoff.grant(f"decode-{transfer.hex()}"))

    def step_compute(self) -> None:
        """A prompt gets further, and what is computed is offered once pages are granted.

        After its last unit the sequence lets its pages go, known or not. One without a grant may be given up.
        """
        host = self.source
        key = self._any(key for key, each in host.sequences.items() if each.name.startswith("prompt"))
        if not isinstance(key, str):
            return
        sequence, transfer = host.sequences[key], bytes.fromhex(key)
        handoff, num_units = host.sources.get(transfer), self.requests[transfer].num_units
        if sequence.num_computed < num_units:
            sequence.num_computed += 1 + self.pick(num_units - sequence.num_computed)
        if handoff is None:
            if not self.pick(4):
                self._let_go(host, key)
            return
        if self.pick(2):
            self._open(host, transfer)
        before, after = (host.num_pages_for(n) for n in (sequence.num_offered, sequence.num_computed))
        sequence.num_offered = sequence.num_computed
        self._do(host, transfer, handoff.offer(sequence.pages[before:after], sequence.num_computed))
        if sequence.num_computed == num_units:
            self._let_go(host, key)

    def _new_sequence(self, host: Host, name: str, num_units: int) -> Sequence:
        pages = host.pool.allocate(host.num_pages_for(num_units), name)
        contents = {
            (unit, shard): self._number() for unit in range(num_units) for shard in range(self.num_shards)
        }
        for (unit, shard), value in contents.items():
            host.launch(pages, unit, shard, value)
        return Sequence(name, pages, contents)

    def _let_go(self, host: Host, key: str) -> None:
        sequence = host.sequences.pop(key)
        host.check_reads(sequence)
        if self.pick(2) and not any(host.pool.is_known(page) for page in sequence.pages):
            for page in sequence.pages:
                host.pool.mark_known(page)
            pages = tuple((page, host.pool.generation(page)) for page in sequence.pages)
            num_units = len(sequence.contents) // self.num_shards
            if host.name == "source":
                self.hints.append(Hint(host.incarnation, pages, sequence.contents, num_units))
        host.pool.release(sequence.pages, sequence.name)

    # Work of both.

    def step_local(self) -> None:
        """Somebody else takes, writes, reads and frees pages: whom a page freed too early would hurt."""
        host = (self.source, self.destination)[self.pick(2)]
        local = [key for key, sequence in host.sequences.items() if not sequence.name.startswith("prompt")]
        if local and self.pick(2):
            self._let_go(host, local[self.pick(len(local))])
            return
        num_units = 1 + self.pick(MAX_UNITS)
        if host.make_room(host.num_pages_for(num_units)):
            name = f"local-{self._number()}"
            host.sequences[name] = self._new_sequence(host, name, num_units)
            if self.pick(2):  # cancelled: its pages are free before its step has written them
                self._let_go(host, name)

    def step_tick(self) -> None:
        """Time passes; each host looks at its leases, or is stalled and does not."""
        self.clock.advance((1, 4, 12, 31)[self.pick(4)])
        for host in (self.source, self.destination):
            if not self.pick(3):
                host.pool.expire(self.clock.now_s())  # the hand-offs hear of it later
            elif self.pick(4):
                self._tick(host)

    def _tick(self, host: Host) -> None:
        for handoff in host.handoffs():
            self._do(host, handoff.transfer, handoff.tick())
        host.pool.expire(self.clock.now_s())

    def step_abort(self) -> None:
        host = (self.source, self.destination)[self.pick(2)]
        handoff = self._any(host.handoffs())
        if isinstance(handoff, SourceHandoff | DestinationHandoff):
            self._do(host, handoff.transfer, handoff.abort("cancelled"))

    def step_pull(self) -> None:
        """The destination wants what the source once knew; the hint may be old."""
        host = self.destination
        hint = self._any(self.hints)
        if host.lost_rank is not None or not isinstance(hint, Hint):
            return
        if not host.make_room(host.num_pages_for(hint.num_units)):
            return
        transfer = self._number().to_bytes(16, "big")
        size = TransferSize(transfer, hint.num_units, self.num_shards, DEADLINE_S)
        self._expect(transfer, size, hint.contents)
        handoff = self._new_destination(size)
        self._do(
            host,
            transfer,
            handoff.pull(f"puller-{transfer.hex()}", hint.incarnation, wanted_pages(hint.pages)),
        )

    def _expect(self, transfer: bytes, size: TransferSize, contents: dict[tuple[int, int], int]) -> None:
        self.is_direct[transfer] = bool(self.pick(2))
        self.expected[transfer] = contents
        self.requests[transfer] = size

    # The end.

    def settle(self) -> None:
        """Whatever is under way comes to its end, by itself or by time; then nothing may be held."""
        chosen, self.pick, self.may_flip = self.pick, lambda n: n - 1, False
        for _ in range(4):
            self._quiet_down()
            self.step_join()
            self._quiet_down()
            self.clock.advance(20.0)
            for host in (self.source, self.destination):
                self._tick(host)
        self.pick = chosen
        self._check_ends()
        for host in (self.source, self.destination):
            for sequence in host.sequences.values():
                host.check_reads(sequence)
                host.pool.release(sequence.pages, sequence.name)
            host.pool.check_integrity()
            host.make_room(host.pool.num_pages)
            assert host.pool.num_free == host.pool.num_pages, f"{host.name} leaks pages"

    def _quiet_down(self) -> None:
        """Everything happens that needs no time."""
        while True:
            before = self._backlog()
            for step in (
                self.step_write,
                self.step_arrive,
                self.step_verify,
                self.step_fence,
                self.on_peer_death,
            ):
                step()
            for host in (self.source, self.destination):
                self._go_on(host)
                self._deliver_to(host)
                for transfer in list(host.unopened):
                    self._open(host, transfer)
            if not any(before) and not any(self._backlog()):
                return

    def _backlog(self) -> tuple[int, ...]:
        hosts = (self.source, self.destination)
        waiting = [len(host.inbox) + host.has_lost_peer + len(host.verifications) for host in hosts]
        waiting += [len(host.device.unwritten) for host in hosts]
        unburied = [host.lost_rank is not None and not host.is_rank_dead for host in hosts]
        return len(self.jobs), len(self.flights), len(self.fences), *waiting, *unburied

    def _check_ends(self) -> None:
        for host in (self.source, self.destination):
            for source in host.sources.values():
                assert source.state is SourceState.CLOSED and source.outcome, source.state
            for destination in host.destinations.values():
                assert destination.state is DestinationState.CLOSED and destination.outcome, destination.state
            assert set(host.finished) == set(host.sources) | set(host.destinations)
