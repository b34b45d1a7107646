from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.queue.quotas import LEAST_GAIN, MAX_TENANTS, RequestWork, WorkEstimator
from tests.unit.router.queue_cases import asked


def a_request(tenant: str = "a", num_tokens: int = 100, max_tokens: int = 1000) -> Request:
    return asked("r", tenant, num_tokens=num_tokens, max_tokens=max_tokens).request


def test_expected_answer_follows_the_answers_of_the_tenant() -> None:
    estimator = WorkEstimator()
    assert estimator.expect(a_request()) == RequestWork(100.0, float(EXPECTED_OUTPUT_TOKENS))
    for _ in range(40):
        estimator.learn_answer("a", 10)
    assert estimator.expect(a_request()).answer == 10.0
    assert estimator.expect(a_request(max_tokens=4)).answer == 4.0
    assert estimator.expect(a_request("b")).answer == EXPECTED_OUTPUT_TOKENS


def test_expected_prompt_follows_the_cache_hits_of_the_tenant() -> None:
    estimator = WorkEstimator()
    for _ in range(40):
        estimator.learn_prompt("a", 25, 100)
    assert estimator.expect(a_request(num_tokens=1000)).prompt == 250.0
    assert estimator.expect(asked("r", attempt=1).request, is_begun=True).prompt == 0.0


def test_estimates_are_bounded_and_the_least_recent_is_forgotten() -> None:
    estimator = WorkEstimator()
    estimator.learn_answer("first", 10)
    for number in range(MAX_TENANTS):
        estimator.learn_answer(str(number), 20)
    assert estimator.expect(a_request(str(MAX_TENANTS - 1))).answer == 20.0
    assert estimator.expect(a_request("first")).answer == EXPECTED_OUTPUT_TOKENS


def test_one_unusual_answer_changes_an_estimate_little() -> None:
    estimator = WorkEstimator()
    for _ in range(100):
        estimator.learn_answer("a", 100)
    estimator.learn_answer("a", 0)
    assert abs(estimator.expect(a_request()).answer - 100 * (1 - LEAST_GAIN)) < 1e-9
