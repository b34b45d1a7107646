"""Trains the tiny model: `python -m baton.bench.tiny.train --out engine/tiny`, 15 minutes on one core.

1. Rows start short; when recall is nearly always right at one length, the curriculum moves to the next.
   Heads start half made (bench/tiny/model.py), learn to match a key on short rows, then on long ones.
2. Every step takes one batch of recall and one of short tasks; only answers count in the loss.
3. A checkpoint and the exported directory are written every 250 steps; `--resume` continues from there.

The same seed gives the same run on the same machine and torch.
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from baton.bench.report import Progress
from baton.bench.tiny.model import PAD, build_model, build_tokenizer, export, special_id
from baton.bench.tiny.tasks import END, Episode, recall_episode, short_episode

MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps per parameter


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Replace `path` at once by weights and optimizer moments, with `state` as JSON in the header."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{name}/{moment}"] = value
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"state": json.dumps(state)})
    partial.replace(path)


@torch.no_grad()
def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill `model` and `optimizer` from a checkpoint; return its state.

    A parameter that has not been trained yet has no moments; its first step makes them.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
            for moment in MOMENTS:
                if f"{name}/{moment}" in names:
                    optimizer.state[parameter][moment] = file.get_tensor(f"{name}/{moment}")
        state: dict[str, Any] = json.loads(file.metadata()["state"])
    return state


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
        """Draw rows of recall."""
        return _stack([self._recall_row(length) for _ in range(max(1, num_tokens // length))])

    def draw_short(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw many short rows rather than few long ones: a short task is mostly asked at position 0."""
        return _stack([self._short_row(length) for _ in range(max(1, num_tokens // length))])

    def _recall_row(self, length: int) -> tuple[list[int], list[int]]:
        """One episode a row: a second one could give the same key another value."""
        return self._fit(*encode_episode(self._tokenizer, recall_episode(self.rng, length)), length)

    def _short_row(self, length: int) -> tuple[list[int], list[int]]:
        """As many short episodes as the row holds."""
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            more_ids, more_labels = encode_episode(self._tokenizer, short_episode(self.rng))
            ids += more_ids
            labels += more_labels
        return self._fit(ids, labels, length)

    def _fit(self, ids: list[int], labels: list[int], length: int) -> tuple[list[int], list[int]]:
        missing = max(0, length - len(ids))
        return (
            (ids + [self._pad_id] * missing)[:length],
            (labels + [IGNORED] * missing)[:length],
        )


def _stack(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(labels)


LENGTHS: Final = (64, 128, 256, 512, 1024, 1536)
SHORT_LENGTH: Final = 48
TOKENS_PER_BATCH: Final = 2048
PEAK_RATE: Final = 2e-3
FINAL_RATE: Final = 5e-5
WARMUP_STEPS: Final = 50
HOLD_STEPS: Final = 150  # until the values flow, noise would undo the attention that `initialise` set up
PROMOTION_ACCURACY: Final = 0.95
STEPS_PER_CHECKPOINT: Final = 250


@dataclass
class Curriculum:
    """The state of a run. `level` indexes LENGTHS; accuracies are running means over answer tokens."""

    step: int = 0
    level: int = 0
    steps_at_level: int = 0
    recall_accuracy: float = 0.0
    short_accuracy: float = 0.0

    def record(self, recall: float, short: float) -> None:
        """Count one step; rows grow when recall has been good enough for a while."""
        self.step += 1
        self.steps_at_level += 1
        self.recall_accuracy += 0.05 * (recall - self.recall_accuracy)
        self.short_accuracy += 0.05 * (short - self.short_accuracy)
        ready = self.recall_accuracy >= PROMOTION_ACCURACY and self.steps_at_level >= 25
        if ready and self.level + 1 < len(LENGTHS):
            self.level, self.steps_at_level, self.recall_accuracy = self.level + 1, 0, 0.0

    def draw_length(self, rng: random.Random) -> int:
        """Return mostly the current length, and earlier ones too, so that none is forgotten."""
        return LENGTHS[self.level if rng.random() < 0.5 else rng.randint(0, self.level)]


def learning_rate(step: int, num_steps: int) -> float:
    """Return a linear warm-up, then a cosine from PEAK_RATE down to FINAL_RATE."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS))
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """One training run: the model, its optimizer, its batches and its progress."""

    def __init__(self, folder: Path, num_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = build_model()
        self.progress = Curriculum()
        self._folder = folder
        self._num_steps = num_steps
        self._source = BatchSource(build_tokenizer(), random.Random(seed))
        self._optimizer = _build_optimizer(self.model)

    def run(self, checkpoint: Path, tell: Callable[[str, float], None]) -> None:
        """Train to the last step; save now and then."""
        while self.progress.step < self._num_steps:
            tell(self._describe(self.step()), self.progress.step / self._num_steps)
            if self.progress.step % STEPS_PER_CHECKPOINT == 0:
                self.save(checkpoint)
        self.save(checkpoint)

    def step(self) -> float:
        """Update on one batch; return its loss."""
        length = self.progress.draw_length(self._source.rng)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.progress.step, self._num_steps)
        self._hold_attention(self.progress.step < HOLD_STEPS)
        recall = _measure(self.model, *self._source.draw_recall(TOKENS_PER_BATCH, length))
        short = _measure(self.model, *self._source.draw_short(TOKENS_PER_BATCH, SHORT_LENGTH))
        loss = recall.loss + short.loss
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.progress.record(recall.accuracy, short.accuracy)
        return loss.item()

    def _hold_attention(self, is_held: bool) -> None:
        """Freeze the projections that decide where heads look, or let them learn."""
        for layer in self.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.requires_grad_(not is_held)

    def save(self, checkpoint: Path) -> None:
        """Write the checkpoint and the exported model."""
        state = {"progress": asdict(self.progress), "rng": self._source.rng.getstate()}
        save_checkpoint(checkpoint, self.model, self._optimizer, state)
        export(self.model, self._folder)

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint that `save` wrote on this machine."""
        state = load_checkpoint(checkpoint, self.model, self._optimizer)
        version, internal, gauss = state["rng"]
        self.progress = Curriculum(**state["progress"])
        self._source.rng.setstate((version, tuple(internal), gauss))

    def _describe(self, loss: float) -> str:
        progress = self.progress
        return (
            f"step {progress.step}/{self._num_steps} length {LENGTHS[progress.level]} loss {loss:.3f} "
            f"recall {progress.recall_accuracy:.3f} short {progress.short_accuracy:.3f}"
        )


def _build_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only: decay would pull norms towards zero."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


@dataclass(frozen=True)
class Measure:
    """Mean loss over the labels of a batch, and accuracy over the labels that are no end tokens."""

    loss: Tensor
    accuracy: float


def _measure(model: LlamaForCausalLM, ids_BL: Tensor, labels_BL: Tensor) -> Measure:
    is_answer_BL = labels_BL != IGNORED
    labels_N = labels_BL[is_answer_BL]  # N: labels of the batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BLE = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BLE[is_answer_BL]).float()
    is_right_N = logits_NV.argmax(-1) == labels_N
    is_word_N = labels_N != model.config.eos_token_id
    return Measure(cross_entropy(logits_NV, labels_N), is_right_N[is_word_N].float().mean().item())


def main() -> None:
    """Train, or continue a training run."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--checkpoint", type=Path, default=Path("tiny-checkpoint.safetensors"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--steps", type=int, default=1250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.out, arguments.steps, arguments.seed)
    if arguments.resume:
        trainer.resume(arguments.checkpoint)
    with Progress() as tell:
        trainer.run(arguments.checkpoint, tell)


if __name__ == "__main__":
    main()
