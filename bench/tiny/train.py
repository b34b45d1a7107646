"""Trains the tiny model that comes with Baton: tokenizer, starting weights, training and files.

    python -m baton.bench.tiny.train --out engine/tiny     15 minutes on one core
    python -m baton.bench.tiny.train --continue-from engine/tiny --steps 600 --out engine/tiny    15 more

The first run teaches recall, short tasks and facts. The second goes on from its weights and adds JSON and
calls of tools; its batches have the tasks of the first as well, so that none is forgotten. The same seed
gives the same files on the same machine and torch. The shipped weights had 640 steps of the second run, in
three parts with different shares of the tasks.

The tokenizer is byte-level BPE in which a key and a value are one token each. A pair such as `k7=blue` must
take the same number of tokens for every key, so the merges that make `k0` to `k399` come first; the rest
are trained on the words of the tasks.

The starting weights lie near the weights that recall needs, so training takes minutes instead of hours.
Recall is an induction circuit: one layer copies the key to the position of its value (two tokens on) and to
the end of the question (one token on); the next layer attends from the second position to the first. From
random weights that pair of layers takes tens of millions of tokens to appear, because neither half is of use
without the other. So both start half made:

1. Every embedding shares one direction, the only one through which a head without biases can read a distance.
   The rest of an embedding is the token's own, and its row of the output starts there too.
2. The heads of layer 0 look 1, 2, 3 and 4 tokens back; each writes into its own subspace.
3. The heads of layer 1 compare the token 1 or 3 back of the query with the token 2 back of the key, and copy
   the vector at the match.

In training, rows start short; when recall is nearly always right at one length, rows grow. Every step takes
one batch of recall and one of short tasks, in the second run one of forms and calls too. Only answers count
in the loss.

E hidden size, D head dim, F half of it, H query heads, K kv heads, V vocabulary, B rows, L tokens a row.
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.init import normal_, orthogonal_

from baton.bench.report import Progress
from baton.bench.tiny.tasks import (
    ASSISTANT,
    END,
    FACTS,
    NUM_KEYS,
    SYSTEM,
    USER,
    VALUES,
    Episode,
    call_episode,
    form_episode,
    recall_episode,
    short_episode,
)

PAD: Final = "<|pad|>"
SPECIAL_TOKENS: Final = (PAD, END, USER, ASSISTANT, SYSTEM)
VOCAB_SIZE: Final = 1024

# A key stays whole, digits stand alone, a word takes the space before it unless digits follow.
PATTERN: Final = r"[a-z]\d{1,3}(?!\d)|\d| ?\p{L}+(?!\p{N})|[^\s\p{L}\p{N}]|\s"

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Return the same tokenizer every time: at most VOCAB_SIZE tokens, special ones first."""
    word_merges = _train_word_merges()
    merges = _key_merges() + word_merges
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)])
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of one of SPECIAL_TOKENS."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is missing from the vocabulary"
    return token_id


def tokenizer_config(max_length: int) -> dict[str, object]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _pre_tokenizer() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _key_merges() -> list[tuple[str, str]]:
    """Return `k` + `1`, then `k1` + `2`, then `k12` + `3`: every key is a shorter key and a digit."""
    return [(f"k{index}"[:-1], f"k{index}"[-1]) for index in range(NUM_KEYS)]


def _train_word_merges() -> list[tuple[str, str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - NUM_KEYS - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _corpus() -> list[str]:
    """Return texts in which values weigh most, so that each becomes one token before any other word."""
    values = [f"{left} {right}" for left, right in pairwise((*VALUES, VALUES[0]))] * 100
    tasks = ["What is ", "copy(", "sort(", "close "] * 50
    facts = [text for answer, questions in FACTS.items() for text in (*questions, answer)]
    return values + tasks + facts


EMBEDDING_NORM: Final = 5.5
LOOK_BACK_SCALE: Final = 0.8
WRITE_STD: Final = 0.12
MATCH_STD: Final = 0.2
QUESTION_OFFSETS: Final = (1, 3)  # `k7?` and `k7?<|end|><|assistant|>`: the key stands so far back
VALUE_OFFSET: Final = 2  # `k7=blue`


@torch.no_grad()
def initialise(model: "transformers.LlamaForCausalLM") -> None:
    """Overwrite every matrix of `model`; norms stay at one. Draws from torch's global generator."""
    common_E = normalize(torch.randn(model.config.hidden_size), dim=0)
    _scale_matrices(model)
    own_VE = _draw_embeddings(common_E, model.config.vocab_size)
    model.model.embed_tokens.weight.copy_(own_VE + common_E).mul_(EMBEDDING_NORM)
    model.lm_head.weight.copy_(own_VE)
    _look_back(model, common_E)
    _match(model)


def _scale_matrices(model: "transformers.LlamaForCausalLM") -> None:
    """Draw matrices that keep the scale of their input; the outputs of layers start small."""
    damping = (2 * model.config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            is_residual = "o_proj" in name or "down_proj" in name
            normal_(parameter, std=parameter.shape[1] ** -0.5 * (damping if is_residual else 1.0))


def _draw_embeddings(common_E: Tensor, vocab_size: int) -> Tensor:
    """Return random unit vectors [V, E] at right angles to the common one."""
    own_VE = torch.randn(vocab_size, len(common_E))
    own_VE -= (own_VE @ common_E)[:, None] * common_E
    return normalize(own_VE, dim=1)


def _look_back(model: "transformers.LlamaForCausalLM", common_E: Tensor) -> None:
    """Layer 0: query head h attends h + 1 tokens back, through the phase that rope adds over that distance.

    Only the quickly turning dimensions tell neighbours apart. The values leave the common direction out.
    """
    attention = model.model.layers[0].self_attn
    angle_F = _rope_angles(model)
    is_fast_F = (angle_F > 0.05).float() * LOOK_BACK_SCALE
    key_D = torch.cat([is_fast_F, torch.zeros_like(is_fast_F)])
    for key_DE in _heads(attention.k_proj, model):
        key_DE.copy_(key_D[:, None] * common_E)
    for head, query_DE in enumerate(_heads(attention.q_proj, model)):
        phase_F = (head + 1) * angle_F
        query_D = torch.cat([is_fast_F * phase_F.cos(), -is_fast_F * phase_F.sin()])
        query_DE.copy_(query_D[:, None] * common_E)
    first_DE, *other_DE = _heads(attention.v_proj, model)
    first_DE.sub_((first_DE @ common_E)[:, None] * common_E)
    for value_DE in other_DE:
        value_DE.copy_(first_DE)
    normal_(attention.o_proj.weight, std=WRITE_STD)


def _match(model: "transformers.LlamaForCausalLM") -> None:
    """Layer 1: queries and keys read the output of layer 0, in the dimensions that hardly turn over a prompt.

    The output undoes the values: together, one query head of each kv head copies the whole vector it found.
    """
    written_ED = model.model.layers[0].self_attn.o_proj.weight.split(model.config.head_dim, dim=1)
    is_slow_F = _rope_angles(model) * 1024 < 1
    attention = model.model.layers[1].self_attn
    num_groups = model.config.num_attention_heads // model.config.num_key_value_heads
    values = _heads(attention.v_proj, model)
    queries = _heads(attention.q_proj, model)
    orthogonal_(attention.v_proj.weight)
    attention.o_proj.weight.copy_(torch.cat([value_DE.T.repeat(1, num_groups) for value_DE in values], dim=1))
    for kv_head, key_DE in enumerate(_heads(attention.k_proj, model)):
        read_DD = normal_(torch.empty(model.config.head_dim, model.config.head_dim), std=MATCH_STD)
        read_DD *= is_slow_F.repeat(2)[:, None]
        key_DE.copy_(read_DD @ written_ED[VALUE_OFFSET - 1].T)
        for query_DE, offset in zip(queries[kv_head * num_groups :], QUESTION_OFFSETS, strict=False):
            query_DE.copy_(read_DD @ written_ED[offset - 1].T)


def _heads(projection: torch.nn.Linear, model: "transformers.LlamaForCausalLM") -> list[Tensor]:
    """Return views of the rows of each head [D, E]."""
    head_dim: int = model.config.head_dim
    return [projection.weight[row : row + head_dim] for row in range(0, projection.out_features, head_dim)]


def _rope_angles(model: "transformers.LlamaForCausalLM") -> Tensor:
    """Return the radians that one position turns each pair of dimensions [F], fastest first."""
    head_dim: int = model.config.head_dim
    base: float = model.config.rope_parameters["rope_theta"]
    return torch.pow(base, -torch.arange(0, head_dim, 2) / head_dim)


MAX_LENGTH: Final = 4096
CONFIG_KEYS: Final = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("attention_bias", "mlp_bias", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
)


def build_model() -> "transformers.LlamaForCausalLM":
    """Return a model with starting weights in float32, 1.1 M parameters.

    A large rope base leaves half of each head's dimensions nearly unrotated over 2,000 tokens: a head
    needs fast ones to find "the token before" and slow ones to find "the same key, anywhere".
    """
    tokenizer = build_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=special_id(tokenizer, END),
        pad_token_id=special_id(tokenizer, PAD),
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    initialise(model)
    return model


def load_model(folder: Path) -> "transformers.LlamaForCausalLM":
    """Return an exported model in float32."""
    model = build_model()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


def export(model: "transformers.LlamaForCausalLM", folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer files and generation_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(model.config, folder)
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(tokenizer_config(MAX_LENGTH), folder / "tokenizer_config.json")
    transformers.GenerationConfig(
        do_sample=False, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    ).save_pretrained(folder)


def _write_config(config: "transformers.LlamaConfig", folder: Path) -> None:
    """Write the rope base and the dtype in the spellings of transformers 5 and of older versions."""
    values = config.to_dict()
    shape = {name: values[name] for name in CONFIG_KEYS}
    dtype = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    _write_json({"architectures": ["LlamaForCausalLM"], **shape, **dtype, **rope}, folder / "config.json")


def _write_json(values: dict[str, object], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# Rows of token ids and labels: B rows, L tokens a row. `labels[b, i]` is the token that must follow `ids[b,
# i]`, or IGNORED outside answers. The label of an answer's last token is the end token.

IGNORED: Final = -100


def encode_episode(tokenizer: Tokenizer, episode: Episode) -> tuple[list[int], list[int]]:
    """Return the ids of an episode and their labels, equally many."""
    end_id = special_id(tokenizer, END)
    encodings = tokenizer.encode_batch([segment.text for segment in episode])
    ids: list[int] = []
    labels: list[int] = []
    for segment, encoding in zip(episode, encodings, strict=True):
        ids += encoding.ids
        if segment.is_answer:
            labels[-1:] = [*encoding.ids, end_id]
        else:
            labels += [IGNORED] * len(encoding.ids)
    return ids, labels


class BatchSource:
    """Draws batches of ids and labels, both [B, L]; `rng` alone decides their content."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.rng = rng
        self._tokenizer = tokenizer
        self._pad_id = special_id(tokenizer, PAD)

    def draw_recall(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw rows of recall, one episode each: a second one could give the same key another value."""
        return self._draw(num_tokens, length, 1, lambda rng: recall_episode(rng, length))

    def draw_short(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw rows of short episodes: many rows, as a short task is mostly asked at position 0."""
        return self._draw(num_tokens, length, length, short_episode)

    def draw_calls(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw rows of JSON forms, bare or as chat turns, and of conversations with tools."""

        def draw(rng: random.Random) -> Episode:
            return form_episode(rng) if rng.random() < 0.4 else call_episode(rng)

        return self._draw(num_tokens, length, length - SHORT_LENGTH, draw)

    def _draw(
        self, num_tokens: int, length: int, least: int, draw: Callable[[random.Random], Episode]
    ) -> tuple[Tensor, Tensor]:
        """Draw rows of `length` tokens, about `num_tokens` in all, of episodes of `least` tokens or more."""
        rows = []
        for _ in range(max(1, num_tokens // length)):
            ids: list[int] = []
            labels: list[int] = []
            while len(ids) < least:
                more_ids, more_labels = encode_episode(self._tokenizer, draw(self.rng))
                ids += more_ids
                labels += more_labels
            rows.append((ids, labels))
        return self._stack(rows, length)

    def _stack(self, rows: list[tuple[list[int], list[int]]], length: int) -> tuple[Tensor, Tensor]:
        ids_BL = torch.full((len(rows), length), self._pad_id)
        labels_BL = torch.full((len(rows), length), IGNORED)
        for row, (ids, labels) in enumerate(rows):
            ids_BL[row, : len(ids)] = torch.tensor(ids[:length])
            labels_BL[row, : len(labels)] = torch.tensor(labels[:length])
        return ids_BL, labels_BL


LENGTHS: Final = (64, 128, 256, 512, 1024, 1536)
SHORT_LENGTH: Final = 48
CALLS_LENGTH: Final = 192
TOKENS_PER_BATCH: Final = 2048
PEAK_RATE: Final = 2e-3
FINAL_RATE: Final = 5e-5
CONTINUED_PEAK_RATE: Final = 8e-4
WARMUP_STEPS: Final = 50
HOLD_STEPS: Final = 150  # until the values flow, noise would undo the attention that `initialise` set up
PROMOTION_ACCURACY: Final = 0.95
LEAST_STEPS_AT_LEVEL: Final = 25


def learning_rate(step: int, num_steps: int, peak_rate: float = PEAK_RATE) -> float:
    """Return a linear warm-up, then a cosine from `peak_rate` down to FINAL_RATE."""
    if step < WARMUP_STEPS:
        return peak_rate * (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS))
    return FINAL_RATE + (peak_rate - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """One training run. `level` indexes LENGTHS; accuracies are running means over answer tokens.

    start: the folder of an exported model that is trained on, at all lengths, with forms and calls as well.
    None: new weights, which learn recall and short tasks.
    """

    def __init__(self, num_steps: int, seed: int, start: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.model = build_model() if start is None else load_model(start)
        self.level = 0 if start is None else len(LENGTHS) - 1
        self.recall_accuracy = self.short_accuracy = self.calls_accuracy = 0.0
        self._continues = start is not None
        self._num_steps = num_steps
        self._step = self._steps_at_level = 0
        self._source = BatchSource(build_tokenizer(), random.Random(seed))
        # Weight decay on matrices only: decay would pull norms towards zero.
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)

    def run(self, tell: Progress) -> None:
        """Train to the last step."""
        while self._step < self._num_steps:
            loss = self.step()
            accuracies = f"recall {self.recall_accuracy:.3f} short {self.short_accuracy:.3f}"
            if self._continues:
                accuracies += f" calls {self.calls_accuracy:.3f}"
            text = f"step {self._step} length {LENGTHS[self.level]} loss {loss:.3f} {accuracies}"
            tell(text, self._step / self._num_steps)

    def step(self) -> float:
        """Update on one batch; return its loss."""
        # Mostly rows of the current length, and shorter ones too, so that none is forgotten.
        rng = self._source.rng
        length = LENGTHS[self.level if rng.random() < 0.5 else rng.randint(0, self.level)]
        for group in self._optimizer.param_groups:
            peak_rate = CONTINUED_PEAK_RATE if self._continues else PEAK_RATE
            group["lr"] = learning_rate(self._step, self._num_steps, peak_rate)
        for layer in self.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.requires_grad_(self._continues or self._step >= HOLD_STEPS)
        num_recall_tokens = TOKENS_PER_BATCH // 2 if self._continues else TOKENS_PER_BATCH
        recall_loss, recall = _measure(self.model, *self._source.draw_recall(num_recall_tokens, length))
        short_loss, short = _measure(self.model, *self._source.draw_short(TOKENS_PER_BATCH, SHORT_LENGTH))
        loss = recall_loss + short_loss
        if self._continues:
            calls_loss, calls = _measure(self.model, *self._source.draw_calls(TOKENS_PER_BATCH, CALLS_LENGTH))
            loss = loss + calls_loss
            self.calls_accuracy += 0.05 * (calls - self.calls_accuracy)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.record(recall, short)
        return loss.item()

    def record(self, recall: float, short: float) -> None:
        """Count one step; rows grow when recall has been good enough for a while."""
        self._step += 1
        self._steps_at_level += 1
        self.recall_accuracy += 0.05 * (recall - self.recall_accuracy)
        self.short_accuracy += 0.05 * (short - self.short_accuracy)
        is_good = self.recall_accuracy >= PROMOTION_ACCURACY
        if is_good and self._steps_at_level >= LEAST_STEPS_AT_LEVEL and self.level + 1 < len(LENGTHS):
            self.level, self._steps_at_level, self.recall_accuracy = self.level + 1, 0, 0.0


def _measure(
    model: "transformers.LlamaForCausalLM", ids_BL: Tensor, labels_BL: Tensor
) -> tuple[Tensor, float]:
    """Return the mean loss over the labels, and the accuracy over the labels that are no end tokens."""
    is_answer_BL = labels_BL != IGNORED
    labels_N = labels_BL[is_answer_BL]  # N: labels of the batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BLE = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BLE[is_answer_BL]).float()
    is_right_N = logits_NV.argmax(-1) == labels_N
    is_word_N = labels_N != model.config.eos_token_id
    return cross_entropy(logits_NV, labels_N), is_right_N[is_word_N].float().mean().item()


def main() -> None:
    """Train and write the files of the model."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--continue-from", type=Path, help="folder of an exported model to train on")
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.steps, arguments.seed, arguments.continue_from)
    with Progress() as tell:
        trainer.run(tell)
    export(trainer.model, arguments.out)


if __name__ == "__main__":
    main()
