"""The architecture in one screen, held by reading every module's syntax tree; nothing need be installed.

`MAY_IMPORT` has the arrows between our own layers, `ONLY_IN` the one place of each outside library.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONTRACT: Final = frozenset(
    path.stem
    for path in (ROOT / "baton").iterdir()
    if path.suffix == ".py" or (path.is_dir() and not path.is_symlink())
) - {"__init__", "__main__", "__pycache__"}
# `python -m baton` and `from baton import LLM`: both import from cluster, lazily.
FRONT_DOORS: Final = {Path("baton/__main__.py"), Path("baton/__init__.py")}
LAYERS: Final = frozenset(
    {"kernels", "engine", "kvtransfer", "prefill_worker", "decode_worker"}
    | {"router", "gateway", "sim", "planner", "cluster", "bench"}
)
EVERYTHING: Final = CONTRACT | LAYERS

# folder -> what it may import from `baton`, besides its own modules
MAY_IMPORT: Final = {
    "baton": CONTRACT,
    "kernels": frozenset[str](),
    "engine": CONTRACT | {"kernels"},
    "kvtransfer": CONTRACT | {"kernels"},
    "prefill_worker": CONTRACT | {"engine", "kvtransfer"},
    "decode_worker": CONTRACT | {"engine", "kvtransfer"},
    "router": CONTRACT,
    "gateway": CONTRACT,
    "sim": EVERYTHING - {"planner", "cluster", "bench"},
    "planner": CONTRACT | {"sim"},
    "cluster": EVERYTHING,
    "bench": EVERYTHING,
    "tests": EVERYTHING,
}
# folder -> its modules that other folders may import; a folder that is not here is open. The simulator, the
# benches and the tests may import any module: they replace or measure parts.
FACADES: Final = {
    "engine": frozenset(
        {"engine", "replica", "models.loading.checkpoint", "models.registry", "models.loading.weights"}
        | {"runner.rank_process", "scheduler.sequence"}
    ),
    "kvtransfer": frozenset(
        {"endpoint", "links", "prefixes", "protocol.handoff", "ranks.ranks", "transports.pages"}
        | {"ranks.agent_arguments", "transports.registry"}
    ),
    "prefill_worker": frozenset({"worker"}),
    "decode_worker": frozenset({"worker"}),
    "router": frozenset({"router", "policies.registry", "redis.client"}),
    "gateway": frozenset(
        {"metrics.snapshot", "process", "tenants.file", "tenants.tenants"}
        | {"text.answer_parsing", "text.chat_template", "text.tokenizer"}
    ),
    "cluster": frozenset[str](),
}
MAY_REACH_INSIDE: Final = frozenset({"sim", "bench", "tests"})
# library -> the folders that may import it; the tests may import any
ONLY_IN: Final = {
    "fastapi": {"gateway"},
    "httptools": {"bench", "gateway"},
    "huggingface_hub": {"cluster"},
    "minijinja": {"gateway"},
    "mooncake": {"bench", "kvtransfer"},
    "opentelemetry": {"gateway"},
    "nixl": {"bench", "kvtransfer"},
    "playwright": {"bench"},
    "prometheus_client": {"gateway"},
    "ray": {"cluster"},
    "redis": {"router"},
    "rich": {"cluster", "bench"},
    "safetensors": {"engine", "bench"},
    "sentencepiece": {"baton"},
    "starlette": {"gateway"},
    "textual": {"cluster"},
    "tokenizers": {"baton", "gateway", "bench"},
    "torch": {"kernels", "engine", "kvtransfer", "prefill_worker", "decode_worker", "bench"},
    "transformers": {"bench"},
    "triton": {"kernels"},
    "xxhash": {"engine", "kvtransfer"},
}
# Reading any of these can run code that the bytes carry.
NOWHERE: Final = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
# Modules that only baton/rpc may import, of all modules of the contract; the environment names the host.
NOT_IN_VALUES: Final = {"asyncio", "multiprocessing", "select", "socket", "subprocess", "threading"}
MAY_PRINT: Final = {"cluster", "bench", "tests"}
MAY_READ_ENVIRONMENT: Final = {"baton/config/environment.py"}
MAY_READ_ENVIRONMENT_FOLDERS: Final = {"bench", "tests"}


@cache
def modules() -> list[Path]:
    """Every Python file of ours by its real path, relative to the root."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name in MAY_IMPORT]
    found = (path for folder in folders for path in folder.rglob("*.py"))
    real = (path for path in found if path.resolve() == path)  # not once more through a link in baton/
    return sorted(path.relative_to(ROOT) for path in real)


def offences(path: Path, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Attribute):
            continue
        complaints = [_import_offence(path, name) for name in _imported_names(node)]
        complaints.append(_print_offence(path, node))
        complaints.append(_environment_offence(path, node))
        for complaint in filter(None, complaints):
            yield f"{path}:{node.lineno} {complaint}"


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        return [f"{base}.{alias.name}" for alias in node.names] if base == "baton" else [base]
    return []


def _import_offence(path: Path, name: str) -> str | None:
    folder, top, *rest = path.parts[0], *name.split(".")
    if name.startswith("."):
        return f"imports {name}: write the whole name"
    if top in LAYERS:
        return f"imports {name}: write baton.{name}"
    if top in NOWHERE:
        return f"imports {name}, which nothing may"
    if path in FRONT_DOORS:
        return None
    if top == "baton" and rest and rest[0] != folder and rest[0] not in MAY_IMPORT[folder]:
        return f"imports {name}: {folder} may not"
    if top == "baton" and rest and rest[0] != folder and not _is_open(folder, rest):
        return f"imports {name}: no facade of {rest[0]}"
    if folder != "tests" and folder not in ONLY_IN.get(top, {folder}):
        return f"imports {name}: only {', '.join(sorted(ONLY_IN[top]))} may"
    return None


def _is_open(folder: str, rest: list[str]) -> bool:
    if folder in MAY_REACH_INSIDE or rest[0] not in FACADES or len(rest) == 1:
        return True
    return ".".join(rest[1:]) in FACADES[rest[0]]


def _print_offence(path: Path, node: ast.AST) -> str | None:
    is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    return "prints: use logging" if is_print and path.parts[0] not in MAY_PRINT else None


def _environment_offence(path: Path, node: ast.AST) -> str | None:
    if str(path) in MAY_READ_ENVIRONMENT or path.parts[0] in MAY_READ_ENVIRONMENT_FOLDERS:
        return None
    names = {"environ", "environb", "getenv", "putenv"}
    if isinstance(node, ast.Attribute):
        reads = node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    elif isinstance(node, ast.ImportFrom):
        reads = node.module == "os" and not names.isdisjoint(alias.name for alias in node.names)
    else:
        reads = False
    return "reads the environment: only baton/config/environment.py may" if reads else None


def test_every_module_keeps_to_its_layer() -> None:
    found = [line for path in modules() for line in offences(path, (ROOT / path).read_text())]
    assert not found, "\n" + "\n".join(found)


def test_values_import_neither_sockets_nor_threads() -> None:
    values = [path for path in modules() if path.parts[0] == "baton" and path not in FRONT_DOORS]
    for path in (path for path in values if path.parts[1] != "rpc"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            for name in _imported_names(node):
                is_own = name.startswith("baton.")
                assert not (is_own and name.startswith("baton.rpc")), f"{path} imports {name}"
                assert name.partition(".")[0] not in NOT_IN_VALUES or str(path) in MAY_READ_ENVIRONMENT, path


def test_contract_holds_values_schemas_config_messages_and_rpc() -> None:
    folders = {path.parts[1] for path in modules() if path.parts[0] == "baton" and len(path.parts) > 2}
    assert folders == {"config", "json_schema", "messages", "rpc"}


def test_every_facade_exists_and_is_used() -> None:
    imported = {
        name
        for path in modules()
        if path.parts[0] not in MAY_REACH_INSIDE
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        for name in _imported_names(node)
        if not name.startswith(f"baton.{path.parts[0]}.")
    }
    facades = {f"baton.{folder}.{module}" for folder, names in FACADES.items() for module in names}
    assert not facades - imported


def test_every_module_is_looked_at() -> None:
    assert Path("baton/config/environment.py") in modules()
    assert Path("tests/test_layers.py") in modules()
    assert not any(path.parts[:2] == ("baton", layer) for layer in LAYERS for path in modules())


def test_top_level_folders_are_not_packages() -> None:
    # A regular package named `kernels` would shadow the Hugging Face one that transformers looks for.
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name != "baton"]
    assert [path.name for path in folders if (path / "__init__.py").exists()] == []


def test_every_folder_with_code_has_its_relative_link() -> None:
    for layer in sorted({path.parts[0] for path in modules()} & LAYERS):
        link = ROOT / "baton" / layer
        assert link.is_symlink(), f"baton/{layer} should be a link to ../{layer}"
        assert str(link.readlink()) == f"../{layer}"


def test_every_folder_with_code_is_a_known_layer() -> None:
    unknown = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in MAY_IMPORT and not path.name.startswith(".")
        if any(path.glob("*.py"))
    }
    assert not unknown, f"{unknown}: state in MAY_IMPORT what they may import"


def _complaints(path: str, source: str) -> list[str]:
    return list(offences(Path(path), source))


def test_offences_are_found() -> None:
    cases = {
        ("kernels/x.py", "import baton.engine.cache.page_pool"): "kernels may not",
        ("kernels/x.py", "from baton import errors"): "kernels may not",
        ("kernels/x.py", "from baton.errors import ModelError"): "kernels may not",
        ("engine/x.py", "def f():\n    from baton.kvtransfer.plan import Plan"): "engine may not",
        ("gateway/x.py", "import torch.nn"): "only bench, decode_worker, engine",
        ("engine/x.py", "import triton"): "only kernels may",
        ("engine/x.py", "import kernels"): "write baton.kernels",
        ("engine/x.py", "from .pages import Page"): "write the whole name",
        ("tests/x.py", "import pickle"): "nothing may",
        ("engine/x.py", "print(1)"): "prints",
        ("engine/x.py", "import os\nos.environ['X']"): "reads the environment",
        ("cluster/x.py", "from os import getenv"): "reads the environment",
    }
    for (path, source), expected in cases.items():
        found = _complaints(path, source)
        assert len(found) == 1 and expected in found[0], (path, source, found)


def test_permitted_code_passes() -> None:
    for path, source in [
        (
            "engine/x.py",
            "import torch\nfrom baton.errors import ModelError\nfrom baton.engine.x import X",
        ),
        ("engine/x.py", "from baton.kernels.store_kv import rope\nfrom baton import config"),
        ("cluster/x.py", "import ray\nprint(1)"),
        ("baton/config/environment.py", "import os\nos.environ['X']"),
        ("bench/x.py", "import os\nprint(os.getenv('X'))\nfrom baton.engine.llm import LLM"),
    ]:
        assert _complaints(path, source) == []
