"""The states of a sequence in the queues, and the quotas of scheduling keys."""

from math import inf

from baton.engine.scheduler.sequence import Sequence, SequenceQueues, SequenceStatus
from baton.request import Request


def make(name: str, rank: int, num_tokens: int = 5) -> Sequence:
    request = Request(request_id=name, token_ids=tuple(range(num_tokens)))
    sequence = Sequence.from_request(request, 0, max_model_len=100)
    sequence.rank = (0, 0, 0.0, 0.0, rank)
    return sequence


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_waiting_is_sorted_by_rank() -> None:
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


def test_largest_quota_of_live_sequences_holds() -> None:
    queues, sequences = SequenceQueues(), [make(str(rank), rank) for rank in range(3)]
    for sequence, quota in zip(sequences, (None, 9, 4), strict=True):
        sequence.max_kv_pages = quota
        queues.wait(sequence)
    for sequence, expected in zip(sequences, (inf, 9, 4), strict=True):
        assert queues.have_quotas and queues.max_pages("") == expected
        queues.remove(sequence)
    assert not queues.have_quotas and not queues.by_key and not queues.shares.active
