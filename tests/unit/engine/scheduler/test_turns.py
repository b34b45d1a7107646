from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.accounts import Account
from baton.engine.scheduler.policies import in_turn
from baton.engine.scheduler.sequence import Sequence
from baton.request import Request, SamplingParams
from tests.accounts import AccountHarness, scheduling_key
from tests.scheduling import Settings


def lane(account: Account, num_tokens: list[int], rank: int = 0) -> list[Sequence]:
    sequences = []
    for number, num in enumerate(num_tokens):
        request = Request(request_id=f"{account.name}{number}", token_ids=(1,) * num)
        sequence = Sequence.from_request(request, 0, max_model_len=1000)
        sequence.account, sequence.rank = account, (rank, 0, float(number), float(ord(account.name)), 0)
        sequences.append(sequence)
    return sequences


def names(*lanes: list[Sequence]) -> str:
    given = in_turn([iter(each) for each in lanes], lambda sequence: sequence.num_tokens)
    return " ".join(sequence.request_id for sequence in given)


def test_who_has_had_least_comes_next() -> None:
    long, short = lane(Account("a"), [30, 30]), lane(Account("b"), [10, 10, 10, 10])
    assert names(long, short) == "a0 b0 b1 b2 a1 b3"


def test_what_was_had_before_counts() -> None:
    assert names(lane(Account("a", work=25.0), [10, 10]), lane(Account("b"), [10] * 4)) == "b0 b1 b2 a0 b3 a1"


def test_weight_gives_as_many_turns_more() -> None:
    heavy = lane(Account("h", weight=3.0), [10] * 6)
    assert names(heavy, lane(Account("l"), [10] * 2)) == "h0 l0 h1 h2 l1 h3 h4 h5"


def test_a_better_class_comes_first_whatever_it_has_had() -> None:
    high = lane(Account("h", work=1e6), [10] * 2)
    assert names(lane(Account("l"), [10] * 2, rank=1), high) == "h0 h1 l0 l1"


def test_nothing_given_costs_nothing() -> None:
    lanes = [iter(lane(Account(name), [10, 10])) for name in "ab"]
    given = " ".join(sequence.request_id for sequence in in_turn(lanes, lambda sequence: 0))
    assert given == "a0 b0 a1 b1"


def test_prompts_of_two_tenants_share_the_steps_by_weight() -> None:
    """Both have more than fits; the noisy one came first, with more and at a better priority of its own."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)
    harness = AccountHarness(Settings(num_pages=4000, page_size=4, scheduler=config))
    for number in range(200):
        prompt = [number, *range(39)]
        harness.add(f"n{number}", prompt, SamplingParams(max_tokens=1), tenant="noisy", cache_salt=b"n")
    for number in range(60):
        harness.add(
            f"q{number}",
            [number, *range(39)],
            SamplingParams(max_tokens=1),
            tenant="quiet",
            scheduling_key=scheduling_key(weight=3.0),
            priority=5,
        )
    computed = {"noisy": 0, "quiet": 0}
    while any(sequence.account_name == "quiet" for sequence in harness.live.values()):
        _, batch, _ = harness.step()
        for chunk in batch.chunks:
            computed[chunk.sequence.account_name] += chunk.num_tokens
    assert computed["quiet"] == 60 * 40
    assert abs(computed["quiet"] / sum(computed.values()) - 0.75) < 0.0375  # 5 % of its share
