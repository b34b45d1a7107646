"""Measures the shipped tiny model: `python -m baton.bench.tiny.evaluate engine/tiny`.

Every answer is decoded greedily in bfloat16 by transformers and counts only when all of it is right, the
end token included.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from baton.bench.tiny.tasks import END, TASKS, Case, fact_cases, recall_cases, task_cases
from baton.bench.tiny.tokenizer import special_id

BATCH_SIZE: Final = 8


class Evaluator:
    """A model directory, loaded as it is served."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end_id = special_id(self._tokenizer, END)
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def accuracy(self, cases: list[Case]) -> float:
        """The fraction of cases whose whole answer is right."""
        num_right = sum(sum(self._are_right(group)) for group in self._groups(cases))
        return num_right / len(cases)

    def num_tokens(self, case: Case) -> int:
        return len(self._encode(case.prompt))

    def _groups(self, cases: list[Case]) -> Iterator[list[Case]]:
        """Cases whose prompts are equally long, BATCH_SIZE at most, so that nothing is padded."""
        by_length: dict[int, list[Case]] = defaultdict(list)
        for case in cases:
            by_length[self.num_tokens(case)].append(case)
        for group in by_length.values():
            for start in range(0, len(group), BATCH_SIZE):
                yield group[start : start + BATCH_SIZE]

    def _are_right(self, cases: list[Case]) -> list[bool]:
        prompts_BL = torch.tensor([self._encode(case.prompt) for case in cases])
        expected = [[*self._encode(case.answer), self._end_id] for case in cases]
        output_BL = self._model.generate(
            prompts_BL,
            attention_mask=torch.ones_like(prompts_BL),
            max_new_tokens=max(map(len, expected)),
            do_sample=False,
        )
        answers = output_BL[:, prompts_BL.shape[1] :].tolist()
        return [answer[: len(right)] == right for answer, right in zip(answers, expected, strict=True)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def suites(num_cases: int, seed: int) -> Iterator[tuple[str, list[Case]]]:
    """Named lists of cases: recall at several lengths, every short task, facts; bare and as chat."""
    for num_tokens in (250, 500, 1000, 1500):
        for chat in (False, True):
            cases = recall_cases(num_cases, num_tokens, seed, chat=chat)
            yield f"recall {num_tokens}{' chat' if chat else ''}", cases
    for task in TASKS:
        for chat in (False, True):
            yield f"{task}{' chat' if chat else ''}", task_cases(task, num_cases, seed, chat=chat)
    yield "facts chat", fact_cases()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the tiny model on cases it never saw.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    evaluator = Evaluator(arguments.folder)
    print(f"{evaluator.num_parameters} parameters")
    for name, cases in suites(arguments.cases, arguments.seed):
        longest = max(map(evaluator.num_tokens, cases))
        accuracy = evaluator.accuracy(cases)
        print(f"{name:18} {accuracy:6.1%} of {len(cases)}, prompts up to {longest} tokens", flush=True)


if __name__ == "__main__":
    main()
