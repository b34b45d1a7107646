"""Models by name: the directory, the cache, and downloads from a hub of the test's own."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pytest

from baton.cluster import model_directory
from baton.cluster.model_directory import pin_revision, resolve_model, served_name
from baton.config.cluster import OtherModel, ServeConfig
from baton.errors import ModelError
from baton.gateway.text.chat_template import TOOLS_TEMPLATE_FILE

NAME: Final = "acme/copier"
CHUNK_BYTES: Final = 10 * 2**20  # what huggingface_hub writes at a time
COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """The parts of Hugging Face's API that a download asks for, with the files of `tiny` and some others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        files = filter(Path.is_file, resolve_model("tiny").iterdir())
        self.files = {each.name: each.read_bytes() for each in files}
        self.files["model.safetensors"] = bytes(5 * CHUNK_BYTES // 2)
        self.files["pytorch_model.bin"] = self.files["original/model.safetensors"] = b"of no use"
        self.files["original/config.json"] = self.files["original/tokenizer.model"] = b"of no use"
        self.files["consolidated-00001-of-00002.safetensors"] = b"of no use"
        self.files[TOOLS_TEMPLATE_FILE] = b"{{ tools }}"
        self.asked: list[str] = []  # files, with the first byte wanted where that is not the first
        self.num_breaks = 0  # how often the weights break off in the middle


class HubRequest(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path in (f"/api/models/{NAME}/revision/{each}" for each in ("main", "v1", COMMIT)):
            self._json({"id": NAME, "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": f"{len(content):040x}"}
                    for name, content in self.server.files.items()
                ]
            )
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"/{NAME}/resolve/{COMMIT}/"))
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str) -> None:
        content = self.server.files[name]
        first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(content):040x}"')
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.asked.append(f"{name} from {first}" if first else name)
        if self.server.num_breaks and name.endswith(".safetensors"):
            self.server.num_breaks -= 1
            self.wfile.write(content[first : (first + len(content)) // 2])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(content[first:])

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def resolve(cache: Path, hub: Hub | None, *models: str) -> subprocess.CompletedProcess[str]:
    """Resolve models in a process of its own: huggingface_hub reads its variables when it is imported."""
    endpoint = "http://127.0.0.1:1" if hub is None else f"http://127.0.0.1:{hub.server_port}"
    program = f"from baton.cluster.model_directory import resolve_model; print(*map(resolve_model, {models}))"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_repository_is_downloaded_once_and_goes_on_where_it_broke_off(hub: Hub, tmp_path: Path) -> None:
    hub.num_breaks = 1000
    broken = resolve(tmp_path, hub, NAME)
    assert broken.returncode and "model 'acme/copier'" in broken.stderr.splitlines()[-1], broken.stderr
    hub.num_breaks = 1
    hub.asked.clear()
    whole = resolve(tmp_path, hub, f"{NAME}@v1")
    assert not whole.returncode, whole.stderr
    directory = Path(whole.stdout.strip())
    files = {each: each.read_bytes() for each in directory.rglob("*") if each.is_file()}
    assert {str(each.relative_to(directory)): content for each, content in files.items()} == {
        name: content for name, content in hub.files.items() if content != b"of no use"
    }
    assert hub.asked == ["model.safetensors", f"model.safetensors from {CHUNK_BYTES}"], "others were kept"
    hub.asked.clear()
    cached = resolve(tmp_path, None, NAME, f"{NAME}@v1", f"{NAME}@{COMMIT}")  # without a network
    assert cached.stdout.split() == 3 * [str(directory)], cached.stderr
    assert not hub.asked


def test_missing_tokenizer_is_told_before_the_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    """Kimi K2 and some repositories of Mistral have a tokenizer of another kind."""
    hub.num_breaks = 1000
    assert "tokenizer.json" not in resolve(tmp_path / "first", hub, NAME).stderr
    hub.files["tiktoken.model"] = hub.files.pop("tokenizer.json")
    warned = resolve(tmp_path / "second", hub, NAME)
    assert warned.returncode, "the weights have broken off"
    message = (
        "'acme/copier': the repository has no tokenizer.json and no tokenizer.model: prompts are token ids"
    )
    assert message in warned.stderr


def test_unknown_repository_and_a_hub_out_of_reach_are_named(hub: Hub, tmp_path: Path) -> None:
    for model, server, reason in (("acme/none", hub, "404"), (NAME, None, "cannot be downloaded")):
        failed = resolve(tmp_path, server, model)
        last = failed.stderr.splitlines()[-1]
        assert failed.returncode and f"model {model!r}" in last and reason in last, failed.stderr


def test_name_of_a_repository_in_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "copier").mkdir(parents=True)
    assert served_name("Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B"
    assert served_name("mine/copier/") == "copier"
    config = ServeConfig(model="mine/copier")
    assert pin_revision(config) is config


@pytest.mark.parametrize(
    ("settings", "is_one_machine"),
    [({"runtime": "local"}, True), ({}, True), ({"ray_address": "10.0.0.1:6380"}, False)],
)
def test_cluster_of_one_machine_names_directories_and_others_commits(
    settings: dict[str, Any], is_one_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in the API are those of the repositories in both cases."""
    directory = tmp_path / COMMIT
    directory.mkdir()
    monkeypatch.setattr(model_directory, "_snapshot", lambda name, revision: directory)
    others = {"other": OtherModel(model=NAME)}
    pinned = pin_revision(ServeConfig(model=f"{NAME}@v1", other_models=others, **settings))
    expected = str(directory) if is_one_machine else f"{NAME}@{COMMIT}"
    assert (pinned.model, pinned.other_models["other"].model) == (expected, expected)
    assert pinned.model_name == NAME


def test_tiny_comes_with_baton() -> None:
    assert (resolve_model("tiny") / "model.safetensors").is_file()


def test_a_directory_of_yours_may_be_called_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny").resolve() == tmp_path / "tiny"


@pytest.mark.parametrize("name", ["nonsense", "../nonsense", "a/b/c", "-a/b", "a/b@"])
def test_unknown_model_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f'{name}\'.*"tiny".*config.json.*got another name'):
        resolve_model(name)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="got a file"):
        resolve_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("model", [None, 5, ""])
def test_value_that_is_no_model_name_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match='^model: expected "tiny", a directory or a repository, got '):
        resolve_model(model)
