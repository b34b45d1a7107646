"""A scheduler's harness with traffic: KV that comes from elsewhere, claims before it and pages kept after."""

from dataclasses import dataclass

from baton.engine.scheduler.sequence import Batch, Plan, Sequence, SequenceStatus
from baton.errors import InvalidRequest
from baton.request import FilledPages, Request, SamplingParams, StepOutput, TokenIds
from tests.fakes import KVEntry
from tests.scheduling import Harness


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The first `num_tokens` tokens of a request are on their way."""

    sequence: Sequence
    claim: FilledPages
    pages: tuple[int, ...]  # reserved, for what is not claimed
    num_tokens: int
    lessee: str


class OpenHarness(Harness):
    def begin(self, request: Request, num_tokens: int) -> Delivery | None:
        """Claim what is known of it and reserve pages for the rest; None without room."""
        sequence = self.sequence_of(request)
        name = request.request_id
        tokens = sequence.token_ids[: num_tokens + 1]
        claim = self.scheduler.holds.claim(tokens, request.cache_salt, name)
        if claim.pages:
            self.used[name] = set(claim.pages)
        num_pages = self.pool.pages_for(num_tokens) - len(claim.pages)
        if num_pages > self.scheduler.holds.num_reservable():
            self._release(claim)
            return None
        self.cache.make_room(num_pages, keep=False)
        pages = tuple(self.pool.reserve(num_pages, f"lease of {name}")) if num_pages else ()
        if pages:
            self.leased[f"lease of {name}"] = set(pages)
        return Delivery(
            sequence=sequence, claim=claim, pages=pages, num_tokens=num_tokens, lessee=f"lease of {name}"
        )

    def arrive(self, delivery: Delivery) -> bool:
        """All bytes are there: the request joins, unless it is refused; then the pages are back."""
        sequence, claim = delivery.sequence, delivery.claim
        table = (*claim.pages, *delivery.pages)
        self.fill(sequence, table, claim.num_tokens, delivery.num_tokens)
        if delivery.pages:
            self.pool.adopt(delivery.pages, delivery.lessee, claim.owner)
        self.leased.pop(delivery.lessee, None)
        self.used.pop(sequence.request_id, None)
        try:
            self.scheduler.add(sequence, FilledPages(table, delivery.num_tokens, claim.owner))
        except InvalidRequest:
            self.scheduler.holds.release(table, claim.owner)
            return False
        self.live[sequence.key] = sequence
        return True

    def cancel(self, delivery: Delivery) -> None:
        if delivery.pages:
            self.pool.release(delivery.pages, delivery.lessee)
        self.leased.pop(delivery.lessee, None)
        self._release(delivery.claim)

    def fill(self, sequence: Sequence, table: tuple[int, ...], start: int, stop: int) -> None:
        """Write the entries that the model would have written for tokens [start, stop)."""
        size = self.pool.page_size
        for position in range(start, stop):
            context = self.model.context_of(sequence.token_ids[: position + 1], sequence.cache_salt)
            entry = KVEntry(position, sequence.token_ids[position], context)
            self.model.device[table[position // size]][position % size] = entry

    def step(self) -> tuple[Plan, Batch, list[StepOutput]]:
        stepped = super().step()
        assert self.scheduler.holds.num_reservable() == self.num_reservable()
        return stepped

    def num_reservable(self) -> int:
        """By looking at every page: room is left for the next tokens of all and for the end of each."""
        is_outside, is_held = 0, 0
        for page in range(self.pool.num_pages):
            owners = self.pool.owners(page)
            is_held += bool(owners)
            is_outside += bool(owners - self.live.keys())
        needed = 0
        for sequence in self.live.values():
            if sequence.status is SequenceStatus.RUNNING:
                needed += self.pool.pages_for(16)
                if sequence.num_uncomputed_tokens > 1:
                    needed += self.missing(sequence)
        waiting = [each for each in self.live.values() if each.is_queued]
        if waiting:
            needed += max(0, self.missing(min(waiting, key=lambda each: each.rank)))
        longest = max((self.pool.pages_for(s.max_num_tokens) for s in self.live.values()), default=0)
        now = self.pool.num_pages - is_held - needed
        at_the_end = self.pool.num_pages - is_outside - longest
        return max(0, min(now, at_the_end))

    def missing(self, sequence: Sequence) -> int:
        """Pages that it needs to compute all its tokens."""
        return self.pool.pages_for(sequence.num_tokens) - len(sequence.page_table)

    def check_kept(self, sequence: Sequence) -> None:
        """The pages that it keeps hold all that it has computed."""
        size = self.pool.page_size
        assert len(sequence.page_table) == self.pool.pages_for(sequence.num_computed_tokens)
        for position in range(sequence.num_computed_tokens):
            context = self.model.context_of(sequence.token_ids[: position + 1], sequence.cache_salt)
            expected = KVEntry(position, sequence.token_ids[position], context)
            assert self.model.device[sequence.page_table[position // size]][position % size] == expected

    def release_kept(self, sequence: Sequence) -> None:
        self.check_kept(sequence)
        self.scheduler.holds.release_kept(sequence.key)
        del self.kept[sequence.key]

    def begun(self, request_id: str, prompt: list[int], num_generated: int, max_tokens: int) -> Request:
        """A request of which the model has given so many tokens already."""
        request = Request(
            request_id=request_id,
            token_ids=TokenIds.of(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        tokens = self.model.generate(self.sequence_of(request), len(prompt) + num_generated)
        return Request(
            request_id=request_id,
            token_ids=TokenIds.of(prompt),
            sampling=request.sampling,
            generated_token_ids=tuple(tokens[len(prompt) :]),
        )

    def sequence_of(self, request: Request) -> Sequence:
        return Sequence.from_request(request, request.choice, max_model_len=1 << 20)

    def _release(self, claim: FilledPages) -> None:
        self.scheduler.holds.release(claim.pages, claim.owner)
        self.used.pop(str(claim.owner), None)
