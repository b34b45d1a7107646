"""The interface of a model replica, and the part that needs no model: requests, pages, scheduling.

Workers use `Replica`. `Engine` (engine/engine.py) adds a model on this machine's devices; the simulator adds
a model of numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered
from time import perf_counter
from typing import Final, NamedTuple, Protocol

import msgspec

from baton.engine.cache.page_pool import Owner, PagePool, PageState
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import (
    Batch,
    PageCopy,
    ScheduledChunk,
    Sequence,
    check_request,
)
from baton.engine.scheduler.step_planner import PressureMode
from baton.messages.control import PageChanges
from baton.messages.status import Sizes, Times, snapshot
from baton.messages.workers import Load, StepTimes
from baton.request import FilledPages, Request, StepOutput


class LayerWatch(Protocol):
    """Learns, while a step runs, which layers are written, so that KV can be sent while later layers compute.

    Both methods are called from within `Replica.step`, in its thread, and delay it; an exception fails the
    step. The pages of the step's chunks are allocated by then and stay in place until the step ends. Apart
    from these pages, page tables and counts are as before the step. Neither method may call the replica.
    """

    def begin(self, chunks: Ordered[ScheduledChunk]) -> int:
        """The step computes these chunks. Returns the number of layer groups to report; 0 for none."""
        ...

    def layers_written(self, first: int, stop: int) -> None:
        """The keys and values of layers [first, stop) of all chunks are in their pages.

        On a GPU this holds for work that follows on the current stream.
        """
        ...


# The parts of a step on the host, in order. `forward` and `sample` compute on a CPU and launch on a GPU;
# `device` waits for a GPU's tokens, and `output` gives them to their sequences.
PHASES: Final = ("schedule", "build", "forward", "sample", "device", "output")


class StepMeter:
    """The figures of a replica's steps since its start.

    Each call of `load` lets the next step time its phases; a worker calls `load` once a second.
    """

    def __init__(self) -> None:
        self._is_sampled = False  # the phases of the present step are timed
        self.num_padded_tokens = 0
        self._lap_s = 0.0
        self._times = {name: Times() for name in ("step", *(f"step_{phase}" for phase in PHASES))}
        self._step_tokens = Sizes()

    def begin(self, began_s: float) -> None:
        """Note the beginning of a step, by perf_counter."""
        self._lap_s = began_s

    def lap(self, phase: str, now_s: float | None = None) -> None:
        """Note the end of a phase, if this step's phases are timed. now_s: by perf_counter; None: now."""
        if not self._is_sampled:
            return
        now_s = perf_counter() if now_s is None else now_s
        self._times[f"step_{phase}"].observe(now_s - self._lap_s)
        self._lap_s = now_s

    def end(self) -> None:
        """Time no more phases until the next `load`."""
        self._is_sampled = False

    def observe(self, step_s: float, num_tokens: int) -> None:
        """Count a step. step_s: since the step before, if that left work. num_tokens: without padding."""
        self._times["step"].observe(step_s)
        self._step_tokens.observe(num_tokens)

    def load(self, load: Load) -> Load:
        """Return the load with these figures."""
        self._is_sampled = True
        return msgspec.structs.replace(
            load,
            times=snapshot(self._times),
            step_tokens=self._step_tokens.copy(),
            num_padded_tokens=self.num_padded_tokens,
        )


class Replica(ABC):
    """One model replica: requests in, tokens out.

    1. `add` checks a request and makes one sequence for each choice.
    2. `step` plans, runs the model, samples, and returns one StepOutput for each new token.
    3. A request ends when every choice has had an output with a finish reason; `abort` ends a request at any
       time.

    For KV that comes from elsewhere or goes there:

    4. `claim_prefix` holds the known prefix of a prompt. `make_room` frees pages, which the caller reserves
       in `pages`, the ledger. `add` takes both kinds of pages as FilledPages and continues after them.
    5. `add` returns the sequences. With `keeps_pages` their pages stay after the last token, until
       `release_kept`.

    A replica knows nothing of prefill and decode as roles, of text, tenants or peers.
    """

    def __init__(self, scheduler: Scheduler, *, vocab_size: int, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._step_meter = StepMeter()
        # The latest batch that computed anything, and the seconds that each token of a sequence took.
        self._last_step: tuple[Batch, float] | None = None

    # Requests.

    @abstractmethod
    def add(
        self, request: Request, filled: FilledPages | None = None, *, keeps_pages: bool = False
    ) -> tuple[Sequence, ...]:
        """Accept a request; return the sequence of each choice. Callers only read sequences, between steps.

        filled: KV that the request brings, for a request of one choice; the pages belong to the replica once
        the request is accepted. Raises InvalidRequest when the request cannot run, ValueError for pages that
        the request cannot start with and IntegrityError when their owner does not use them all; an error
        changes nothing.
        """

    @abstractmethod
    def step(self, watch: LayerWatch | None = None) -> list[StepOutput]:
        """Advance every scheduled sequence; the list is empty while prompts are still being computed.

        watch: learns which layers are written while the step runs.
        """

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if `add` would refuse the request because of its own values."""
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    def abort(self, request_id: str, choice: int | None = None) -> list[StepOutput]:
        """End the request, or one choice; return a last output, without a token, for each live choice."""
        return [last_output(sequence) for sequence in self._abort(request_id, choice)]

    def set_pressure(self, *, small_chunks: bool, makes_room: bool) -> None:
        """Set how the next steps behave while the cluster is overloaded; see `PressureMode`."""
        self.scheduler.pressure_mode = PressureMode(small_chunks=small_chunks, makes_room=makes_room)

    def has_work(self) -> bool:
        """True when any sequence is live."""
        return self.scheduler.has_work()

    @property
    def is_blocked(self) -> bool:
        """True when no sequence runs and a waiting one lacks only pages. Valid after a step."""
        return self.scheduler.is_blocked

    # KV that comes from elsewhere or goes there.

    @property
    def pages(self) -> PagePool:
        """The ledger of pages; a step that fails replaces it."""
        return self.scheduler.pool

    def claim_prefix(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages:
        """Hold the device pages of the longest known prefix; there may be none.

        The prefix ends at a page boundary, leaves one token to compute, and has a multiple of `multiple_of`
        tokens. The pages are given to `add`, alone or followed by other pages of `owner`, or to `release`.
        ValueError when the owner has a claim already.
        """
        return self.scheduler.holds.claim(token_ids, salt, owner, multiple_of=multiple_of)

    def release(self, filled: FilledPages) -> None:
        """Release pages that were not added. IntegrityError when the owner does not use them all."""
        self.scheduler.holds.release(filled.pages, filled.owner)

    def release_kept(self, request_id: str, choice: int = 0) -> None:
        """Release the pages that are kept since the last token of a sequence, if any."""
        self.scheduler.holds.release_kept((request_id, choice))

    @property
    def num_available_pages(self) -> int:
        """The pages that `make_room` grants now."""
        return self.scheduler.holds.num_reservable()

    def make_room(self, num_pages: int) -> bool:
        """Free pages in the ledger, to be reserved at once; False when so many cannot be granted.

        `ExternalPageHolds` says which pages are left to running sequences.
        """
        if num_pages > self.num_available_pages:
            return False
        self.scheduler.cache.make_room(num_pages, keep=False)
        return True

    def page_keys(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]:
        """The keys of the full pages of these tokens in a replica of this model with `page_size`."""
        return self.scheduler.cache.keys_of(token_ids, salt, page_size)

    def pin(self, keys: Ordered[bytes], reader: Owner) -> list[int] | None:
        """Device pages with these keys, which the reader uses until it releases them in the ledger.

        Host pages are copied to the device. None: a page is absent, or there is no room.
        """
        pinned = self.scheduler.holds.pin(keys, reader)
        if pinned is None:
            return None
        pages, copies = pinned
        if copies:
            self._copy_to_device(tuple(copies), pages, reader)
        return pages

    def load_pages(self, keys: Ordered[bytes]) -> Callable[[], bool] | None:
        """Have the pages with these keys that are only on disk read to the host, where `pin` finds them.

        Returns None when no page is to come; else a function that returns True while pages are to come.
        """
        return self.scheduler.cache.load(keys)

    def take_page_changes(self, *, is_snapshot: bool = False) -> PageChanges:
        """Prefix-cache changes since the last call; with is_snapshot, the whole cache."""
        return self.scheduler.cache.take_changes(is_snapshot=is_snapshot)

    # Figures.

    def load(self) -> Load:
        """Return the engine's part of a worker's load."""
        scheduler, pool, cache = self.scheduler, self.scheduler.pool, self.scheduler.cache
        load = Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages={state.name.lower(): pool.count(state) for state in PageState},
            prefix_queries_tokens=cache.num_queried_tokens,
            prefix_hits_tokens=cache.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_drafts=scheduler.num_drafts,
            num_draft_tokens=scheduler.num_draft_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
        )
        return self._step_meter.load(load)

    def last_step(self) -> StepTimes | None:
        """The latest step that computed anything; None before the first one."""
        if self._last_step is None:
            return None
        batch, step_s = self._last_step
        return StepTimes(
            num_sequences=len(batch.sequences),
            num_new_tokens=sum(chunk.num_tokens for chunk in batch.prompt_chunks),
            num_context_tokens=int(batch.starts.sum()) + batch.num_tokens,
            step_s=step_s,
        )

    def _add(
        self,
        request: Request,
        filled: FilledPages | None,
        keeps_pages: bool,
        eos_token_ids: Collection[int] = (),
    ) -> tuple[Sequence, ...]:
        if filled is not None and request.sampling.n > 1:
            raise ValueError(
                f"request {request.request_id}: {request.sampling.n} choices cannot share brought pages"
            )
        sequences = []
        for choice in request.choices:
            sequence = Sequence.from_request(
                request, choice, max_model_len=self.max_model_len, eos_token_ids=eos_token_ids
            )
            sequence.keeps_pages = keeps_pages
            self.scheduler.add(sequence, filled)
            sequences.append(sequence)
        return tuple(sequences)

    def _abort(self, request_id: str, choice: int | None) -> list[Sequence]:
        return self.scheduler.abort(request_id, choice)

    def _copy_to_device(self, copies: tuple[PageCopy, ...], pages: list[int], reader: Owner) -> None:
        """Copy host pages to pages that the reader holds."""
        raise NotImplementedError("this replica has no host tier")


def last_output(sequence: Sequence, error: str | None = None, *, is_invalid: bool = False) -> StepOutput:
    """The last output of a sequence that has ended without another token."""
    return StepOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        index=sequence.num_generated_tokens,
        token_id=None,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        error=error,
        is_invalid=is_invalid,
    )


class SoughtPrefix(NamedTuple):
    """A request's prefix that may be pulled from a peer: the `Prefix` of kvtransfer/prefixes.py."""

    engine: Replica
    request: Request
    owner: str  # has the claim on known pages, and owns the pages that come

    @property
    def num_tokens(self) -> int:
        """Tokens that may be pulled.

        The last token is never pulled, nor more than the quota of pages leaves, nor any token of a request
        that still needs prompt logprobs.
        """
        if self.request.sampling.prompt_logprobs is not None and not self.request.generated_token_ids:
            return 0
        most, quota = self.request.num_tokens - 1, self.request.scheduling_key.quotas.max_kv_pages
        if quota is None:
            return most
        pages = self.engine.pages
        return max(0, min(most, (quota - pages.accounts.held(self.request.tenant)) * pages.page_size))

    def claim(self, multiple_of: int) -> FilledPages:
        """Hold the known part, on the request's scheduling key; see `Replica.claim_prefix`."""
        self.engine.pages.accounts.book(self.owner, self.request.tenant)
        token_ids, salt = self.request.all_token_ids, self.request.page_salt
        return self.engine.claim_prefix(token_ids, salt, self.owner, multiple_of=multiple_of)

    def keys(self, page_size: int) -> list[bytes]:
        """The keys of the full pages of that size."""
        return self.engine.page_keys(self.request.all_token_ids, self.request.page_salt, page_size)
