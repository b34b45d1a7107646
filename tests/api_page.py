"""Writes docs/api.md from docstrings and comments; `make api` runs it."""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Final

INTRODUCTION: Final = """# Public API

The names on this page are public. Everything else may change in any release. `make api` writes this page from
the docstrings; a test fails while the page differs from them. A class is shown as its fields, and the
signatures and docstrings of its documented methods.

`from baton import LLM, SamplingParams` loads neither torch nor Ray until the names are used.

## Differences from vLLM

- `generate` and `chat` show no progress unless `use_tqdm=True`.
- A `Completion` has no `request_id`.
- Log probabilities are structs (`TokenLogprobs`), not dictionaries of token ids.
- An `LLM` has no `lora_request`, `beam_search`, `sleep`, `wake_up`, `embed`, `score` and `classify`.
- `get_tokenizer()` returns Baton's own `Tokenizer`, with `encode` and `decode`.
- `SamplingParams` lacks `detokenize`, `output_kind`, `truncate_prompt_tokens`, `logits_processors` and
  `spaces_between_special_tokens`. `seed` is at least 0, and `logprobs` from 0 to 20.
"""
# heading -> text below the heading, and the classes: module and names
SECTIONS: Final = {
    "Offline generation": (
        "Text in, text out, in this process. `baton generate` is the same on the command line.",
        (
            ("baton.cluster.offline.llm", "LLM"),
            ("baton.request", "SamplingParams StructuredOutputs"),
            ("baton.cluster.offline.generation", "Completion CompletionOutput TextDelta"),
            ("baton.request", "TokenLogprobs FinishReason"),
        ),
    ),
    "Errors": (
        "Every error that Baton raises on purpose is a BatonError. Its class says what the caller can do.",
        (
            (
                "baton.errors",
                "BatonError ConfigError ModelError InvalidRequest Overloaded Refused WorkerLost "
                "TransferFailed IntegrityError",
            ),
        ),
    ),
    "Extension points": (
        "[extending.md](extending.md) has a walk through each, and the tests that add one from outside.",
        (
            (
                "baton.router.policies.base",
                "RoutingPolicy PolicyContext RoutingChoice ClusterView TenantClaim",
            ),
            ("baton.engine.models.model", "Model SupportsPipeline"),
            ("baton.engine.models.registry", "Architecture ModelConfig"),
            ("baton.engine.models.decoder", "Decoder"),
            ("baton.engine.runner.logits_processors", "LogitsProcessor"),
            ("baton.gateway.metrics.exporter", "Metric"),
            ("baton.gateway.text.tool_calls", "ToolCallParser"),
            ("baton.gateway.text.answer_grammar", "CallForm"),
            ("baton.gateway.text.answer_parsing", "ReasoningParser"),
            ("baton.kvtransfer.transports.base", "Transport TransportListener Sender LocalRank"),
            ("baton.kvtransfer.transports.base", "Piece PieceOutcome"),
        ),
    ),
}


def page() -> str:
    """Return the text of docs/api.md."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for heading, (text, modules) in SECTIONS.items():
        yield f"## {heading}\n\n{text}\n"
        for module, names in modules:
            for name in names.split():
                found = getattr(importlib.import_module(module), name)
                yield f"### {name}\n\nDefined in `{module}`.\n\n```python\n{outline(found)}\n```\n"


def outline(shown: type) -> str:
    """Return a class's source without its private parts and without the bodies of its methods."""
    lines = textwrap.dedent(inspect.getsource(shown)).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    parts = [lines[: definition.body[0].lineno - 1]]
    for previous, node in zip([definition.body[0], *definition.body], definition.body, strict=False):
        if isinstance(node, ast.Expr):
            parts.append(lines[node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            first = previous.end_lineno or node.lineno  # with the comments above
            parts.append(lines[first if previous is not node else node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_shown(node):
            parts.append(["", *_signature(lines, node)])
    return "\n".join(line for part in parts for line in part).rstrip()


def _is_shown(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.name == "__init__" or (not node.name.startswith("_") and ast.get_docstring(node) is not None)


def _signature(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    body = node.body[0]
    if ast.get_docstring(node) is not None:
        return lines[first : body.end_lineno]
    head = lines[first : body.lineno - 1]  # an __init__ without a docstring
    return [*head[:-1], f"{head[-1]} ..."]


if __name__ == "__main__":
    sys.stdout.write(page())
