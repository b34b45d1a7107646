"""One prompt as it would be at each worker: what is held there, what it would wait for and take."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from baton.decision import PullSource
from baton.request import Request
from baton.router.books import EXPECTED_OUTPUT_TOKENS, Account, Books, Decoding, party_of
from baton.router.cost_model import CostModel, Speeds
from baton.router.costs import Computer, Decoder, Load, Source
from baton.router.index_match import Holdings
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import Family, PromptKeys
from baton.router.prompts_ahead import Claim, Party
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
        self._known = known
        self._request = request
        self.load = load
        self._now_s = now_s
        self._party = party_of(request)
        self._found: dict[Family, tuple[bytes, Holdings]] = {}
        self._located: dict[str, PullSource | None] = {}
        self._yields: dict[Party, bool] = {}  # to the prompt, if that is owed work

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

    def computers(self, stations: Sequence[Station]) -> list[Computer]:
        return [computer for computer, _, _ in self._at(stations)]

    def decoders(self, stations: Sequence[Station]) -> list[Decoder]:
        load, decoders = self.load, []
        num_tokens_more = load.num_tokens + load.num_output_tokens
        for station, (computer, account, speeds) in zip(stations, self._at(stations), strict=True):
            num_running = account.num_attempts + account.num_unknown
            num_tokens = account.num_tokens + account.num_unknown_tokens
            fixed_s, sequence_s, context_s, token_s = speeds.step.coefficients
            step_s = fixed_s + sequence_s * num_running + context_s * num_tokens
            share = (num_tokens + num_tokens_more) / station.num_slots
            seats = (num_running + 1) / station.max_num_seqs
            excess = (seats if seats > share else share) - 1.0
            room_s = excess * EXPECTED_OUTPUT_TOKENS * step_s if excess > 0.0 else 0.0
            token_harm_s = sequence_s + context_s * load.num_tokens
            harm_s = num_running * load.num_output_tokens * token_harm_s
            held_up, patience_s = self._held_up(account), inf
            if held_up.num and station.max_num_batched_tokens:
                num_left = 0.5 * held_up.num_output_tokens / held_up.num  # of each, on average
                longest_s = step_s + token_s * station.max_num_batched_tokens
                patience_s = max(0.0, num_left * longest_s - account.wait_s(self._now_s))
            join_s = room_s + 0.5 * step_s
            decoders.append(Decoder(computer, held_up.num, room_s, join_s, harm_s, patience_s))
        return decoders

    def _at(self, stations: Sequence[Station]) -> list[tuple[Computer, Account, Speeds]]:
        """Flat, as `decoders` is: it is asked for each worker that is compared."""
        account_of, speeds_of = self._known.books.account, self._known.model.of
        family, found = None, []
        for station in stations:
            account, speeds = account_of(station.id), speeds_of(station.id)
            if station.family is not family:
                family = station.family
                num_pages_at = self._holdings(family).num_pages
            num_held_tokens = num_pages_at(station.slot_bit) * station.page_size
            wait_s = self._wait_s(account, num_held_tokens) if account.num_computing else 0.0
            if account.num_unknown and station.is_prefill:
                wait_s += account.num_unknown * speeds.mean_compute_s
            coefficients = speeds.prefill.coefficients
            computer = Computer(station.id, wait_s, num_held_tokens, coefficients, station.kin)
            found.append((computer, account, speeds))
        return found

    def _wait_s(self, account: Account, num_held_tokens: int) -> float:
        load = self.load
        num_new_tokens = max(1, load.num_tokens - num_held_tokens)
        claim = Claim(self._party, num_new_tokens, load.lead, load.lead_of)
        return account.wait_s(self._now_s) * account.prompts.part_before(claim)

    def _held_up(self, account: Account) -> Decoding:
        """Of those that decode there, who would wait for the prompt and has no less right to go on: all, but
        where its tenant is owed work, none of its class that is not, and none of a lower one.
        """
        yields, lead = self._yields, self.load.lead
        is_owed = lead is not None and lead < 0
        num, num_tokens = account.num_unknown, EXPECTED_OUTPUT_TOKENS * account.num_unknown
        for party, decoding in account.decoding.items():
            if is_owed and party not in yields:
                yields[party] = self._yields_to_owed(party)
            if not is_owed or not yields[party]:
                num += decoding.num
                num_tokens += decoding.num_output_tokens
        return Decoding(num, num_tokens)

    def _yields_to_owed(self, party: Party) -> bool:
        own, lead_of = self._party, self.load.lead_of
        if party == own or party.rank != own.rank or lead_of is None:
            return party.rank > own.rank
        lead = lead_of(party)
        return lead is not None and lead >= 0

    def sources(self, computers: Sequence[Computer]) -> list[Source]:
        """Those that hold most of the prompt; expected pages count until `locate` was asked."""
        held = [each.num_held_tokens for each in computers]
        least = min(held)  # who holds no more than that has nothing that anybody wants
        able = [each for each, num in zip(computers, held, strict=True) if num > least]
        most = [(self._num_at(each), each.worker, each.kin) for each in able]
        most.sort(reverse=True)
        pulls_from = self._known.model.pulls_from
        return [
            Source(worker, num, pulls_from(worker), kin) for num, worker, kin in most[:MAX_SOURCES] if num
        ]

    def _num_at(self, computer: Computer) -> int:
        if computer.worker not in self._located:
            return computer.num_held_tokens
        source = self._located[computer.worker]
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
