"""Routing in hindsight: what the router predicted of a prompt, against what the workers measured.

For each prompt that the policy predicted and a worker measured:

- Terms: the predicted and the measured seconds of the wait (the queue, and a pull that the queue does not
  hide), of the computation, of the hand-off and until the first token, and the size of each error.
- Prefix: the tokens that the router expected in the worker's cache, and the tokens that were not computed.
- Regret: the measured cost of the chosen pair beyond the predicted cost of the best other pair
  (`Decision.regret_s`), 0 when the choice was right. A pair that a wrong prediction made cheap has regret.
  Regret includes the errors of the cost model, which the terms show apart.

Repeated tokens are counted at dispatch, from the page keys alone: prompts that begin like an earlier one.
They do not depend on reports of workers: repeats without hits show that a cache, or its reports, do not work.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Final

from baton.messages.control import Decision
from baton.messages.status import Times
from baton.pages import KEY_BYTES
from baton.router.policies.candidates import PairCandidate

MAX_PREFIXES: Final = 2**14  # that are remembered, about ten a prompt


class Hindsight:
    """Counts predictions and outcomes. `times` has the histograms, by name, for the router's status."""

    def __init__(self, counters: Counter[str]) -> None:
        """counters: of the router, shown to operators."""
        self.times: defaultdict[str, Times] = defaultdict(Times)
        self._counters = counters
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()  # keys of pages; least recently seen first

    def dispatched(self, keys: bytes, num_tokens: int, page_size: int) -> None:
        """Count a prompt's tokens, and those of its longest remembered prefix of 1, 2, 4, 8 ... pages.

        keys: of the prompt's pages, of `page_size` tokens each.
        """
        prefixes, num_repeated, num_pages = self._prefixes, 0, 1
        while num_pages * KEY_BYTES <= len(keys):
            key = keys[(num_pages - 1) * KEY_BYTES : num_pages * KEY_BYTES]
            if key in prefixes:
                num_repeated = num_pages
                prefixes.move_to_end(key)
            else:
                prefixes[key] = None
            num_pages *= 2
        while len(prefixes) > MAX_PREFIXES:
            prefixes.popitem(last=False)
        self._counters["routed_prompt_tokens"] += num_tokens
        self._counters["repeated_prompt_tokens"] += num_repeated * page_size

    def measured(self, decision: Decision, candidates: Iterable[PairCandidate]) -> None:
        """Count the outcome of a prompt. candidates: every pair that was compared for it; may be empty."""
        times, terms = decision.measured, decision.chosen.terms
        if times is None or not terms:
            return
        counters = self._counters
        counters["measured_prompt_tokens"] += times.num_tokens
        counters["predicted_prefix_tokens"] += min(decision.chosen.num_held_tokens, times.num_tokens)
        counters["realised_prefix_tokens"] += times.num_tokens - times.num_new_tokens
        self._compare("queue", terms["queue_s"] + terms["pull_s"], times.queued_s)
        self._compare("compute", terms["compute_s"], times.used_s)
        if decision.chosen.prefill:
            self._compare("handoff", terms["handoff_s"], times.exposed_s)
        if decision.first_token_s is not None:
            self._compare("ttft", decision.chosen.ttft_s, decision.first_token_s)
        chosen, taken_s = decision.chosen, decision.measured_s
        pair = chosen.decode, chosen.prefill
        others = [each.total_s for each in candidates if (each.decode, each.prefill) != pair]
        if taken_s is not None:
            self.times["regret"].observe(max(0.0, taken_s - min(others, default=taken_s)))

    def _compare(self, term: str, predicted_s: float, measured_s: float) -> None:
        self.times[f"predicted_{term}"].observe(predicted_s)
        self.times[f"measured_{term}"].observe(measured_s)
        self.times[f"error_{term}"].observe(abs(predicted_s - measured_s))
