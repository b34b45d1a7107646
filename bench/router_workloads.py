"""Made traces, one for each way in which prompts and answers relate to each other."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from baton.bench.traces import TraceRequest

BLOCK_TOKENS: Final = 16


def chat(num_requests: int, seed: int) -> list[TraceRequest]:
    """Short turns that grow: most of a prompt is known, and answers are as long."""
    random = Random(seed)
    turns: dict[int, list[int]] = {}
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(6.0)
        blocks = turns.setdefault(random.randrange(num_requests // 8 + 1), [])
        blocks.extend(10_000 * (number + 1) + at for at in range(random.randint(4, 40)))
        requests.append(_request(now_s, tuple(blocks[:600]), random.randint(50, 400)))
    return requests


def documents(num_requests: int, seed: int) -> list[TraceRequest]:
    """Questions about a few long documents: long prompts, short answers."""
    random = Random(seed)
    sizes = [random.randint(300, 900) for _ in range(24)]
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(2.5)
        document = random.randrange(len(sizes))
        known = [10_000_000 + 10_000 * document + at for at in range(sizes[document])]
        asked = [10_000 * (number + 1) + at for at in range(random.randint(2, 12))]
        requests.append(_request(now_s, (*known, *asked), random.randint(20, 150)))
    return requests


def mixed(num_requests: int, seed: int) -> list[TraceRequest]:
    """Completions of all lengths, nothing shared, in bursts."""
    random = Random(seed)
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(8.0 if number % 60 < 30 else 2.0)
        num_blocks = min(800, max(1, round(random.lognormvariate(4.0, 1.3))))
        blocks = tuple(10_000 * (number + 1) + at for at in range(num_blocks))
        requests.append(_request(now_s, blocks, max(2, round(random.lognormvariate(4.5, 0.8)))))
    return requests


def _request(arrival_s: float, block_ids: tuple[int, ...], output_tokens: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        input_tokens=len(block_ids) * BLOCK_TOKENS - 5,
        output_tokens=output_tokens,
        block_ids=block_ids,
        block_tokens=BLOCK_TOKENS,
    )


WORKLOADS: Final[Mapping[str, Callable[[int, int], list[TraceRequest]]]] = {
    "chat": chat,
    "documents": documents,
    "mixed": mixed,
}
