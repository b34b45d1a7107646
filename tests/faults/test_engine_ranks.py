"""What an engine of several ranks has computed is, page for page, what another one goes on from."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import pytest
import torch
from torch import Tensor

from baton.engine.engine import load_engine
from baton.errors import WorkerLost
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Timing, TransferEnded
from baton.kvtransfer.ranks.ranks import RankAgents
from baton.kvtransfer.transports.pages import SharedPool
from baton.request import FilledPages, Request, SamplingParams, TokenIds
from tests.tiny_models import run_to_end, tiny_config, tiny_engine, token_ids, write_config
from tests.transfer_ends import RING
from tests.waiting import wait_for
from tests.watched_agent import pages_of, watched

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

PROMPT: Final = tuple((7 * i + i * i) % 131 for i in range(75))
TRANSFER: Final = b"named by whoever"
NEW_TOKENS: Final = 8


class Replica:
    """An engine with its endpoint, on the test's thread."""

    def __init__(
        self, model: Path, num_ranks: int, page_size: int, transport: str = "auto", num_stages: int = 1
    ) -> None:
        """num_ranks: of each stage."""
        self._ends = ExitStack()
        shared, agents = SharedPool(), RankAgents(num_ranks * num_stages)
        self._ends.callback(shared.close)
        self._ends.callback(agents.close)
        self._sidecar = watched(agents.sidecar)
        sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
        config = tiny_config(model, cache={"page_size": page_size}, **sizes)
        self.engine = load_engine(config, zeros_on_cpu=shared.zeros, sidecar=self._sidecar)
        self._ends.callback(self.engine.close)
        self.pool = self.engine.runner.pool.device
        self._num_ranks, self._num_stages = num_ranks, num_stages
        settings = EndpointSettings(
            keys=RING,
            fingerprint=self.engine.fingerprint,
            layout=self.engine.runner.layout,
            transport=transport,
            timing=Timing(lease_s=3.0, heartbeat_s=0.5),
        )
        self.endpoint = KvEndpoint(settings, self.pool, self.engine.pages, shared=shared, agents=agents)
        self._ends.callback(self.endpoint.close)
        self.ended: list[TransferEnded] = []

    def poll(self) -> None:
        self.ended += self.endpoint.poll()

    def compute(self, request: Request) -> list[int]:
        """The pages of its prompt, which the engine keeps."""
        (progress,) = self.engine.add(request, keeps_pages=True)
        while self.engine.has_work():
            self.engine.step()
        return list(progress.page_table)

    def tokens(self, pages: list[int]) -> Tensor:
        """Whatever is in the pages, of all layers and heads, in the order of the tokens."""
        others = range(1, self._num_ranks * self._num_stages)
        parts = [self.pool[pages], *(pages_of(self._sidecar, rank, pages, self.pool) for rank in others)]
        tp_size = self._num_ranks
        stages = [torch.cat(parts[at : at + tp_size], dim=3) for at in range(0, len(parts), tp_size)]
        return torch.cat(stages, dim=1).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    def close(self) -> None:
        self._ends.close()


Make = Callable[..., Replica]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def replica(*arguments: object) -> Replica:
            made = Replica(model, *arguments)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield replica


def a_request(name: str, num_tokens: int = NEW_TOKENS) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=name, token_ids=TokenIds.of(PROMPT), sampling=sampling)


def are_over(source: Replica, destination: Replica) -> bool:
    """Poll both; return whether the transfer has ended at both."""
    source.poll()
    destination.poll()
    return bool(source.ended and destination.ended)


def grant(source: Replica, destination: Replica, num_units: int) -> None:
    """The destination grants pages for TRANSFER, and the source has heard of them."""
    link = destination.endpoint.link(source.endpoint.address)
    assert destination.engine.make_room(num_units)
    destination.endpoint.grant(link, TRANSFER, num_units, "adopter", deadline_s=20.0)

    def is_granted() -> bool:
        source.poll()
        destination.poll()
        return bool(source.endpoint.take_granted())

    wait_for(is_granted)


def move(source: Replica, destination: Replica, pages: list[int]) -> TransferEnded:
    """The destination's end of a transfer of the prompt's pages."""
    unit_tokens = min(source.engine.pages.page_size, destination.engine.pages.page_size)
    num_units = -(-len(PROMPT) // unit_tokens)
    grant(source, destination, num_units)
    source.endpoint.offer(TRANSFER, pages, num_units)

    wait_for(lambda: are_over(source, destination))
    assert source.ended[-1].outcome is HandoffOutcome.HANDED_OVER
    return destination.ended[-1]


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("source_cut", "destination_cut"),  # ranks of a stage, tokens of a page, stages
    [
        pytest.param((2, 16, 1), (1, 64, 1), id="2-ranks-to-1"),
        pytest.param((1, 16, 1), (2, 16, 1), id="1-rank-to-2"),
        pytest.param((1, 16, 1), (1, 16, 2), id="1-stage-to-2"),
        pytest.param((1, 16, 2), (2, 16, 1), id="2-stages-to-2-ranks"),
        pytest.param((2, 16, 2), (1, 64, 1), id="2-stages-of-2-ranks-to-1"),
        pytest.param((1, 64, 2), (1, 16, 1), id="2-stages-to-1", marks=pytest.mark.slow),
        pytest.param((2, 64, 1), (2, 16, 1), id="2-ranks-to-2", marks=pytest.mark.slow),
    ],
)
def test_an_engine_goes_on_from_the_pages_of_another(
    make: Make,
    model: Path,
    source_cut: tuple[int, int, int],
    destination_cut: tuple[int, int, int],
    transport: str,
) -> None:
    (num_ranks, page_size, num_stages), (tp_size, there_size, num_there) = source_cut, destination_cut
    source = make(num_ranks, page_size, transport, num_stages)
    destination = make(tp_size, there_size, "auto", num_there)
    alone = tiny_engine(model)
    alone.add(a_request("alone"))
    expected = token_ids(run_to_end(alone))
    pages = source.compute(a_request("prefill", 1))
    ended = move(source, destination, pages)
    assert (ended.outcome, ended.transfer) == (HandoffOutcome.ADOPTED, TRANSFER)
    num_tokens = len(PROMPT) // 16 * 16
    sent, received = source.tokens(pages), destination.tokens(list(ended.pages))
    assert torch.equal(sent[:, :, :, :num_tokens], received[:, :, :, :num_tokens]) and sent.any()
    brought = FilledPages(tuple(ended.pages), len(PROMPT) - 1, "adopter")
    destination.engine.add(a_request("decode"), brought)
    assert token_ids(run_to_end(destination.engine)) == expected
    source.engine.release_kept("prefill")


def test_an_engine_whose_other_rank_is_killed_ends_its_transfers(make: Make) -> None:
    before = set(psutil.Process().children(recursive=True))
    source, destination = make(2, 16), make(1, 16)
    (tp_worker,) = set(psutil.Process().children(recursive=True)) - before
    grant(source, destination, 4)

    tp_worker.kill()
    wait_for(lambda: are_over(source, destination))
    assert source.ended[-1].outcome is HandoffOutcome.FAILED
    with pytest.raises(WorkerLost, match="rank 1 is lost"):
        source.endpoint.check()
    # Rank 0 and the destination both watch the rank that was killed: either may see its end first.
    assert source.ended[-1].reason in ("rank 1 is lost", "aborted: the source's process died")
    assert destination.ended[-1].outcome in (HandoffOutcome.RECOMPUTE, HandoffOutcome.REFUSED)
    pages = destination.engine.pages
    wait_for(lambda: are_over(source, destination) and pages.num_free == pages.num_pages)
