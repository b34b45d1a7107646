"""Numbered questions to peers, and their answers."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from msgspec.structs import replace

from baton.messages.operations import (
    Decisions,
    Explain,
    FindRequests,
    FoundRequests,
    Migrate,
    Migrated,
    Numbered,
)
from baton.rpc.peers import Peer

MAX_ASKED: Final = 64  # questions at once
AnswerT = TypeVar("AnswerT", Decisions, FoundRequests, Migrated)


class Questions:
    """The open questions of one node. A peer may pass a question on, and give several answers to it."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._open: dict[int, _Question] = {}  # by number

    async def ask(
        self,
        question: Explain | FindRequests | Migrate,
        peers: Sequence[Peer],
        answer: type[AnswerT],
        timeout_s: float,
    ) -> list[AnswerT]:
        """Return the answers that come in time; none without a peer, or with MAX_ASKED questions open.

        Returns once each peer has given its last answer or is lost. FindRequests for one request returns with
        the first answer that has it.
        """
        if not peers or len(self._open) >= MAX_ASKED:
            return []
        self._num_asked = number = self._num_asked + 1
        asked = self._open[number] = _Question(question, peers)
        try:
            for peer in peers:
                peer.send(replace(question, question=number, num_asked=1))
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asked.has_ended.wait()
        finally:
            del self._open[number]
        return [each for each in asked.answers if isinstance(each, answer)]

    def take(self, peer: Peer, answer: Numbered) -> None:
        """Take an answer; one that comes too late changes nothing."""
        asked = self._open.get(answer.question)
        if asked is not None:
            asked.take(peer, answer)

    def lose(self, peer: Peer) -> None:
        """Expect no more answers of a peer."""
        for asked in self._open.values():
            asked.lose(peer)


class _Question:
    """A question that waits for answers, until each of its peers has given its last one or is lost."""

    def __init__(self, question: Numbered, peers: Iterable[Peer]) -> None:
        self.answers: list[Numbered] = []
        self.has_ended = asyncio.Event()
        self._is_for_one = isinstance(question, FindRequests) and bool(question.request_id)
        self._num_answers = dict.fromkeys(peers, 0)  # of the peers that have more

    def take(self, peer: Peer, answer: Numbered) -> None:
        if peer not in self._num_answers:
            return
        self.answers.append(answer)
        self._num_answers[peer] += 1
        if self._num_answers[peer] >= answer.num_asked:
            self.lose(peer)
        if self._is_for_one and isinstance(answer, FoundRequests) and answer.timelines:
            self.has_ended.set()

    def lose(self, peer: Peer) -> None:
        self._num_answers.pop(peer, None)
        if not self._num_answers:
            self.has_ended.set()
