"""How much work requests are, in tokens: what is expected of one, and what it has used in the end.

Work is the prompt's tokens that have to be computed and the tokens of the answer. What is expected follows
what the same tenant's requests have been: how long its answers, how much of its prompts was there already.
An attempt at what workers have begun with has its prompt for nothing: its tenant has paid for it once.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from baton.request import Request
from baton.router.books import EXPECTED_OUTPUT_TOKENS, Key

MAX_TENANTS: Final = 4096  # whose habits are remembered; the least lately seen is forgotten
LEAST_GAIN: Final = 0.05  # of a new figure, in a mean


class Work(NamedTuple):
    """Tokens."""

    prompt: float
    answer: float

    @property
    def total(self) -> float:
        return self.prompt + self.answer


class Charge(NamedTuple):
    """What an attempt was charged, until it has ended."""

    rank: int
    tenant: str
    work: Work
    num_tokens: int  # of the whole prompt
    is_begun: bool = False  # workers have had an earlier attempt
    is_computed: bool = False  # the prompt's work is known by now


class _Habit:
    __slots__ = ("answer", "num_answers", "num_prompts", "share")

    def __init__(self) -> None:
        self.answer = float(EXPECTED_OUTPUT_TOKENS)
        self.share = 1.0  # of its prompts that has to be computed
        self.num_answers = 0
        self.num_prompts = 0


class WorkLedger:
    def __init__(self, correct: Callable[[Charge, float], None]) -> None:
        """`correct(charge, work)`: an attempt has used so much more than it was charged, or less."""
        self._correct = correct
        self._charges: dict[Key, Charge] = {}
        self._habits: OrderedDict[str, _Habit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, key: Key) -> bool:
        return key in self._charges

    def expect(self, request: Request, *, is_begun: bool = False) -> Work:
        habit = self._habit(request.tenant)
        prompt = 0.0 if is_begun else request.num_tokens * habit.share
        limit = request.sampling.max_tokens
        answer = habit.answer
        if limit is not None:
            answer = min(answer, max(0, limit - len(request.generated_token_ids)))
        return Work(prompt, answer)

    def charge(self, key: Key, charge: Charge) -> None:
        """It is let out; the key must be new."""
        assert key not in self._charges, key
        self._charges[key] = charge

    def get(self, key: Key) -> Charge | None:
        return self._charges.get(key)

    def computed(self, key: Key, num_new_tokens: int) -> None:
        """So much of its prompt had to be computed. What is unknown, or known already, changes nothing."""
        charge = self._charges.get(key)
        if charge is None or charge.is_computed:
            return
        habit = self._habit(charge.tenant)
        habit.num_prompts += 1
        share = num_new_tokens / max(1, charge.num_tokens)
        habit.share += (min(1.0, share) - habit.share) * max(LEAST_GAIN, 1 / habit.num_prompts)
        used = min(charge.work.prompt, float(num_new_tokens)) if charge.is_begun else float(num_new_tokens)
        self._charges[key] = charge._replace(work=Work(used, charge.work.answer), is_computed=True)
        self._correct(charge, used - charge.work.prompt)

    def ended(self, key: Key, num_answered: int | None) -> Charge | None:
        """num_answered: tokens of this attempt; None: nobody knows, what was expected stands."""
        charge = self._charges.pop(key, None)
        if charge is None or num_answered is None:
            return charge
        self._correct(charge, num_answered - charge.work.answer)
        if num_answered:
            habit = self._habit(charge.tenant)
            habit.num_answers += 1
            habit.answer += (num_answered - habit.answer) * max(LEAST_GAIN, 1 / habit.num_answers)
        return charge._replace(work=Work(charge.work.prompt, num_answered))

    def answer_of(self, tenant: str) -> float:
        """Tokens that its answers have, by the way."""
        return self._habit(tenant).answer

    def _habit(self, tenant: str) -> _Habit:
        habit = self._habits.get(tenant)
        if habit is None:
            habit = self._habits[tenant] = _Habit()
            if len(self._habits) > MAX_TENANTS:
                self._habits.popitem(last=False)
        else:
            self._habits.move_to_end(tenant)
        return habit
