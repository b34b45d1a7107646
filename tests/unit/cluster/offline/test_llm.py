"""The offline API over the real engine and the tiny model."""

import gc
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.cluster.offline.generation import Completion, Prompt, TextDelta
from baton.cluster.offline.llm import LLM
from baton.engine.replica import LayerWatch
from baton.errors import ConfigError, InvalidRequest, WorkerLost
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenIds
from tests.unit.cluster.model_directories import with_config_alone, without_weights

MEMORY = {"kv_cache_memory_bytes": "64MiB"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
COPY = "copy(sun moon star)="
COPIED = "sun moon star"
QUESTION = [{"role": "user", "content": "What is Baton?"}]


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM("tiny", cache=MEMORY) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert not shared_llm.engine.has_work()
    shared_llm.engine.scheduler.check_integrity()


@pytest.mark.usefixtures("real_freeze_gc")
def test_garbage_collector_skips_loaded_objects_until_close() -> None:
    before = gc.get_freeze_count()
    with LLM("tiny", cache=MEMORY):
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == before


def texts(completions: Sequence[Completion]) -> list[str]:
    return [output.text for completion in completions for output in completion.outputs]


def joined(deltas: Sequence[TextDelta], prompt_index: int, index: int) -> tuple[str, tuple[int, ...]]:
    own = [delta for delta in deltas if (delta.prompt_index, delta.index) == (prompt_index, index)]
    return "".join(delta.text for delta in own), sum((delta.token_ids for delta in own), ())


def test_one_prompt_gives_one_answer(llm: LLM) -> None:
    (completion,) = llm.generate(COPY, GREEDY)
    assert completion.prompt == COPY
    assert list(completion.prompt_token_ids) == llm.tokenizer.encode(COPY)
    (answer,) = completion.outputs
    assert (answer.index, answer.text, answer.finish_reason) == (0, COPIED, FinishReason.STOP)
    assert list(answer.token_ids[-1:]) == llm.tokenizer.encode("<|end|>")
    assert answer.logprobs is None


def test_answers_come_in_the_prompts_order(llm: LLM) -> None:
    words = [["sun"], ["cat", "dog", "fox", "owl", "bear"], ["red", "blue"]]
    completions = llm.generate([f"copy({' '.join(group)})=" for group in words], GREEDY)
    assert texts(completions) == [" ".join(group) for group in words]


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=1)
    assert texts(llm.generate([COPY, COPY], [GREEDY, short])) == [COPIED, "sun"]
    with pytest.raises(InvalidRequest, match="expected one, or 2 .* got 1"):
        llm.generate([COPY, COPY], [GREEDY])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_streams_add_up_to_what_generate_returns(llm: LLM, temperature: float) -> None:
    prompts = [COPY, "sort(3 1 2)=", "7+5=", "What is a page?"]
    sampling = SamplingParams(temperature=temperature, max_tokens=24, n=2, seed=11, ignore_eos=True)
    deltas = list(llm.stream(prompts, sampling))
    for prompt_index, completion in enumerate(llm.generate(prompts, sampling)):
        for answer in completion.outputs:
            assert joined(deltas, prompt_index, answer.index) == (answer.text, answer.token_ids)


def test_stream_yields_each_token(llm: LLM) -> None:
    deltas = list(llm.stream(COPY, GREEDY))
    assert [delta.text for delta in deltas] == ["sun", " moon", " star", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.STOP]
    assert all(len(delta.token_ids) == 1 for delta in deltas)


def test_answers_without_a_seed_differ(llm: LLM) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    assert len(set(texts(llm.generate(["sun"] * 3, sampling)))) == 3


def test_engine_seed_repeats_answers_without_a_seed() -> None:
    drawn = []
    for _ in range(2):
        with LLM("tiny", cache=MEMORY, seed=3) as llm:
            drawn.append(texts(llm.generate(["sun", "moon"], SamplingParams(temperature=2.0))))
    assert drawn[0] == drawn[1]


def test_settings_may_have_the_names_of_options() -> None:
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 3, "speculative_config": {"method": "ngram"}}
    with LLM("tiny", **settings, cache={"kv_cache_memory_bytes": "16MiB"}) as llm:
        config = llm.engine.runner.config
    assert (config.cache.page_size, config.cache.kv_cache_memory_bytes) == (8, 2**24)
    assert config.scheduler.max_num_seqs == 3 and config.speculative is not None


def test_settings_may_have_the_values_of_options() -> None:
    with LLM("tiny", dtype="float", max_model_len="1k", load_format="safetensors", cache=MEMORY) as llm:
        config = llm.engine.runner.config
    assert (config.dtype, config.max_model_len, config.load_format) == ("float32", 1000, "auto")


def test_arguments_without_effect_give_a_warning() -> None:
    ignored: dict[str, Any] = {"enforce_eager": True, "limit_mm_per_prompt": {"image": 1}}
    with pytest.warns(UserWarning) as warned, LLM("tiny", **ignored, cache=MEMORY) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
    assert [str(each.message).partition(" ")[0] for each in warned] == list(ignored)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 8, "cache": {"page_size": 8}}, "page_size: cache.page_size is given twice"),
        ({"swap_space": 4}, "swap_space: give host_cache_memory, the host memory"),
        ({"data_parallel_size": 2}, "data_parallel_size: an LLM has no such setting"),
        ({"max_model_len": "4.5K"}, "max_model_len: expected an integer such as 4096, 4k"),
        ({"quantization": "awq"}, "quantization: a checkpoint in awq is recognised by its config.json"),
        ({"hf_overrides": {"rope_theta": 1e4}}, "hf_overrides: change config.json"),
        ({"max_num_seq": 4}, "unknown configuration key 'max_num_seq'; did you mean"),
        ({"cache": 5, "block_size": 8}, "cache: expected a mapping, got 5"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", **settings)


def test_a_stop_string_over_two_tokens_ends_the_request(llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True, stop="un m")
    deltas = list(llm.stream(COPY, endless))
    assert [delta.text for delta in deltas] == ["s", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "un m")
    assert not llm.engine.has_work()


def test_each_choice_stops_for_itself(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.2, max_tokens=60, n=4, seed=2, ignore_eos=True)
    free = texts(llm.generate("k1=sun", sampling))
    stop = free[0][4:6]
    stopping = replace(sampling, stop=stop)
    assert texts(llm.generate("k1=sun", stopping)) == [text.partition(stop)[0] for text in free]


def test_bad_words_are_not_written(llm: LLM) -> None:
    (text,) = texts(llm.generate(COPY, replace(GREEDY, bad_words=["moon"])))
    assert text.startswith("sun") and "moon" not in text


def test_special_tokens_may_be_shown(llm: LLM) -> None:
    end = llm.tokenizer.encode("<|end|>", add_special_tokens=False)
    biased = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, allowed_token_ids=tuple(end))
    assert texts(llm.generate(COPY, biased)) == [""]
    assert texts(llm.generate(COPY, replace(biased, skip_special_tokens=False))) == ["<|end|>" * 2]


def test_an_engine_takes_no_texts(llm: LLM) -> None:
    request = Request(request_id="a", token_ids=TokenIds.of([1]), sampling=replace(GREEDY, stop="x"))
    with pytest.raises(InvalidRequest, match="^stop, .* an engine knows no text"):
        llm.engine.add(request)


def test_bad_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    vocab_size = llm.engine.vocab_size
    cases: list[tuple[Prompt, str]] = [
        ("", "prompt 1: the prompt is empty"),
        ([5] * 5000, "prompt 1: the prompt has 5000 tokens; the model takes 4096"),
        ([vocab_size], f"prompt 1: prompt token: token id {vocab_size} is outside"),
        ("\udc00", "prompt 1: the text is not valid Unicode"),
    ]
    for bad, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate([COPY, bad, COPY], GREEDY)
        assert not llm.engine.has_work()


def test_a_stream_checks_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.stream("")


def test_closing_a_stream_ends_its_requests(llm: LLM) -> None:
    stream = llm.stream([COPY, COPY], SamplingParams(max_tokens=1000, ignore_eos=True, n=2))
    next(stream)
    assert llm.engine.has_work()
    stream.close()
    assert not llm.engine.has_work()


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    one, other = llm.stream(COPY, GREEDY), llm.stream("copy(red blue)=", GREEDY)
    mixed = [(next(one).text, next(other).text) for _ in range(2)]
    assert mixed == [("sun", "red"), (" moon", " blue")]
    assert [delta.text for delta in one] == [" star", ""]
    assert [delta.text for delta in other] == [""]


def test_interrupted_step_ends_every_open_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    one, other = llm.stream(COPY, GREEDY), llm.stream(COPY, GREEDY)
    next(one)
    assert next(other).text == "sun"
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(one)
    with pytest.raises(WorkerLost, match="another call"):
        list(other)
    assert texts(llm.generate(COPY, GREEDY)) == [COPIED]


def test_generate_within_a_stream_disturbs_neither(llm: LLM) -> None:
    stream = llm.stream(COPY, GREEDY)
    first = next(stream).text
    assert texts(llm.generate("copy(red blue)=", GREEDY)) == ["red blue"]
    assert first + "".join(delta.text for delta in stream) == COPIED


def test_chat_uses_the_template(llm: LLM) -> None:
    (completion,) = llm.chat(QUESTION, GREEDY)
    assert list(completion.prompt_token_ids) == llm.chat_prompt(QUESTION)
    assert "prefill and decode" in completion.outputs[0].text


def test_chat_takes_several_conversations(llm: LLM) -> None:
    other = [{"role": "user", "content": COPY}]
    assert texts(llm.chat([QUESTION, other], GREEDY)) == texts(
        [*llm.chat(QUESTION, GREEDY), *llm.chat(other, GREEDY)]
    )


def test_bad_messages_are_named(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^prompt 1: messages\[0\]: content: expected text .*, got nothing"
    ):
        llm.chat([QUESTION, [{"role": "user"}]], GREEDY)


def test_message_or_text_alone_is_no_conversation(llm: LLM) -> None:
    for wrong in ("Hi", QUESTION[0], 5, None):
        with pytest.raises(InvalidRequest, match="^messages: expected a list"):
            llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


def test_messages_may_have_parts_and_come_one_by_one(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is Baton?"}]}]
    expected = llm.chat_prompt(QUESTION)
    assert llm.chat_prompt(parts) == expected
    for given in (iter(parts), [iter(parts)]):
        (completion,) = llm.chat(given, GREEDY)  # type: ignore[arg-type]
        assert list(completion.prompt_token_ids) == expected
    assert llm.chat([], GREEDY) == []


def test_the_generation_prompt_may_be_left_out(llm: LLM) -> None:
    (completion,) = llm.chat(QUESTION, GREEDY, add_generation_prompt=False)
    shorter = list(completion.prompt_token_ids)
    assert llm.chat_prompt(QUESTION)[: len(shorter)] == shorter != llm.chat_prompt(QUESTION)


def test_a_chat_may_have_tools_and_variables_of_the_template(llm: LLM, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "sort", "parameters": {"type": "object"}}}
    with pytest.raises(InvalidRequest, match="^tools: this model's chat template has none"):
        llm.chat(QUESTION, GREEDY, tools=[tool])
    with pytest.raises(InvalidRequest, match="^chat_template_kwargs: .* reads no 'mood'"):
        llm.chat(QUESTION, GREEDY, chat_template_kwargs={"mood": "sun"})
    source = "{{ tools[0].function.name }} {{ mood }} {{ messages[0].content }}"
    directory = without_weights(tmp_path, chat_template=source)
    with LLM(directory, load_format="dummy", cache=MEMORY) as other:
        prompt = other.chat_prompt(QUESTION, tools=[tool], chat_template_kwargs={"mood": "sun"})
        assert other.tokenizer.decode(prompt) == "sort sun What is Baton?"


def test_an_answer_may_go_on_with_the_last_message(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "Baton serves"}]
    prompt = llm.chat_prompt(begun, add_generation_prompt=False, continue_final_message=True)
    assert llm.tokenizer.decode(prompt).endswith("Baton serves")
    with pytest.raises(InvalidRequest, match="^continue_final_message: add_generation_prompt must be false"):
        llm.chat(begun, GREEDY, continue_final_message=True)


def test_second_thread_is_refused(llm: LLM) -> None:
    stream = llm.stream(COPY, GREEDY)
    first = next(stream).text
    refused: list[BaseException] = []

    def intrude() -> None:
        for use in (lambda: llm.generate(COPY), lambda: next(stream), stream.close, llm.close):
            try:
                use()
            except InvalidRequest as error:
                refused.append(error)

    inner_step = llm.engine.step

    def step_beside_another(watch: LayerWatch | None = None) -> list[StepOutput]:
        llm.engine.step = inner_step  # type: ignore[method-assign]
        other = threading.Thread(target=intrude)
        other.start()
        other.join()
        return inner_step()

    llm.engine.step = step_beside_another  # type: ignore[method-assign]
    assert first + "".join(delta.text for delta in stream) == COPIED
    assert [str(error).partition(":")[0] for error in refused] == ["this LLM is in use by another thread"] * 4


def test_stream_dropped_in_another_thread_is_ended_by_the_running_one(llm: LLM) -> None:
    streams = [llm.stream(COPY, SamplingParams(max_tokens=1000, ignore_eos=True))]
    next(streams[0])
    inner_step = llm.engine.step

    def step_while_dropped(watch: LayerWatch | None = None) -> list[StepOutput]:
        llm.engine.step = inner_step  # type: ignore[method-assign]
        other = threading.Thread(target=streams.clear)  # the last reference goes there
        other.start()
        other.join()
        return inner_step()

    llm.engine.step = step_while_dropped  # type: ignore[method-assign]
    assert texts(llm.generate(COPY, GREEDY)) == [COPIED]
    assert not llm.engine.has_work()


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    directory = without_weights(tmp_path, chat_template=None)
    with (
        LLM(directory, load_format="dummy", cache=MEMORY) as llm,
        pytest.raises(InvalidRequest, match="no chat template"),
    ):
        llm.chat(QUESTION)


def test_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    with LLM(with_config_alone(tmp_path), load_format="dummy", cache=MEMORY) as llm:
        assert not llm.has_tokenizer
        (completion,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        (answer,) = completion.outputs
        assert (completion.prompt, answer.text, len(answer.token_ids)) == (None, "", 4)
        with pytest.raises(InvalidRequest, match="prompt 1: the model has no tokenizer.json"):
            llm.generate([[1], COPY])
        with pytest.raises(InvalidRequest, match="the model has no tokenizer.json"):
            llm.chat(QUESTION)
        for sampling in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
            with pytest.raises(InvalidRequest, match="^(stop|bad_words): the model has no tokenizer"):
                llm.generate([[1, 2, 3]], sampling)
        assert not llm.engine.has_work()


def test_logprobs_come_one_a_token(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    (completion,) = llm.generate(COPY, sampling)
    (answer,) = completion.outputs
    assert answer.logprobs is not None and completion.prompt_logprobs is not None
    assert tuple(entry.token_id for entry in answer.logprobs) == answer.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in answer.logprobs)
    assert completion.prompt_logprobs[0] is None  # nothing comes before the first token
    scored = completion.prompt_logprobs[1:]
    assert [entry and entry.token_id for entry in scored] == list(completion.prompt_token_ids[1:])


def test_default_sampling_is_that_of_the_model(tmp_path: Path) -> None:
    directory = without_weights(tmp_path, eos_token=None)
    defaults = {"temperature": 0.0, "max_new_tokens": 5, "eos_token_id": []}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    settings: dict[str, Any] = {"load_format": "dummy", "cache": MEMORY, "max_model_len": 64}
    with LLM(directory, **settings) as llm:
        greedy = llm.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=5))
        assert [list(each.outputs[0].token_ids) for each in llm.generate([[5, 6]] * 2)] == [
            list(greedy[0].outputs[0].token_ids)
        ] * 2
        (longer,) = llm.generate([[5, 6]], SamplingParams(max_tokens=9))
        assert len(longer.outputs[0].token_ids) == 9
    with LLM(directory, generation_config="vllm", **settings) as llm:
        (plain,) = llm.generate([[5, 6]])
        assert len(plain.outputs[0].token_ids) == SamplingParams().max_tokens
    with pytest.raises(ConfigError, match="generation_config: expected 'auto' or 'vllm', got 'none'"):
        LLM(directory, generation_config="none", **settings)


def test_progress_is_shown_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([COPY, COPY], GREEDY, use_tqdm=True)
    shown = capsys.readouterr()
    assert "Generating: 2 of 2 choices" in shown.err and "tokens/s" in shown.err
    assert shown.out == ""


def test_closing_ends_open_streams_as_aborted() -> None:
    llm = LLM("tiny", cache=MEMORY)
    stream = llm.stream(COPY, SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    llm.close()
    assert [delta.finish_reason for delta in stream] == [FinishReason.ABORT]
    with pytest.raises(ValueError, match="closed"):
        llm.generate(COPY)


def test_prompts_that_wait_for_others_are_answered() -> None:
    with LLM("tiny", cache=MEMORY, scheduler={"max_queue_delay_ms": 20.0}) as llm:
        assert texts(llm.generate([COPY, COPY], GREEDY)) == [COPIED, COPIED]


def test_cached_prompt_tokens_are_counted(llm: LLM) -> None:
    prompt = "k9=sun k8=moon " * 10
    llm.generate(prompt, GREEDY)
    (again,) = llm.generate(prompt, GREEDY)
    page_size = llm.engine.runner.layout.page_size
    assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // page_size * page_size > 0


def test_loading_reports_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    LLM("tiny", cache=MEMORY, load_progress=lambda done, total: seen.append((done, total))).close()
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 2**20
