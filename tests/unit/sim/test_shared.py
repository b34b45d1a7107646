"""What simulated routers tell each other."""

from random import Random

from baton.router.redis.messages import AnyShared, SharedEnded
from baton.sim.lives import SharedStream
from baton.sim.network import Network
from baton.sim.process import Events, SimProcess
from tests.node_peers import id_of

ENDED = SharedEnded(attempts=((id_of("r"), 0),))


class Bench:
    def __init__(self, seed: int) -> None:
        self.events = Events()
        self.stream = SharedStream(Network(self.events, Random(seed)), Random(seed))
        self.processes = [SimProcess(f"router-{number}", self.events) for number in range(3)]
        self.heard: list[list[AnyShared]] = [[] for _ in self.processes]
        joined = zip(self.processes, self.heard, strict=True)
        self.links = [self.stream.join(process, heard.append) for process, heard in joined]

    def run(self) -> None:
        self.events.run_until(self.events.now_s + 1.0)


def test_the_others_hear_it_and_the_dead_do_not() -> None:
    bench = next(each for each in map(Bench, range(100)) if not each.stream.may_lose)
    bench.links[0].share(ENDED)
    bench.run()
    assert bench.heard == [[], [ENDED], [ENDED]]
    bench.processes[1].die()
    bench.links[2].share(ENDED)
    bench.run()
    assert bench.heard == [[ENDED], [ENDED], [ENDED]]


def test_some_simulations_lose_some_of_it_or_all() -> None:
    kinds = set()
    for seed in range(60):
        bench = Bench(seed)
        for _ in range(200):
            bench.links[0].share(ENDED)
        bench.run()
        num_heard = len(bench.heard[1])
        kinds.add("none" if not num_heard else "all" if num_heard == 200 else "some")
    assert kinds == {"none", "some", "all"}


def test_it_comes_in_order() -> None:
    """An end that overtook the dispatch that it ends would leave it in the books."""
    bench = next(each for each in map(Bench, range(100)) if not each.stream.may_lose)
    said = [SharedEnded(attempts=((id_of("r"), number),)) for number in range(200)]
    for number, message in enumerate(said):
        bench.links[number % 2].share(message)
    bench.run()
    assert bench.heard[2] == said
