"""The offline API: text in, text out, one model replica in this process.

    with LLM("tiny") as llm:
        print(llm.generate("sort(3 1 2)=")[0].outputs[0].text)

1. Every prompt of a call is encoded and checked; a bad prompt fails the call before any request is added.
2. The engine steps; each token becomes a TextDelta of the call that its request belongs to.
3. A call that ends early aborts its requests in the engine.
"""

import re
import threading
import time
import uuid
import warnings
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, TypeVar

import msgspec

from baton.cluster.cli.options import READERS, instead_of, settings_of
from baton.cluster.model_directory import resolve_draft_model, resolve_model
from baton.cluster.offline.generation import (
    Completion,
    Generation,
    OfflinePrompt,
    Prompts,
    Sampling,
    TextDelta,
    items_of,
    list_sampling,
    naming,
    prompts_in,
    read_prompt,
)
from baton.cluster.offline.progress import watch
from baton.config.engine import EngineConfig, engine_config
from baton.config.generation_config import read_sampling_defaults
from baton.config.loader import flatten, leaves, nest
from baton.engine.engine import load_engine
from baton.engine.models.loading.weights import Progress
from baton.engine.models.registry import read_model_config
from baton.errors import ConfigError, InvalidRequest, WorkerLost
from baton.gateway.text.chat_template import ChatTemplate, Message, read_messages
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import Request, SamplingParams, StepOutput, TokenIds
from baton.rpc import process

ItemT = TypeVar("ItemT")
# Arguments of vLLM's LLM that change no answer here.
WITHOUT_EFFECT: Final = frozenset(
    {"compilation_config", "disable_custom_all_reduce", "disable_log_stats", "distributed_executor_backend"}
    | {"enable_chunked_prefill", "enforce_eager", "limit_mm_per_prompt", "max_seq_len_to_capture"}
    | {"trust_remote_code"}
)


def _by_key(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of EngineConfig with those that are named as an option of `baton` under their keys.

    Texts are read as on the command line. Warns about the arguments in WITHOUT_EFFECT, and leaves them out.
    Raises ConfigError for an option of vLLM that Baton lacks, and for a setting that is given twice.
    """
    for name in sorted(settings.keys() & WITHOUT_EFFECT):
        warnings.warn(f"{name} changes nothing in Baton; leave it out", stacklevel=3)
    known = settings_of(EngineConfig, "engine.")
    keys = {
        flag.lstrip("-").replace("-", "_"): key.removeprefix("engine.")
        for key, setting in known.items()
        for flag in setting.flags
        if not flag.startswith("--no-")
    }
    parts = {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in settings.items()
        if name not in WITHOUT_EFFECT
    }
    found: dict[str, object] = {}
    for name, value in flatten(parts, leaves(EngineConfig).keys() | keys).items():
        whole = name.partition(".")[0]  # of a mapping, such as hf_overrides
        instead = instead_of("--" + whole.replace("_", "-"))
        if name not in keys and instead is not None:
            raise ConfigError(f"{whole}: {_advice(instead, keys)}")
        key = keys.get(name, name)
        if key in found:
            raise ConfigError(f"{name}: {key} is given twice")
        found[key] = _read(key, name, value)
    for part in {key.partition(".")[0] for key in found if "." in key} & found.keys():
        raise ConfigError(f"{part}: expected a mapping, got {found[part]!r}")
    return nest(found)


def _advice(instead: str, known: Mapping[str, str]) -> str:
    """Return the advice in an entry of INSTEAD with keyword arguments in place of options."""
    flags = re.findall(r"--[a-z-]+", instead)
    if any(flag[2:].replace("-", "_") not in known for flag in flags):
        return "an LLM has no such setting; leave it out"
    return re.sub(r"--[a-z-]+", lambda flag: flag[0][2:].replace("-", "_"), instead)


def _read(key: str, name: str, value: object) -> object:
    """Return the value of a setting; a text is read as the option of this setting reads it."""
    reader = READERS.get(f"engine.{key}")
    if reader is None or not isinstance(value, str):
        return value
    try:
        return reader(value)
    except ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}") from None


class OneThread:
    """A lock that refuses a second thread at once.

    `with` it around a use; the same thread may enter again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidRequest(
                "this LLM is in use by another thread: give the prompts to one call, or hold a lock around it"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def try_to(self, act: Callable[[], None]) -> None:
        """Call `act` now, or not at all while another thread is inside."""
        with suppress(InvalidRequest), self:
            act()


class OneThreadStream(Generator[ItemT, None, None]):
    """The same items. A second thread is refused, which changes nothing: it may read on later."""

    def __init__(self, items: Generator[ItemT, None, None], one_thread: OneThread) -> None:
        self._items = items
        self._one_thread = one_thread

    def send(self, value: None) -> ItemT:
        """Return the next item. InvalidRequest: another thread is inside."""
        with self._one_thread:
            return self._items.send(value)

    def throw(  # type: ignore[override]  # as `close` calls it; the other forms are deprecated
        self, error: BaseException | type[BaseException]
    ) -> ItemT:
        """Raise an error at the present item, as `close` does."""
        with self._one_thread:
            return self._items.throw(error)


Conversation: TypeAlias = Sequence[Message]


class LLM:
    """One model in this process, which completes prompts and answers chats, as in vLLM.

        with LLM("tiny") as llm:
            completions = llm.generate(["sort(3 1 2)=", "7+5="], SamplingParams(temperature=0))
            print(completions[0].outputs[0].text)

    An LLM serves one thread at a time and refuses a second one with InvalidRequest. Several streams may be
    open: reading one of them advances all. After an interrupt (Ctrl-C) the running requests are lost, and the
    other open streams raise WorkerLost. With `tensor_parallel_size` over 1 later calls may raise WorkerLost,
    too: close the LLM and load another.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        load_progress: Progress | None = None,
        generation_config: str = "auto",
        **settings: object,
    ) -> None:
        """Load a model. Weights of gigabytes take seconds to minutes.

        model: a directory in Hugging Face layout, a repository of Hugging Face (ORGANIZATION/NAME or
            ORGANIZATION/NAME@REVISION), or "tiny" for the model that comes with Baton.
        load_progress: called with the bytes read so far and the bytes in all.
        generation_config: "auto" takes the sampling of calls without `sampling_params` from the model's
            generation_config.json, "vllm" takes SamplingParams().
        settings: fields of EngineConfig, such as `max_model_len=4096`; a part is a mapping or its struct,
            such as `cache={"page_size": 64}`. The names and the texts of the command line, which are vLLM's,
            do as well: `block_size=64, dtype="half", max_model_len="32k"`. Arguments of vLLM that change
            nothing here, such as `enforce_eager`, give a warning. With `load_format="dummy"` the directory
            may lack a tokenizer: prompts are token ids then, and texts "".

        Raises ModelError for the directory, and ConfigError for a setting; the message says what to change.
        """
        directory = resolve_model(model)
        config = resolve_draft_model(engine_config({"model": str(directory), **_by_key(settings)}))
        read_model_config(directory)  # its errors come first, before minutes of loading
        if generation_config not in ("auto", "vllm"):
            raise ConfigError(f"generation_config: expected 'auto' or 'vllm', got {generation_config!r}")
        self._default_sampling = read_sampling_defaults(
            directory, generation_config, max_tokens=SamplingParams().max_tokens
        )
        may_lack_text = config.load_format == "dummy"
        self._tokenizer = (Tokenizer.find if may_lack_text else Tokenizer.from_directory)(directory)
        self._chat_template = ChatTemplate.from_directory(directory)
        self.engine = load_engine(config, progress=load_progress)
        self._frozen_gc = ExitStack()
        self._frozen_gc.enter_context(process.freeze_gc())
        self._calls: dict[str, _Call] = {}  # request_id -> its call; the requests in the engine
        self._unwanted: deque[str] = deque()  # request_ids of calls that ended early
        self._one_thread = OneThread()
        self._is_closed = False

    @property
    def has_tokenizer(self) -> bool:
        """False: prompts are token ids, and texts ""."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequest when the model has none."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "the model has no tokenizer.json: its prompts are token ids, text and chat need it"
            )
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return `tokenizer`, as vLLM's method of this name does."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Complete each prompt, and return one Completion for each, in their order.

        prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or an iterable of these.
        sampling_params: one for all, or one for each; None: the model's own (see `generation_config`).
        use_tqdm: show progress on stderr.

        Raises InvalidRequest, which names the prompt, before any prompt is computed.
        """
        with self._one_thread:
            generations = self._prepare(prompts, sampling_params)
            with closing(self._run(generations)) as deltas:
                num_choices = sum(generation.request.sampling.n for generation in generations)
                for _ in watch(deltas, num_choices) if use_tqdm else deltas:
                    pass
        return [generation.completion() for generation in generations]

    def stream(self, prompts: Prompts, sampling_params: Sampling = None) -> Generator[TextDelta, None, None]:
        """Yield the results of `generate` token by token, one TextDelta for each token of each choice.

        Closing the iterator aborts its requests. Raises InvalidRequest at once, not at the first item.
        """
        return OneThreadStream(self._run(self._prepare(prompts, sampling_params)), self._one_thread)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[Completion]:
        """Answer one conversation or several, such as `[{"role": "user", "content": "Hi"}]`.

        The last four arguments are those of `chat_prompt`; the others and the errors are those of `generate`.
        Calls of tools are text, as the model wrote them.
        """
        listed = items_of(messages)
        nested = [items_of(item) for item in listed or ()]
        one = listed is None or None in nested
        conversations: Sequence[Any] = [listed or messages] if one else nested
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming(index, len(conversations)):
                prompt = self.chat_prompt(
                    conversation,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
                prompts.append(prompt)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template.

        tools: functions that the model may call, as in OpenAI's API. chat_template_kwargs: variables of the
        template, such as `{"enable_thinking": False}`. add_generation_prompt: end the prompt with the
        beginning of the assistant's turn. continue_final_message: end it with the text of the last message,
        which the answer goes on with; add_generation_prompt must be False then.

        Raises InvalidRequest, also for a model without a chat template and for a variable that it lacks.
        """
        read, tokenizer, template = read_messages(messages), self.tokenizer, self._chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        if tools and not template.reads("tools", has_tools=True):
            raise InvalidRequest("tools: this model's chat template has none; leave them out")
        text = template.render(
            read,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=chat_template_kwargs,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Abort the running requests and end the other ranks. Later calls raise ValueError."""
        with self._one_thread:
            for request_id in list(self._calls):
                self._end(request_id)
            self._is_closed = True
            self.engine.close()
            self._frozen_gc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prompts: object, sampling_params: object) -> list[Generation]:
        listed = prompts_in(prompts)
        generations = []
        given = self._default_sampling if sampling_params is None else sampling_params
        sampling = list_sampling(given, len(listed))
        for index, (prompt, one_sampling) in enumerate(zip(listed, sampling, strict=True)):
            with naming(index, len(listed)):
                given_prompt = read_prompt(prompt)
                request = self._request(given_prompt, one_sampling)
                text, tokenizer = given_prompt.text, self._tokenizer
                generations.append(
                    Generation(request, text, index, tokenizer=tokenizer, sampling=one_sampling)
                )
        return generations

    def _request(self, prompt: OfflinePrompt, sampling: SamplingParams) -> Request:
        given = prompt.token_ids
        token_ids = TokenIds.of(self.tokenizer.encode(prompt.text or "") if given is None else given)
        request = Request(
            request_id=uuid.uuid4().hex, token_ids=token_ids, sampling=self._sampling_of_tokens(sampling)
        )
        self.engine.check(request)
        return request

    def _sampling_of_tokens(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters as the engine takes them; InvalidRequest where they need a tokenizer."""
        if self._tokenizer is None and (sampling.stop or sampling.bad_words):
            name = "stop" if sampling.stop else "bad_words"
            raise InvalidRequest(f"{name}: the model has no tokenizer, so its text cannot be searched")
        if sampling.bad_words:
            banned = self.tokenizer.encode_bad_words(sampling.bad_words)
            banned += sampling.bad_words_token_ids
            sampling = msgspec.structs.replace(sampling, bad_words_token_ids=banned)
        return sampling.of_tokens()

    def _run(self, generations: Sequence[Generation]) -> Generator[TextDelta, None, None]:
        if self._is_closed:
            raise ValueError("this LLM is closed")
        call = _Call(generations)
        try:
            for request_id, generation in call.running.items():
                self.engine.add(generation.request)
                self._calls[request_id] = call
            while call.running or call.unread:
                while call.unread:
                    yield call.unread.popleft()
                if call.running:
                    try:
                        self._step()
                    except BaseException:
                        self._lose_all()
                        raise
            if call.is_lost:
                raise WorkerLost("the request is lost: the step of another call was interrupted or failed")
        finally:
            self._unwanted.extend(call.running)
            self._one_thread.try_to(self._end_unwanted)  # or the thread that steps ends them

    def _step(self) -> None:
        """Step once for all calls, and drop the requests that have ended."""
        self._end_unwanted()
        outputs = self.engine.step()
        if self.engine.wait_s is not None:  # prompts wait for others to share their step (max_queue_delay_ms)
            time.sleep(self.engine.wait_s)
        for output in outputs:
            call = self._calls[output.request_id]
            generation = call.running[output.request_id]
            delta = call.read(generation, output)
            if delta is not None and delta.finish_reason is not None and output.finish_reason is None:
                self.engine.abort(output.request_id, output.choice)  # cut at a stop string
            if generation.is_finished:
                self._end(output.request_id)

    def _lose_all(self) -> None:
        """End the open calls after a step that failed half-way: some of their tokens may be missing."""
        for request_id, call in self._calls.items():
            self.engine.abort(request_id)
            call.running.clear()
            call.is_lost = True
        self._calls.clear()

    def _end_unwanted(self) -> None:
        while self._unwanted:
            self._end(self._unwanted.popleft())

    def _end(self, request_id: str) -> None:
        """Abort a request if it still runs, and drop it. Its unfinished choices end as aborted."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        generation = call.running.pop(request_id)
        for output in self.engine.abort(request_id):
            call.read(generation, output)


class _Call:
    """One `generate` or `stream`: the requests that run, and the deltas that its caller has not read."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.running = {generation.request.request_id: generation for generation in generations}
        self.unread: deque[TextDelta] = deque()
        self.is_lost = False  # it ends without the rest of its answers

    def read(self, generation: Generation, output: StepOutput) -> TextDelta | None:
        delta = generation.accept(output)
        if delta is not None:
            self.unread.append(delta)
        return delta
