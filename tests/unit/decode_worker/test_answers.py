"""An answer by two workers is, token for token and figure for figure, that of one engine alone."""

from typing import Any, Final

import pytest

from baton.engine.engine import Engine
from baton.messages.control import Tokens
from baton.request import FinishReason
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE
from tests.worker_pair import DECODE, GATEWAY, WorkerPair
from tests.worker_pair_cases import PROMPT, MakePair, a_request, answer_alone, begun, said

WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "biased": {"logit_bias": {3: 5.0, 7: -100.0}},
    "at-least": {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    "until-stop": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "max_tokens": 40},
    "logprobs": {"logprobs": 3},
    "prompt-logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "later-choice": {"choice": 2},
    "to-the-models-length": {"max_tokens": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_pair_answers_like_one_engine(make_pair: MakePair, alone: Engine, way: str) -> None:
    pair = make_pair()
    for number, num_tokens in enumerate((1, 3, 4, 5, 16, 41)):
        request = a_request(number, PROMPT[:num_tokens], **WAYS[way])
        (answer,) = pair.answer(request)
        assert said(answer) == answer_alone(alone, request)
        assert not pair.decode_worker.counters["recomputed_prefills"]


@pytest.mark.parametrize("way", ["seeded", "penalised", "at-least", "logprobs", "prompt-logprobs"])
def test_an_answer_goes_on_wherever_it_was_cut(make_pair: MakePair, alone: Engine, way: str) -> None:
    pair = make_pair()
    whole = answer_alone(alone, a_request(**WAYS[way]))
    assert len(whole) >= 7
    for cut in range(1, len(whole)):
        rest = a_request(**WAYS[way], attempt=cut, generated_token_ids=begun(whole, cut))
        (answer,) = pair.answer(rest)
        assert said(answer) == whole[cut:]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("page_sizes", [(16, 64), (64, 16), (4, 8), (8, 4)])
def test_page_sizes_may_differ(
    make_pair: MakePair, alone: Engine, page_sizes: tuple[int, int], transport: str
) -> None:
    pair = make_pair(page_sizes=page_sizes, num_pages=(32, 32), transport=transport)
    prompt = tuple(range(1, 88))
    for number, num_tokens in enumerate(
        (2, 15, 16, 17, 63, 64, 65, 80, 87)
    ):  # each begins like the one before
        request = a_request(number, prompt[:num_tokens])
        (answer,) = pair.answer(request)
        assert said(answer) == answer_alone(alone, request)
    assert pair.decode.engine.load().prefix_hits_tokens
    assert not pair.decode_worker.counters["recomputed_prefills"]


def test_many_at_once_are_answered_as_each_alone(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair(scheduler={"max_num_batched_tokens": 32})
    requests = [a_request(number, PROMPT[number : 3 * number + 2]) for number in range(12)]
    answers = pair.answer(*requests)
    assert [said(answer) for answer in answers] == [answer_alone(alone, each) for each in requests]


def test_a_pool_too_small_for_all_preempts_and_changes_no_token(make_pair: MakePair, alone: Engine) -> None:
    pair = make_pair(num_pages=(96, 40))
    requests = [a_request(number, PROMPT[number : number + 20], max_tokens=40) for number in range(6)]
    answers = pair.answer(*requests)
    assert [said(answer) for answer in answers] == [answer_alone(alone, each) for each in requests]
    assert pair.decode.engine.load().num_preemptions


def test_a_step_says_its_tokens_to_a_gateway_in_one_message(make_pair: MakePair) -> None:
    pair = make_pair()
    requests = [a_request(number, PROMPT[number : number + 9], max_tokens=20) for number in range(5)]
    pair.answer(*requests)
    batches = [each.events for each in pair.said[GATEWAY.id] if isinstance(each, Tokens)]
    assert max(len(events) for events in batches) == len(requests)


class TestTheFirstTokenIsTheLast:
    def _answer(self, pair: WorkerPair, alone: Engine, **fields: Any) -> FinishReason | None:
        request = a_request(**fields)
        (answer,) = pair.answer(request)
        assert said(answer) == answer_alone(alone, request)
        assert len(answer) == 1
        pair.quiet_down()
        events = [each for said in pair.said[GATEWAY.id] if isinstance(said, Tokens) for each in said.events]
        assert len(events) == 1  # the decode worker has not said it once more
        assert not pair.decode_worker.counters["recomputed_prefills"]
        return answer[0].finish_reason

    def test_by_the_number_of_tokens(self, make_pair: MakePair, alone: Engine) -> None:
        assert self._answer(make_pair(), alone, max_tokens=1) is FinishReason.LENGTH

    def test_by_a_stop_token(self, make_pair: MakePair, alone: Engine) -> None:
        (first,) = begun(answer_alone(alone, a_request()), 1)
        assert self._answer(make_pair(), alone, stop_token_ids=(first,)) is FinishReason.STOP

    def test_by_the_models_length(self, make_pair: MakePair, alone: Engine) -> None:
        prompt = (5,) * (MAX_MODEL_LEN - 1)
        assert self._answer(make_pair(), alone, prompt=prompt, max_tokens=None) is FinishReason.LENGTH

    def test_of_a_later_attempt(self, make_pair: MakePair, alone: Engine) -> None:
        whole = begun(answer_alone(alone, a_request()), 7)
        reason = self._answer(make_pair(), alone, attempt=1, generated_token_ids=whole, max_tokens=8)
        assert reason is FinishReason.LENGTH


def test_cached_prefix_is_not_transferred_again(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.answer(a_request(0, PROMPT[:20]))
    pair.quiet_down()
    before = pair.prefill.node.load().kv_bytes
    pair.answer(a_request(1, PROMPT))
    pair.quiet_down()
    load = pair.prefill.node.load()
    assert load.kv_bytes - before == 6 * 4 * 512  # the pages of 21 tokens
    assert load.kv_bytes_to == {DECODE: load.kv_bytes}
