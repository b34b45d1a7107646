from baton.engine.scheduler.queues import SequenceQueues
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.request import Request


def make(name: str, rank: int, num_tokens: int = 5) -> Sequence:
    request = Request(request_id=name, token_ids=tuple(range(num_tokens)))
    sequence = Sequence.from_request(request, 0, max_model_len=100)
    sequence.rank = (0, 0, 0.0, 0.0, rank)
    return sequence


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_waiting_is_by_rank_whatever_the_order_of_coming() -> None:
    queues = SequenceQueues()
    for name, rank in (("c", 3), ("a", 1), ("b", 2)):
        queues.wait(make(name, rank))
    assert names(queues.waiting) == ["a", "b", "c"]


def test_sequence_moves_from_waiting_to_prefill_to_decode_and_back() -> None:
    queues, sequence = SequenceQueues(), make("a", 1)
    queues.wait(sequence)
    queues.run(sequence)
    assert (queues.waiting, list(queues.prefilling), sequence.status) == (
        [],
        [sequence.key],
        SequenceStatus.RUNNING,
    )
    sequence.num_computed_tokens = 4
    queues.promote()
    assert (list(queues.prefilling), list(queues.decoding)) == ([], [sequence.key])
    queues.stop(sequence, SequenceStatus.SWAPPED)
    assert (queues.waiting, queues.num_running, sequence.status) == ([sequence], 0, SequenceStatus.SWAPPED)


def test_swapped_decode_runs_again_as_a_decode() -> None:
    queues, sequence = SequenceQueues(), make("a", 1)
    sequence.num_computed_tokens = 4
    sequence.status = SequenceStatus.SWAPPED
    queues.wait(sequence)
    queues.run(sequence)
    assert list(queues.decoding) == [sequence.key]


def test_removed_sequence_is_nowhere() -> None:
    queues = SequenceQueues()
    sequences = [make(name, rank) for rank, name in enumerate("abc")]
    for sequence in sequences:
        queues.wait(sequence)
    queues.run(sequences[0])
    queues.remove(sequences[0])
    queues.remove(sequences[2])
    assert names(queues.waiting) == ["b"] and list(queues.by_key) == [("b", 0)] and not queues.num_running
