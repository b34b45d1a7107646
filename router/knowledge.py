"""What a router knows beside who is there: what workers hold, how fast they are, and why it chose as it did.

Workers are asked for what they hold only by a router whose policy looks at it.
"""

from collections import Counter
from random import Random
from typing import Final

from baton.clock import Clock
from baton.control import Measured, PageEvents, PagesWanted, Submit
from baton.decision import Decision, Weighed
from baton.node import Peer
from baton.router.books import Books
from baton.router.chooser import Choice, Chooser
from baton.router.cost_model import CostModel
from baton.router.decisions import Decisions, weighed
from baton.router.look import Known
from baton.router.pairing import Pair
from baton.router.prefix_index import MAX_PAGES, PrefixIndex
from baton.router.prompt_keys import PromptKeys
from baton.router_config import RouterSettings
from baton.worker import Worker

LOOKING: Final = ("prefix", "cost")  # policies


class Knowledge:
    def __init__(self, config: RouterSettings, clock: Clock, books: Books, counters: Counter[str]) -> None:
        self.index = PrefixIndex(clock, MAX_PAGES if config.policy in LOOKING else 1024, seed=config.seed)
        self.model = CostModel()
        self.decisions = Decisions(clock)
        self.chooser: Chooser | None = None
        self._counters = counters
        if config.policy in LOOKING:
            known = Known(books, self.index, self.model, PromptKeys())
            only_prefix = config.policy == "prefix"
            self.chooser = Chooser(clock, known, Random(config.seed), only_prefix=only_prefix)

    def joined(self, worker: Worker, peer: Peer) -> None:
        if self.chooser is not None:
            self.index.join(worker)
            peer.send(PagesWanted())

    def gone(self, worker_id: str) -> None:
        self.index.forget(worker_id)
        self.model.forget(worker_id)

    def tick(self) -> None:
        self.index.tick()

    def pages(self, peer: Peer, events: PageEvents) -> None:
        """Changes of what this worker holds, of which some may have been lost."""
        if self.chooser is not None and not self.index.apply(peer.hello.id, events):
            peer.send(PagesWanted())

    def measured(self, worker_id: str, measured: Measured) -> None:
        self.model.learn(worker_id, measured)
        for times in measured.prefills:
            decision = self.decisions.get((times.request_id, times.attempt))
            if decision is None or worker_id not in (decision.chosen.prefill, decision.chosen.decode):
                continue
            self.decisions.measured(times)
            chosen = decision.chosen
            if times.pulled_bytes and chosen.source:
                self.model.learn_pull(chosen.source, worker_id, times)
            if times.moved_bytes and chosen.prefill == worker_id:
                self.model.learn_handoff(worker_id, chosen.decode, times)
                self.model.learn_size(times.moved_bytes, times.num_tokens)

    def decided(self, submit: Submit, pair: Pair) -> None:
        request, choice = submit.request, pair.choice
        chosen = Weighed(decode=pair.decode.id, prefill=pair.prefill.id if pair.prefill else "")
        others: tuple[Weighed, ...] = ()
        if choice is not None:
            chosen, others = weighed(choice.candidate), tuple(map(weighed, choice.candidates))
            self._count(choice)
        decision = Decision(
            request_id=request.request_id,
            attempt=request.attempt,
            age_s=0.0,
            reason=pair.reason,
            num_tokens=request.num_tokens,
            chosen=chosen,
            weighed=others,
        )
        self.decisions.add(decision)

    def _count(self, choice: Choice) -> None:
        self._counters["decisions"] += 1
        self._counters["blind_decisions"] += choice.is_blind
        self._counters["pulls"] += choice.source is not None
        self._counters["computed_locally"] += not choice.candidate.prefill
