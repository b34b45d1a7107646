"""One prompt as it would be at each worker: what is held there, what it would wait for and take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from baton.decision import PullSource
from baton.request import Request
from baton.router.books import EXPECTED_OUTPUT_TOKENS, Account, Books, num_kv_tokens, party_of
from baton.router.cost_model import CostModel, Speeds
from baton.router.costs import Computer, Decoder, Load, Source
from baton.router.index_match import Holdings
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import Family, PromptKeys
from baton.router.sides import Side, Station

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
        self._account = known.books.account
        self._speeds_of = known.model.of
        self._found: dict[Family, tuple[bytes, Holdings]] = {}
        self._located: dict[str, PullSource | None] = {}

    def holders(self, side: Side, limit: int, first: Station) -> list[Station]:
        """At most so many of each family, and none that is left out holds more of the prompt."""
        found: list[Station] = []
        for family in side.families:
            found += side.holders(family, self._holdings(family), limit, first)
        return found

    def keys(self, station: Station) -> bytes:
        """Of the prompt's pages, as this worker names them."""
        self._holdings(station.family)
        return self._found[station.family][0]

    def computer(self, station: Station) -> Computer:
        return self._computer(station, self._account(station.id), self._speeds_of(station.id))

    def decoder(self, station: Station) -> Decoder:
        account, speeds = self._account(station.id), self._speeds_of(station.id)
        num_running = account.num_attempts + account.num_unknown
        num_tokens = account.num_tokens + account.num_unknown_tokens
        fixed_s, sequence_s, context_s, _ = speeds.step.coefficients
        step_s = fixed_s + sequence_s * num_running + context_s * num_tokens
        share = (num_tokens + self._num_kv_tokens) / station.num_slots
        seats = (num_running + 1) / station.max_num_seqs
        excess = (seats if seats > share else share) - 1.0
        room_s = excess * EXPECTED_OUTPUT_TOKENS * step_s if excess > 0.0 else 0.0
        token_harm_s = sequence_s + context_s * self.load.num_tokens
        computer = self._computer(station, account, speeds)
        return Decoder(computer, num_running, step_s, room_s, token_harm_s)

    def _computer(self, station: Station, account: Account, speeds: Speeds) -> Computer:
        wait_s = account.wait_s(self._now_s) if account.num_computing else 0.0
        if wait_s:
            wait_s *= account.prompts.part_before(party_of(self._request), self.load.num_tokens)
        if station.is_prefill and account.num_unknown:
            wait_s += account.num_unknown * speeds.mean_compute_s
        num_held_tokens = self._holdings(station.family).num_pages(station.slot_bit) * station.page_size
        return Computer(station.id, wait_s, num_held_tokens, speeds.prefill.coefficients, station.kin)

    def sources(self, computers: Iterable[Computer]) -> Sequence[Source]:
        """Those that hold most of the prompt; expected pages count until `locate` was asked."""
        held = [(each.num_held_tokens, each.worker, each.kin) for each in computers if each.num_held_tokens]
        if self._located:
            held = [(self._num_at(worker, num_held), worker, kin) for num_held, worker, kin in held]
        held.sort(reverse=True)
        pull_s = self._known.model.pull_s
        return [Source(worker, num, pull_s, kin) for num, worker, kin in held[:MAX_SOURCES] if num]

    def _num_at(self, worker: str, num_held_tokens: int) -> int:
        if worker not in self._located:
            return num_held_tokens
        source = self._located[worker]
        return 0 if source is None else source.num_tokens

    def locate(self, station: Station) -> PullSource | None:
        """None: it is expected to hold them, and has not said yet where."""
        if station.id not in self._located:
            located = self._known.index.locate(station.id, self.keys(station))
            num_tokens = len(located.pages) * station.page_size
            source = PullSource(station.id, num_tokens, *located) if located.pages else None
            self._located[station.id] = source
        return self._located[station.id]

    def _holdings(self, family: Family) -> Holdings:
        found = self._found.get(family)
        if found is None:
            keys = self._known.keys.keys(family, self._request)
            found = self._found[family] = (keys, self._known.index.holdings(keys))
        return found[1]
