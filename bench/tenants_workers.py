"""Prefill workers of the simulator that order prompts by the shares of tenants, much as an engine does."""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count

from baton.bench.router_workers import DecodeSim, Job, PrefillSim, World
from baton.control import Dispatch, Hello
from baton.router.fair_share import FairShare


class FairPrefillSim(PrefillSim):
    """A step computes up to a chunk's tokens, of the prompts whose tenants are due first."""

    def __init__(self, world: World, hello: Hello) -> None:
        super().__init__(world, hello)
        self._share = FairShare()
        self._jobs: list[tuple[float, int, _Filling]] = []  # a heap, by their tenants' clocks
        self._num_jobs = count()
        self.is_stepping = False

    def fill(self, message: Dispatch, decode: str) -> None:
        job = self.job_of(message, decode)
        request, share = job.request, self._share
        share.join(request.tenant, request.standing.weight)
        share.correct(request.tenant, len(request.token_ids))
        tag = share.clock(request.tenant)  # by when its share has it done
        share.leave(request.tenant)
        heappush(self._jobs, (tag, next(self._num_jobs), _Filling(job)))
        self._step()

    def age(self) -> None:
        self._share.age()

    def _step(self) -> None:
        if self.is_stepping or not self._jobs:
            return
        self.is_stepping = True
        machine, now_s = self.world.machine, self.world.now_s()
        first = self._jobs[0][2].job.request
        begun = self._jobs[0][0] - len(first.token_ids) / first.standing.weight
        self._share.present = max(self._share.present, begun)
        left, step_s, done = machine.chunk_tokens, machine.prefill_s, list[_Filling]()
        while self._jobs and left > 0:
            filling = self._jobs[0][2]
            num_new = filling.compute(left, now_s)
            left -= num_new
            step_s += machine.compute_s(num_new, filling.num_done) - machine.prefill_s
            if filling.num_done == len(filling.job.request.token_ids):
                done.append(filling)
                heappop(self._jobs)
        self.busy_s += step_s
        self.computed_tokens += machine.chunk_tokens - left
        self.world.at(now_s + step_s, lambda: self._stepped(done))

    def _stepped(self, done: Iterable["_Filling"]) -> None:
        self.is_stepping = False
        world = self.world
        for filling in done:
            job = filling.job
            self.tell_times(job, filling.begun_s, len(job.request.token_ids), world.machine.handoff_s)
            world.first_token(job.request, 0, self.worker.id)
            self._hand_off(job)
        self._step()

    def _hand_off(self, job: Job) -> None:
        decode = self.world.worker(job.decode)
        assert isinstance(decode, DecodeSim)
        self.world.at(self.world.now_s() + self.world.machine.handoff_s, lambda: decode.join(job.request))


class _Filling:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_done = 0
        self.begun_s = -1.0

    def compute(self, most: int, now_s: float) -> int:
        if self.begun_s < 0:
            self.begun_s = now_s
        num_new = min(most, len(self.job.request.token_ids) - self.num_done)
        self.num_done += num_new
        return num_new
