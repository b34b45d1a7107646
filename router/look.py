"""One prompt as it would be at each worker: what is held there, what it would wait for and take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from baton.decision import PullSource
from baton.request import Request
from baton.router.books import EXPECTED_OUTPUT_TOKENS, Books, num_kv_tokens, party_of
from baton.router.cost_model import CostModel
from baton.router.costs import Computer, Decoder, Load, Source
from baton.router.index_match import Match
from baton.router.membership import Member
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import Family, PromptKeys, family_of, kin_of
from baton.router.sides import Side
from baton.worker import WorkerRole

MAX_SOURCES: Final = 2


@dataclass(frozen=True)
class Known:
    """What is known of all workers."""

    books: Books
    index: PrefixIndex
    model: CostModel
    keys: PromptKeys


class Look:
    def __init__(self, known: Known, request: Request, load: Load, now_s: float) -> None:
        self.load = load
        self._known = known
        self._request = request
        self._now_s = now_s
        self._num_kv_tokens = num_kv_tokens(request)
        self._party = party_of(request)
        self._found: dict[Family, tuple[bytes, Match]] = {}
        self._located: dict[str, PullSource | None] = {}

    def num_held_tokens(self, member: Member) -> int:
        """Of the prompt's first."""
        slot = self._known.index.slot(member.id)
        if slot is None:
            return 0
        return int(self._match(family_of(member.worker))[1].num_pages[slot]) * member.worker.page_size

    def holders(self, side: Side, most: int) -> list[Member]:
        """At most so many of each family, and none that is left out holds more of the prompt."""
        found: list[Member] = []
        for family in side.families:
            lengths = self._match(family)[1].num_pages
            found += side.holders(self._known.index, family, lengths, most)
        return found

    def keys(self, member: Member) -> bytes:
        """Of the prompt's pages, as this worker names them."""
        return self._match(family_of(member.worker))[0]

    def computer(self, member: Member) -> Computer:
        speeds = self._known.model.of(member.id)
        account = self._known.books.account(member.id)
        wait_s = account.wait_s(self._now_s)
        if wait_s:
            wait_s *= account.prompts.part_before(self._party, self.load.num_tokens)
        if member.worker.role is WorkerRole.PREFILL:
            wait_s += account.num_unknown * speeds.mean_compute_s
        held = self.num_held_tokens(member)
        return Computer(member.id, wait_s, held, speeds.compute_s, kin_of(member.worker))

    def decoder(self, member: Member) -> Decoder:
        worker, account = member.worker, self._known.books.account(member.id)
        num_running = account.num_attempts + account.num_unknown
        num_tokens = account.num_tokens + account.num_unknown_tokens
        fixed_s, sequence_s, context_s, _ = self._known.model.of(member.id).step.coefficients
        step_s = fixed_s + sequence_s * num_running + context_s * num_tokens
        num_slots = max(1, worker.num_pages * worker.page_size)
        share = max(
            (num_tokens + self._num_kv_tokens) / num_slots, (num_running + 1) / max(1, worker.max_num_seqs)
        )
        room_s = max(0.0, share - 1.0) * EXPECTED_OUTPUT_TOKENS * step_s
        token_harm_s = sequence_s + context_s * self.load.num_tokens
        return Decoder(self.computer(member), num_running, step_s, room_s, token_harm_s)

    def sources(self, members: Iterable[Member]) -> Sequence[Source]:
        """Those that hold most of the prompt; expected pages count until `locate` was asked."""
        held = [(self._num_at(member), member.id, kin_of(member.worker)) for member in members]
        most = sorted((each for each in held if each[0]), reverse=True)[:MAX_SOURCES]
        return [Source(worker, num, self._known.model.pull_s, kin) for num, worker, kin in most]

    def _num_at(self, member: Member) -> int:
        if member.id not in self._located:
            return self.num_held_tokens(member)
        source = self._located[member.id]
        return 0 if source is None else source.num_tokens

    def locate(self, member: Member) -> PullSource | None:
        """None: it is expected to hold them, and has not said yet where."""
        if member.id not in self._located:
            located = self._known.index.locate(member.id, self.keys(member))
            num_tokens = len(located.pages) * member.worker.page_size
            source = PullSource(member.id, num_tokens, *located) if located.pages else None
            self._located[member.id] = source
        return self._located[member.id]

    def _match(self, family: Family) -> tuple[bytes, Match]:
        if family not in self._found:
            keys = self._known.keys.keys(family, self._request)
            self._found[family] = (keys, self._known.index.match(keys))
        return self._found[family]
