"""Draft tokens by lookup: those that followed the latest tokens where these occurred before.

`LookupDrafter` looks in the sequence itself (n-gram, prompt lookup), or also in earlier answers to the same
tenant (suffix). `TokenIndex` finds where the latest tokens occurred before, in time that does not grow with
the length of the sequence.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from baton.config.engine import SpeculativeConfig
from baton.engine.scheduler.sequence import Batch, Sequence, SequenceKey
from baton.engine.speculation.draft_lengths import FORCED_RATE, Acceptance, ForcedTokens, StepCosts
from baton.request import FinishReason

MAX_INDEXED: Final = 2**16  # the last tokens of a prompt that are indexed; each takes about 100 bytes
INDEXED_A_STEP: Final = 4096  # tokens of prompts, for all sequences together
MAX_CANDIDATES: Final = 16  # the latest places of an n-gram that are compared
SEPARATOR: Final = -1  # between answers
MAX_TENANT_TOKENS: Final = 2**17  # of earlier answers, for each tenant
MAX_TOKENS: Final = 2**20  # of all tenants together


class Match(NamedTuple):
    """An earlier place in an index where the latest tokens occurred."""

    token_ids: Ordered[int]  # of the index
    end: int  # of the match: the token that followed is here
    length: int  # in tokens

    def moved(self, num_tokens: int) -> Self | None:
        """The match, extended by so many tokens that also agreed; None at the end of an answer."""
        end = self.end + num_tokens
        if end >= len(self.token_ids) or self.token_ids[end] == SEPARATOR:
            return None
        return self._replace(end=end, length=self.length + num_tokens)

    def copy(self, num_tokens: int) -> list[int]:
        """The tokens that followed. A match that reaches the end of its index goes on with its own copy."""
        copied = list(self.token_ids[self.end : self.end + num_tokens])
        if SEPARATOR in copied:
            return copied[: copied.index(SEPARATOR)]
        period = len(copied)
        while 0 < len(copied) < num_tokens:
            copied.append(copied[-period])
        return copied


class TokenIndex:
    """The places of every n-gram of a growing list of tokens.

    Places of one n-gram form a chain, the latest first, as in deflate. An n-gram is known by its hash; tokens
    are compared before a place counts as a match.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """shortest, longest: of matches, in tokens; places are found by their last `shortest` tokens."""
        self.token_ids = array("i")
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[int, int] = {}  # hash of an n-gram -> its latest end
        self._before = array("i")  # end of an n-gram -> the end of the same n-gram before; 0: none

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens at the end."""
        known, shortest, latest, before = self.token_ids, self._shortest, self._latest, self._before
        first = len(known)
        known.extend(token_ids)
        if not before:
            before.append(0)
        for end in range(first + 1, len(known) + 1):
            if end < shortest:
                before.append(0)
                continue
            key = hash(known[end - shortest : end].tobytes())
            before.append(latest.get(key, 0))
            latest[key] = end

    def find_earlier(self, followed: Match | None = None) -> Match | None:
        """The longest earlier occurrence of the latest tokens in the same list; of equal ones, `followed`."""
        known = self.token_ids
        if len(known) <= self._shortest:
            return None
        return self._longest_match(known[-self._longest :], self._before[-1], followed)

    def find(self, latest: "array[int]", found: Match | None) -> Match | None:
        """The longest occurrence of the latest tokens, unless `found` is as long."""
        if len(latest) < self._shortest:
            return found
        end = self._latest.get(hash(latest[-self._shortest :].tobytes()), 0)
        return self._longest_match(latest[-self._longest :], end, found)

    def _longest_match(self, latest: "array[int]", end: int, found: Match | None) -> Match | None:
        """The longest match on the chain from `end` on, if longer than `found`."""
        known, before, most = self.token_ids, self._before, len(latest)
        length = max(self._shortest - 1, 0 if found is None else found.length)
        for _ in range(MAX_CANDIDATES):
            if not end or length >= most:
                break
            # Longer than what was found only if it is the same that far back.
            if end > length and known[end - length - 1 : end] == latest[most - length - 1 :]:
                length += 1
                while length < min(most, end) and known[end - length - 1] == latest[most - length - 1]:
                    length += 1
                found = Match(known, end, length)
            end = before[end]
        return found


class EarlierAnswers:
    """Answers that have ended, of each tenant apart, bounded in tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        # tenant -> the index that grows, and the full one before it
        self._of_tenants: OrderedDict[tuple[str, bytes], list[TokenIndex]] = OrderedDict()
        self._num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Learn the answer of a sequence, with the tokens that led to it."""
        tenant = sequence.scheduling_key, sequence.cache_salt
        indices = self._of_tenants.setdefault(tenant, [])
        self._of_tenants.move_to_end(tenant)
        answer = sequence.token_ids[max(0, sequence.num_prompt_tokens - self._longest) :]
        learned = [*answer[-(MAX_TENANT_TOKENS // 4) :], SEPARATOR]
        if not indices or len(indices[0]) + len(learned) > MAX_TENANT_TOKENS // 2:
            indices.insert(0, TokenIndex(self._shortest, self._longest))
            for full in indices[2:]:
                self._num_tokens -= len(full)
            del indices[2:]
        indices[0].extend(learned)
        self._num_tokens += len(learned)
        while self._num_tokens > MAX_TOKENS and len(self._of_tenants) > 1:
            _, forgotten = self._of_tenants.popitem(last=False)
            self._num_tokens -= sum(map(len, forgotten))

    def find(self, sequence: Sequence, found: Match | None) -> Match | None:
        """The longest match of the latest tokens in answers to the tenant, if longer than `found`."""
        latest = array("i", sequence.token_ids[-self._longest :])
        for index in self._of_tenants.get((sequence.scheduling_key, sequence.cache_salt), ()):
            found = index.find(latest, found)
        return found


@dataclass(slots=True)
class _Lookup:
    """The index and the acceptance rate of one sequence."""

    index: TokenIndex
    first: int  # the token of the sequence that the index begins with
    acceptance: Acceptance = field(default_factory=Acceptance)
    followed: Match | None = None  # the place that the last proposal was copied from


class LookupDrafter:
    """Proposes what followed the latest tokens earlier in the sequence or, with suffix, in other answers."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts, forced_tokens: ForcedTokens) -> None:
        self._config = config
        self._costs = costs
        self._forced_tokens = forced_tokens
        self._earlier: EarlierAnswers | None = None
        if config.chosen_method == "suffix":
            self._earlier = EarlierAnswers(config.shortest_match, config.prompt_lookup_max)
        self._lookups: WeakKeyDictionary[Sequence, _Lookup] = WeakKeyDictionary()
        self._num_indexable = 0  # tokens that may still be indexed in this step

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """As `Drafter.propose`."""
        self._num_indexable = INDEXED_A_STEP
        proposals, rates = [], []
        for sequence in decodes:
            proposal, rate = self._propose(sequence)
            proposals.append(proposal)
            rates.append(rate)
        nums = self._costs.choose_num_drafts(
            rates, [len(each) for each in proposals], num_decodes=len(decodes), num_tokens=num_tokens
        )
        return {
            sequence.key: proposal[:num]
            for sequence, proposal, num in zip(decodes, proposals, nums, strict=True)
            if num
        }

    def observe(self, batch: Batch, step_s: float) -> None:
        """As `Drafter.observe`."""
        if not batch.prompt_chunks:
            self._costs.observe(batch.num_tokens, step_s, has_drafts=bool(batch.drafts))

    def finish(self, sequence: Sequence) -> None:
        """Forget the sequence; learn its answer if it is whole."""
        self._lookups.pop(sequence, None)
        if self._earlier is not None and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._earlier.add(sequence)

    def _propose(self, sequence: Sequence) -> tuple[Ordered[int], float]:
        """Draft tokens of one sequence, and its acceptance rate."""
        most, token_ids = self._config.num_speculative_tokens, sequence.token_ids
        forced = self._forced_tokens(sequence)
        if forced:
            return forced[:most], FORCED_RATE
        lookup = self._lookups.get(sequence)
        if lookup is None:
            index = TokenIndex(self._config.shortest_match, self._config.prompt_lookup_max)
            first = max(0, len(token_ids) - MAX_INDEXED)
            lookup = self._lookups[sequence] = _Lookup(index, first)
        num_right = lookup.acceptance.observe(token_ids)
        if not self._index(lookup, token_ids):
            return (), 0.0
        followed = lookup.followed
        if followed is not None:
            followed = None if num_right is None else followed.moved(num_right)
        match = lookup.index.find_earlier(followed)
        if self._earlier is not None:
            match = self._earlier.find(sequence, match)
        lookup.followed = match
        # One more than a step may accept: the token after the last accepted one is compared, too.
        proposal = [] if match is None else match.copy(most + 1)
        lookup.acceptance.remember(token_ids, proposal)
        return proposal[:most], lookup.acceptance.rate

    def _index(self, lookup: _Lookup, token_ids: list[int]) -> bool:
        """Index the new tokens, those of a long prompt over several steps; return True once all are."""
        start = lookup.first + len(lookup.index)
        new = token_ids[start : start + max(self._num_indexable, self._config.num_speculative_tokens + 1)]
        lookup.index.extend(new)
        self._num_indexable -= len(new)
        return start + len(new) == len(token_ids)
