"""Speculative decoding on and off, on work that copies and on work that does not, on the CPU.

The model has the size and the cost of a Llama of 56 million parameters, and weights that copy: one head
looks at the token before, another at what followed the same token earlier, and the output head says that
token. Prompts are in the prefix cache: what is measured is decoding. The limit of a figure is measured with
drafts of a known answer, so many a step as are fastest. docs/benchmarks.md explains the figures.
"""

import random
from argparse import Namespace
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.bench.engine.replica import LLAMA_56M, LlamaShape, generate, request_of
from baton.bench.report import Report, Row, at_least, at_most, option, paired_ratio, suite
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.scheduler.sequence import Batch, Sequence, SequenceKey
from baton.request import SamplingParams
from baton.rpc import process

VOCAB_SIZE: Final = LLAMA_56M.vocab_size
NUM_DRAFTS: Final = 8
LIMIT_DRAFTS: Final = (1, 2, 4, 8)  # a step, in runs that measure a limit
BATCHES: Final = {1: 2.0, 8: 1.5, 32: 1.0}  # sequences -> the least gain on work that copies
DRAFT_MODEL_BAR: Final = 1.4
LOSS_BAR: Final = 2.0  # % on work where nothing is accepted
KV_BYTES: Final = 2**29

# The circuit of the copying model. Parts of the hidden state:
CODE: Final = 64  # dimensions of a token's code, a random row of signs
TOKEN, BEFORE, COPIED, ONE = 0, CODE, 2 * CODE, 3 * CODE  # the codes, and a constant
ROPE_THETA: Final = 1e12
NUM_FAST: Final = 7  # pairs of a head that rotate fast: they tell neighbouring tokens apart
NUM_MATCHED: Final = 40  # dimensions of a code that are compared, in pairs that hardly rotate
SHARPNESS: Final = 60.0  # of attention: the best match gets everything


TARGET: Final = replace(LLAMA_56M, rope_theta=ROPE_THETA)
DRAFT: Final = replace(
    TARGET, hidden_size=256, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=2
)


def write_copying_model(directory: Path, shape: LlamaShape, forgets: int | None = None) -> Path:
    """Write a model that continues as its context did after the latest token.

    forgets: one token in so many is never said.
    """
    directory.mkdir()
    shape.write(directory)
    save_file(_copying_weights(shape, forgets), directory / "model.safetensors")
    return directory


def _copying_weights(shape: LlamaShape, forgets: int | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes_VC = torch.randint(0, 2, (VOCAB_SIZE, CODE), generator=generator) * 2.0 - 1.0
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def random_weights(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.02

    embeddings, head = torch.zeros(VOCAB_SIZE, hidden), torch.zeros(VOCAB_SIZE, hidden)
    embeddings[:, TOKEN : TOKEN + CODE] = codes_VC
    embeddings[:, ONE] = 1.0
    head[:, COPIED : COPIED + CODE] = codes_VC
    if forgets is not None:
        head[::forgets] = 0.0
    weights = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        query = random_weights(shape.num_heads * CODE, hidden)
        key, value = (random_weights(shape.num_kv_heads * CODE, hidden) for _ in range(2))
        output = torch.zeros(hidden, shape.num_heads * CODE)
        if layer < 2:
            query[:CODE], key[:CODE], value[:CODE] = 0.0, 0.0, 0.0
            value[:CODE, TOKEN : TOKEN + CODE] = torch.eye(CODE)
            (_look_at_the_token_before if layer == 0 else _look_after_the_same_token)(query, key)
            target = BEFORE if layer == 0 else COPIED
            output[target : target + CODE, :CODE] = torch.eye(CODE)
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": query,
            f"{name}.self_attn.k_proj.weight": key,
            f"{name}.self_attn.v_proj.weight": value,
            f"{name}.self_attn.o_proj.weight": output,
            f"{name}.mlp.gate_proj.weight": random_weights(inner, hidden),
            f"{name}.mlp.up_proj.weight": random_weights(inner, hidden),
            f"{name}.mlp.down_proj.weight": torch.zeros(hidden, inner),
        }
    return {name: each.to(torch.bfloat16).contiguous() for name, each in weights.items()}


def _look_at_the_token_before(query: Tensor, key: Tensor) -> None:
    """Head 0: a query that RoPE turns to the key of the position before."""
    half = CODE // 2
    angles = ROPE_THETA ** (-torch.arange(NUM_FAST) / half)
    query[:NUM_FAST, ONE] = SHARPNESS * torch.cos(-angles)
    query[half : half + NUM_FAST, ONE] = SHARPNESS * torch.sin(-angles)
    key[:NUM_FAST, ONE] = 8.0


def _look_after_the_same_token(query: Tensor, key: Tensor) -> None:
    """Head 0: the code of this token matches positions whose token before has the same code."""
    half = CODE // 2
    slow = torch.arange(NUM_MATCHED // 2) + half - NUM_MATCHED // 2
    rows = torch.cat((slow, slow + half))
    columns = torch.arange(NUM_MATCHED)
    query[rows, TOKEN + columns] = SHARPNESS / 8
    key[rows, BEFORE + columns] = 2.0


# The work.


class Work(NamedTuple):
    """Prompts, and the tokens of each answer."""

    prompts: list[list[int]]
    num_tokens: int
    temperature: float = 0.0


def quotes(num_prompts: int) -> Work:
    """A passage and a question; the answer quotes most of the passage."""
    rng, prompts = random.Random(1), []
    for _ in range(num_prompts):
        tokens = rng.sample(range(VOCAB_SIZE), 320)
        passage, question = tokens[:300], tokens[300:]
        prompts.append([*passage, *question, passage[20]])
    return Work(prompts, 256)


def edits(num_prompts: int) -> Work:
    """A text twice and eight edits thrice, each in its context; the answer is the text with the edits.

    The model says what followed the latest token most often.
    """
    rng, prompts = random.Random(1), []
    for _ in range(num_prompts):
        tokens = rng.sample(range(VOCAB_SIZE), 360)
        text, fresh = tokens[:220], iter(tokens[220:])
        changes = [[text[place], next(fresh), *text[place + 2 : place + 4]] for place in range(20, 212, 24)]
        instructions = [token for _ in range(3) for change in changes for token in (*change, next(fresh))]
        prompts.append([*text, next(fresh), *text, next(fresh), *instructions, text[0]])
    return Work(prompts, 200)


def novel(num_prompts: int) -> Work:
    """Random prompts and sampled answers, in which nothing comes again."""
    rng = random.Random(3)
    return Work([rng.sample(range(VOCAB_SIZE), 64) for _ in range(num_prompts)], 128, temperature=8.0)


COPYING: Final = {"quotes": quotes, "edits": edits}


def run(engine: Engine, work: Work) -> tuple[float, list[list[int | None]]]:
    """The tokens a second of answers to prompts in the prefix cache, and the answers."""
    generate(engine, work.prompts, [1] * len(work.prompts))
    requests = [
        request_of(
            prompt,
            SamplingParams(
                max_tokens=work.num_tokens, temperature=work.temperature, seed=seed, ignore_eos=True
            ),
        )
        for seed, prompt in enumerate(work.prompts)
    ]
    answers: dict[str, list[int | None]] = {request.request_id: [] for request in requests}
    started_s = perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].append(output.token_id)
    seconds = perf_counter() - started_s
    return sum(map(len, answers.values())) / seconds, list(answers.values())


class Pairs(NamedTuple):
    """Runs of the same work with and without drafts, in turns."""

    on: list[float]  # tokens a second
    off: list[float]
    accepted_share: float  # of the drafts

    @property
    def gain(self) -> float:
        return paired_ratio(self.on, self.off)

    def note(self, limit: float | None = None) -> str:
        """The rates, and the limit."""
        rates = f"{median(self.off):.0f} -> {median(self.on):.0f} tok/s"
        text = f"{rates}, {self.accepted_share:.0%} of drafts accepted"
        return text if limit is None else f"{text}; limit {limit:.2f} x"


def compare(report: Report, what: str, off: Engine, on: Engine, work: Work, num_pairs: int) -> Pairs:
    """Run the work on both engines, first once unmeasured; RuntimeError if the tokens differ."""
    before = on.load()
    runs = report.in_rounds({True: partial(run, on, work), False: partial(run, off, work)}, num_pairs, what)
    after = on.load()
    if any(answers != runs[False][0][1] for of_one in runs.values() for _, answers in of_one):
        raise RuntimeError("speculative decoding changed tokens")
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    rates = {is_on: [rate for rate, _ in of_one] for is_on, of_one in runs.items()}
    return Pairs(rates[True], rates[False], num_accepted / max(1, num_drafts))


class RightDrafts:
    """A drafter that knows the answers: every draft is right and costs nothing to find."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], num_drafts: int) -> None:
        """answers: by prompt."""
        self._answers = answers
        self._num_drafts = num_drafts

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """As `Drafter.propose`."""
        return {sequence.key: self._following(sequence) for sequence in decodes}

    def observe(self, batch: Batch, step_s: float) -> None:
        """Learn nothing."""

    def finish(self, sequence: Sequence) -> None:
        """Forget nothing."""

    def _following(self, sequence: Sequence) -> list[int]:
        answer = self._answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        return answer[sequence.num_generated_tokens :][: self._num_drafts]


def measure_limit(off: Engine, on: Engine, work: Work, num_rounds: int) -> float:
    """The gain with right drafts, at their best number a step; `on` has drafts."""
    _, tokens = run(off, work)
    found = [[token or 0 for token in answer] for answer in tokens]
    answers = {tuple(prompt): answer for prompt, answer in zip(work.prompts, found, strict=True)}
    drafter, gains = on.scheduler.drafter, dict[int, list[float]]()
    for _ in range(num_rounds):
        plain, _ = run(off, work)
        for num in LIMIT_DRAFTS:
            on.scheduler.drafter = RightDrafts(answers, num)
            gains.setdefault(num, []).append(run(on, work)[0] / plain)
    on.scheduler.drafter = drafter
    return max(map(median, gains.values()))


# transformers on the same model, one sequence at a time.


def transformers_rates(target: Path, draft: Path, work: Work, num_runs: int) -> Mapping[str, float]:
    """The tokens a second of plain, prompt-lookup and assisted generation with transformers."""
    from transformers import AutoModelForCausalLM

    def load(directory: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    model, assistant = load(target), load(draft)
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": NUM_DRAFTS},
        "assisted": {"assistant_model": assistant},
    }
    rates: dict[str, list[float]] = {name: [] for name in forms}
    inputs = torch.tensor([work.prompts[0]])
    for _ in range(num_runs):
        for name, settings in forms.items():
            started_s = perf_counter()
            with torch.inference_mode():
                model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=work.num_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **settings,
                )
            rates[name].append(work.num_tokens / (perf_counter() - started_s))
    return {name: median(each) for name, each in rates.items()}


@suite(
    "speculative", "Speculative decoding", option("--pairs", 7, "runs with and without drafts of each work")
)
def measure(options: Namespace, report: Report) -> None:
    """Compare an engine without drafts with one of each method."""
    with TemporaryDirectory() as folder:
        target = write_copying_model(Path(folder) / "target", TARGET)
        draft = write_copying_model(Path(folder) / "draft", DRAFT, forgets=8)

        def load(speculative: dict[str, Any] | None) -> Engine:
            settings = {"model": str(target), "cache": {"kv_cache_memory_bytes": KV_BYTES}}
            return load_engine(engine_config({**settings, "speculative": speculative}))

        off, lookup = load(None), load({"method": "ngram", "num_speculative_tokens": NUM_DRAFTS})
        with_model = load({"model": str(draft), "num_speculative_tokens": NUM_DRAFTS})
        with process.freeze_gc():
            for (name, work), (batch, bar) in product(COPYING.items(), BATCHES.items()):
                what = f"{name}, ngram, batch {batch}"
                pairs = compare(report, f"{what}, ", off, lookup, work(batch), options.pairs)
                note = pairs.note(measure_limit(off, lookup, work(batch), min(3, options.pairs)))
                report.rows.append(at_least(what, pairs.gain, "x", bar, note))
            for name, work in COPYING.items():
                what = f"{name}, draft model, batch 1"
                pairs = compare(report, f"{what}, ", off, with_model, work(1), options.pairs)
                report.rows.append(at_least(what, pairs.gain, "x", DRAFT_MODEL_BAR, pairs.note()))
            methods = {"ngram": lookup, "draft model": with_model}
            for (method, engine), batch in product(methods.items(), BATCHES):
                what = f"nothing accepted, {method}, batch {batch}"
                pairs = compare(report, f"{what}, ", off, engine, novel(batch), 2 * options.pairs)
                loss = 100 * (1 / pairs.gain - 1)
                report.rows.append(at_most(f"{what}: slower by", loss, "%", LOSS_BAR, pairs.note()))
            report.tell("transformers")
            rates = transformers_rates(target, draft, quotes(1), 3)
            for name in ("prompt lookup", "assisted"):
                note = f"{rates['plain']:.0f} -> {rates[name]:.0f} tok/s, with the prompt"
                report.rows.append(
                    Row(f"transformers, {name}, batch 1", rates[name] / rates["plain"], "x", note=note)
                )
        for engine in (off, lookup, with_model):
            engine.close()
