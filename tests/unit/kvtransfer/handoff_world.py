"""Two replicas whose transfers run in the simulator (sim/endpoint.py), and the faults of both.

A test calls the steps of the world by name, in any order; `random` makes every other choice. During
`step_wait` virtual time passes: messages and pieces arrive, and devices write. After any steps, `settle` lets
everything under way end, and checks that every page of both replicas is free. The world raises AssertionError
as soon as a user reads other contents than were written, a page is read or written without a hold, a transfer
ends twice, or a replica refuses a message of the other one.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Final

from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.protocol.handoff import HandoffOutcome
from baton.kvtransfer.protocol.messages import ID_BYTES, AnyMessage, Grant, PullRequest
from baton.sim.endpoint import SimEndpoint, SimLink
from baton.sim.engine import ENTRY_BYTES, KvMemory
from baton.sim.network import Network, Recorder
from baton.sim.process import Events, SimProcess
from tests.numbered_pages import NumberedPages, key_of

PAGE_SIZES: Final = ((1, 1), (2, 1), (1, 2))  # tokens a page, of both replicas; a unit is one token
RANKS: Final = (  # of both replicas: the process of each rank; process 0 is the endpoint's
    ((0,), (0,)),
    ((0, 0), (0, 1)),
    ((0, 1), (0, 0)),
    ((0, 1), (0, 1)),
    ((0, 0, 1, 1), (0, 1, 2, 3)),
)
NUM_PAGES: Final = 10
MAX_UNITS: Final = 6
DEADLINES_S: Final = (3.0, 60.0)
WAITS_S: Final = (0.002, 0.02, 0.1, 0.5)
PIECE_DELAYS_S: Final = (0.0, 0.0, 0.3, 3.0)
FLIP_CHANCE: Final = 0.04  # of a unit on its way
BREAK_CHANCE: Final = 0.01  # of a piece
POLL_S: Final = 0.2
MAX_POLLS: Final = 300  # after which everything under way has ended


@dataclass(eq=False)
class User:
    """A user of pages, which wrote or adopted them, and reads them until it lets go."""

    owner: str
    pages: Sequence[int]
    contents: list[bytes]  # of each rank: what the pages must hold
    num_computed: int = 0  # units that may be offered
    num_offered: int = 0

    @property
    def num_units(self) -> int:
        return len(self.contents[0]) // ENTRY_BYTES


@dataclass(frozen=True)
class Hint:
    """Pages that were known once, as a prefix index remembers them, and their contents."""

    incarnation: bytes
    keys: list[bytes]
    contents: list[bytes]


class Device:
    """A StepMarks. Entries are written in the order of their launch, some time after it."""

    def __init__(self) -> None:
        self.launched = 0
        self._unwritten: deque[tuple[KvMemory, slice, bytes]] = deque()

    def launch(self, memory: KvMemory, place: slice, entry: bytes) -> None:
        self.launched += 1
        self._unwritten.append((memory, place, entry))

    def write_some(self, random: Random) -> None:
        """Write some of the launched entries."""
        for _ in range(random.randint(0, len(self._unwritten))):
            memory, place, entry = self._unwritten.popleft()
            memory.bytes[place] = entry

    def has_passed(self, mark: int) -> bool:
        return self.launched - len(self._unwritten) >= mark

    def read_by_step(self, memory: KvMemory, place: slice) -> bytes:
        """Return the entry that a step launched now reads: it runs after all earlier steps."""
        late = (each for other, at, each in reversed(self._unwritten) if other is memory and at == place)
        return next(late, bytes(memory.bytes[place]))


class WatchedEndpoint(SimEndpoint):
    """Remembers the transfers that its peer requested."""

    @cached_property
    def requested(self) -> set[bytes]:
        return set()

    def received(self, link: SimLink, message: AnyMessage) -> None:
        if isinstance(message, Grant | PullRequest) and not link.is_lost:
            self.requested.add(message.transfer)
        super().received(link, message)


class Replica:
    """A process with a ledger, memory and an endpoint, and the processes of its other ranks."""

    def __init__(self, name: str, page_size: int, ranks: Sequence[int], world: "HandoffWorld") -> None:
        """ranks: the process of each rank."""
        self.processes = [SimProcess(f"{name}, process {each}", world.events) for each in sorted(set(ranks))]
        self.process = self.processes[0]
        self.device = Device()
        self.pool = PagePool(NUM_PAGES, page_size, self.device)
        self.memories = [KvMemory(NUM_PAGES, page_size) for _ in ranks]
        self.endpoint = WatchedEndpoint(
            self.process,
            self.pool,
            self.memories[0],
            world.network,
            world.random,
            world.recorder,
            other_ranks=list(zip([self.processes[each] for each in ranks], self.memories, strict=True))[1:],
            steps=self.device,
        )
        self.endpoint.pin = NumberedPages(self.pool)
        self.set_faults(flip_chance=FLIP_CHANCE, break_chance=BREAK_CHANCE, delay_s=0.0)
        self.prompts: dict[bytes, User] = {}  # transfer -> the prompt that is computed for it
        self.others: list[User] = []
        self.expected: dict[bytes, list[bytes]] = {}  # incoming transfer -> contents of each rank
        self.granted: set[bytes] = set()  # transfers that a peer wants to be offered
        self.ends: dict[bytes, HandoffOutcome] = {}
        self.is_stalled = False  # its loop does not run; the threads of its ranks do
        self._outcomes = world.outcomes
        self.process.turn = self._turn

    def set_faults(self, *, flip_chance: float, break_chance: float, delay_s: float) -> None:
        """Set the faults of the pieces that leave the replica from now on."""
        for rank in self.endpoint.ranks:
            rank.flip_chance, rank.break_chance, rank.delay_s = flip_chance, break_chance, delay_s

    def make_room(self, num_pages: int) -> bool:
        while self.pool.num_free < num_pages:
            page = self.pool.cached.next_out()
            if page is None:
                return False
            self.pool.forget(page)
        return True

    def compute(self, owner: str, contents: list[bytes]) -> User:
        """Allocate pages, and launch the steps that write them."""
        user = User(owner, [], contents)
        user.pages = self.pool.allocate(self.pool.pages_for(user.num_units), owner)
        for memory, content in zip(self.memories, contents, strict=True):
            for unit in range(user.num_units):
                place = memory.place(user.pages, unit, 1)[1]
                self.device.launch(memory, place, content[unit * ENTRY_BYTES : (unit + 1) * ENTRY_BYTES])
        return user

    def check_reads(self, user: User) -> None:
        for page in user.pages:
            assert user.owner in self.pool.owners(page), f"{user.owner} does not own page {page}"
        for rank, memory, expected in zip(self.endpoint.ranks, self.memories, user.contents, strict=True):
            if not rank.is_lost:
                places = [memory.place(user.pages, unit, 1)[1] for unit in range(user.num_units)]
                found = b"".join(self.device.read_by_step(memory, place) for place in places)
                assert found == expected, f"{user.owner} reads {found!r}, {expected!r} was written"

    def let_go(self, user: User) -> None:
        self.check_reads(user)
        self.pool.release(user.pages, user.owner)

    def make_known(self, user: User) -> Hint | None:
        """Put the pages of a user into the prefix cache; None when one of them is in it."""
        if any(self.pool.is_known(page) for page in user.pages):
            return None
        for page in user.pages:
            self.pool.mark_known(page)
        keys = [key_of(page, self.pool.generation(page)) for page in user.pages]
        return Hint(self.endpoint.incarnation, keys, user.contents)

    def _turn(self) -> None:
        if self.is_stalled:
            return
        for end in self.endpoint.poll():
            assert end.transfer not in self.ends, f"{self.ends[end.transfer]}, and {end.outcome}"
            self.ends[end.transfer] = end.outcome
            self._outcomes[end.outcome] += 1
            if end.outcome is HandoffOutcome.ADOPTED:
                (adopter,) = self.pool.owners(end.pages[0])
                self.others.append(User(str(adopter), end.pages, self.expected[end.transfer]))
                self.check_reads(self.others[-1])
                self._outcomes["pulled"] += self.others[-1].owner.startswith("pull")
        for granted in self.endpoint.take_granted():
            if granted.transfer in self.prompts:
                self.granted.add(granted.transfer)
            else:
                self.endpoint.abort(granted.transfer, "the prompt is not here")


class HandoffWorld:
    """Steps are named `step_...`."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.events = Events()
        self.network = Network(self.events, random)
        self.recorder = Recorder(self.events)
        self.transfers: deque[bytes] = deque(maxlen=8)  # the latest
        self.hints: list[Hint] = []
        self.outcomes: Counter[str] = Counter()  # of both replicas, and "pulled" for each pull with ADOPTED
        self._num_made = 0
        self._page_sizes, self._ranks = random.choice(PAGE_SIZES), random.choice(RANKS)
        self.replicas = [self._new_replica(0), self._new_replica(1)]
        self.step_join()

    # Work.

    def step_request(self) -> None:
        """A prompt arrives: one replica allocates pages to compute it, the other one grants as many.

        Without room at one replica, the other replica gives the transfer up.
        """
        source, destination = self.random.sample(self.replicas, 2)
        contents = self._new_contents()
        num_units = len(contents[0]) // ENTRY_BYTES
        if not source.make_room(source.pool.pages_for(num_units)):
            return
        transfer = self._new_number().to_bytes(ID_BYTES, "big")
        self.transfers.append(transfer)
        source.prompts[transfer] = source.compute(f"prefill-{transfer.hex()}", contents)
        links = destination.endpoint.links
        if links and destination.make_room(destination.pool.pages_for(num_units)):
            destination.expected[transfer] = contents
            link, deadline_s = self.random.choice(links), self.random.choice(DEADLINES_S)
            owner = f"decode-{transfer.hex()}"
            destination.endpoint.grant(link, transfer, num_units, owner, deadline_s=deadline_s)

    def step_compute(self) -> None:
        """A replica computes units of a prompt, and offers all computed units once pages are granted.

        The replica releases the pages after the last unit. It may give up a prompt without a grant.
        """
        replica = self.random.choice(self.replicas)
        if not replica.prompts:
            return
        transfer = self.random.choice(list(replica.prompts))
        prompt = replica.prompts[transfer]
        if prompt.num_computed < prompt.num_units:
            prompt.num_computed += self.random.randint(1, prompt.num_units - prompt.num_computed)
        if transfer in replica.granted:
            first, stop = map(replica.pool.pages_for, (prompt.num_offered, prompt.num_computed))
            replica.endpoint.offer(transfer, prompt.pages[first:stop], prompt.num_computed)
            prompt.num_offered = prompt.num_computed
            if prompt.num_computed < prompt.num_units:
                return
        elif self.random.randrange(4):
            return
        self._let_go(replica, replica.prompts.pop(transfer))

    def step_pull(self) -> None:
        """A replica pulls pages that its peer once knew; the hint may be old."""
        if not self.hints:
            return
        replica, hint = self.random.choice(self.replicas), self.random.choice(self.hints)
        links = [link for link in replica.endpoint.links if link.hello.incarnation == hint.incarnation]
        num_units = len(hint.contents[0]) // ENTRY_BYTES
        if not links or not replica.make_room(replica.pool.pages_for(num_units)):
            return
        link, deadline_s = self.random.choice(links), self.random.choice(DEADLINES_S)
        owner = f"pull-{self._new_number()}"
        transfer = replica.endpoint.pull(link, hint.keys, num_units, owner, deadline_s=deadline_s)
        replica.expected[transfer] = hint.contents
        self.transfers.append(transfer)

    def step_other(self) -> None:
        """Another user takes, writes, reads and frees pages: a page freed too early would hurt it."""
        replica = self.random.choice(self.replicas)
        if replica.others and self.random.randrange(2):
            others = replica.others
            self._let_go(replica, others.pop(self.random.randrange(len(others))))
            return
        contents = self._new_contents()
        if replica.make_room(replica.pool.pages_for(len(contents[0]) // ENTRY_BYTES)):
            user = replica.compute(f"other-{self._new_number()}", contents)
            if self.random.randrange(2):
                replica.others.append(user)
            else:  # cancelled: its pages are free before its step has written them
                self._let_go(replica, user)

    def step_abort(self) -> None:
        if self.transfers:
            transfer = self.random.choice(self.transfers)
            self.random.choice(self.replicas).endpoint.abort(transfer, "cancelled")

    # Time.

    def step_wait(self) -> None:
        """Time passes; each replica that is not stalled polls its endpoint."""
        self._wait(self.random.random() * self.random.choice(WAITS_S))

    def step_stall(self) -> None:
        """Stop or continue a replica's loop, and change the delay of its pieces."""
        replica = self.random.choice(self.replicas)
        replica.is_stalled = not replica.is_stalled
        delay_s = self.random.choice(PIECE_DELAYS_S)
        replica.set_faults(flip_chance=FLIP_CHANCE, break_chance=BREAK_CHANCE, delay_s=delay_s)

    # Links and deaths.

    def step_cut(self) -> None:
        for wire in list(self.network.wires):
            wire.cut()

    def step_join(self) -> None:
        if not self.network.wires:
            one, other = (replica.endpoint for replica in self.replicas)
            one.connect(other, is_direct=bool(self.random.randrange(2)))

    def step_crash(self) -> None:
        """A replica dies with all its ranks, and another one takes its place."""
        side = self.random.randrange(2)
        for process in self.replicas[side].processes:
            process.die()
        self.replicas[side] = self._new_replica(side)

    def step_lose_rank(self) -> None:
        """A replica loses a process of other ranks, which continues to perform earlier commands."""
        replica = self.random.choice(self.replicas)
        if len(replica.processes) > 1:
            replica.endpoint.lose_ranks(self.random.choice(replica.processes[1:]))

    def step_kill_lost_ranks(self) -> None:
        """The processes of all lost ranks die, and their replicas know it."""
        for replica in self.replicas:
            for rank in replica.endpoint.ranks:
                if rank.is_lost and not rank.is_dead:
                    rank.process.die()
                    replica.endpoint.lose_ranks(rank.process)

    # The end.

    def settle(self) -> None:
        """Let everything under way end, by itself or by time; then no page may be held."""
        for replica in self.replicas:
            replica.is_stalled = False
        for _ in range(MAX_POLLS):
            for replica in self.replicas:
                replica.set_faults(flip_chance=0.0, break_chance=0.0, delay_s=0.0)
            self.step_join()
            self.step_kill_lost_ranks()
            self.step_compute()
            self._wait(POLL_S)
            if self._is_quiet():
                break
        self._wait(POLL_S)  # a poll reports the last ends
        assert not self.recorder.drops, self.recorder.drops
        for replica in self.replicas:
            self._check_end(replica)

    def _is_quiet(self) -> bool:
        return not any(
            replica.prompts or replica.endpoint.num_open or replica.endpoint.has_writers
            for replica in self.replicas
        )

    def _check_end(self, replica: Replica) -> None:
        name, endpoint = replica.process.name, replica.endpoint
        assert not endpoint.num_open and not endpoint.has_writers, f"{name} has open transfers"
        assert set(replica.ends) == endpoint.requested | set(replica.expected)
        for user in replica.others:
            replica.let_go(user)
        replica.pool.check_integrity()
        replica.make_room(NUM_PAGES)
        assert replica.pool.num_free == NUM_PAGES, f"{name} leaks pages"

    def _wait(self, seconds: float) -> None:
        for replica in self.replicas:
            replica.device.write_some(self.random)
            replica.process.wake()
        self.events.run_until(self.events.now_s + seconds)

    def _let_go(self, replica: Replica, user: User) -> None:
        if self.random.randrange(2) and (hint := replica.make_known(user)):
            self.hints.append(hint)
        replica.let_go(user)

    def _new_replica(self, side: int) -> Replica:
        name = ("first", "second")[side]
        return Replica(name, self._page_sizes[side], self._ranks[side], self)

    def _new_number(self) -> int:
        self._num_made += 1
        return self._num_made

    def _new_contents(self) -> list[bytes]:
        """Return the contents of some units at each rank; no two entries are alike."""
        units = range(self.random.randint(1, MAX_UNITS))
        return [
            b"".join(self._new_number().to_bytes(ENTRY_BYTES, "big") for _ in units) for _ in self._ranks[0]
        ]
