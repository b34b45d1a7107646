import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster.cli.commands.chat import first_model, stream_answer
from baton.cluster.cli.connections import HttpClient
from baton.cluster.cluster_record import ClusterRecord, recorded
from baton.errors import ConfigError, InvalidRequest, WorkerLost
from baton.messages.workers import Address
from tests.http_answers import Answering, serving
from tests.unit.cluster.conftest import Baton


def event(body: object) -> str:
    return f"data: {json.dumps(body)}\n\n"


def delta(text: str | None) -> str:
    return event({"choices": [{"delta": {} if text is None else {"content": text}}]})


class Api(Answering):
    """Answers a chat by what its last message says."""

    def get(self) -> None:
        self._answer(200, "{}" if "login" in self.path else json.dumps({"data": [{"id": "tiny"}]}))

    def post(self) -> None:
        asked = json.loads(self.body())
        said = asked["messages"][-1]["content"]
        match said:
            case "key":
                self._answer(401, "{}")
            case "bad":
                self._answer(400, json.dumps({"error": {"message": "temperature is too high"}}))
            case "broken":
                self._answer(502, "<html>")
            case "lost":
                self._answer(200, delta("half") + event({"error": {"message": "a worker died"}}))
            case "cut":
                self._answer(200, delta("half"))
            case "cut chunk":
                self._answer(200, "20\r\nhalf", **{"Transfer-Encoding": "chunked"})
            case "cut error":
                self._answer(500, "20\r\nhalf", **{"Transfer-Encoding": "chunked"})
            case "page":
                self._answer(200, "data: <html>\n\n")
            case _:
                number = len(asked["messages"])
                parts = [": ping\n\n", delta(f"{number}:"), delta(said), delta(None), "data: [DONE]\n\n"]
                self._answer(200, "".join(parts))

    def _answer(self, status: int, body: str, **headers: str) -> None:
        self.answer(status, body.encode(), headers)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Api) as port:
        yield f"http://127.0.0.1:{port}"


def ask(url: str, text: str) -> str:
    return "".join(stream_answer(HttpClient(url), "tiny", [{"role": "user", "content": text}], {}))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_answer_comes_in_pieces(url: str, suffix: str) -> None:
    assert ask(url + suffix, "hello") == "1:hello"
    assert first_model(HttpClient(url + suffix)) == "tiny"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("key", ConfigError, "wants a key, none was given: set BATON_API_KEY or OPENAI_API_KEY"),
        ("bad", InvalidRequest, "temperature is too high"),
        ("broken", WorkerLost, "answers 502"),
        ("lost", WorkerLost, "a worker died"),
        ("cut", WorkerLost, "the connection ended before the answer was complete"),
        ("cut chunk", WorkerLost, "has broken off its answer: IncompleteRead"),
        ("cut error", WorkerLost, "does not answer: IncompleteRead"),
        ("page", WorkerLost, "the API's answer cannot be read: "),
    ],
)
def test_errors_of_the_api_are_raised(url: str, text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ask(url, text)


def test_list_of_models_that_is_none_is_told(url: str) -> None:
    with pytest.raises(WorkerLost, match="the API's answer cannot be read: .*`data`"):
        first_model(HttpClient(f"{url}/login"))


def test_wrong_url_and_dead_api_are_told() -> None:
    with pytest.raises(WorkerLost, match="127.0.0.1:1 does not answer"):
        ask("127.0.0.1:1", "hello")
    for wrong in ("ftp://host", "http://host:99999", "http://host:port", "http://[::1", "http://.host"):
        with pytest.raises(ConfigError, match="--url: expected one such as"):
            HttpClient(wrong)


@pytest.mark.parametrize("key", ["sk-1\n", "ключ"])
def test_key_that_no_header_can_carry_is_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", key)
    with pytest.raises(ConfigError, match="BATON_API_KEY or OPENAI_API_KEY: expected printable ASCII"):
        HttpClient("127.0.0.1:1")


def test_conversation_is_sent_whole(url: str, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))
    status, out, _ = baton("chat", "--url", url, "--system", "be short")
    assert (status, out) == (0, "2:one\n4:two\n")  # with the system's turn, and the answer to the first
    assert baton("chat", "--url", url, "hello").out == "1:hello\n"


@pytest.mark.parametrize("variable", ["BATON_API_KEY", "OPENAI_API_KEY"])
def test_unknown_key_is_told_from_no_key(
    url: str, variable: str, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sk-1")
    status, _, err = baton("chat", "--url", url, "key")
    assert status == 2 and "does not know the key: set BATON_API_KEY" in err


def test_cluster_is_found_by_its_port(
    url: str, tmp_path: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    port = url.rpartition(":")[2]
    router = Address("127.0.0.1", 7000)
    with recorded() as record:
        record(ClusterRecord(host="0.0.0.0", port=int(port), routers=(router,), keys=(b"k" * 16,)))
        assert baton("chat", "--port", port, "hello").out == "1:hello\n"
        assert "no cluster of yours with its API at port 1" in baton("chat", "--port", "1", "hello").err
    assert "--port: --url has one already" in baton("chat", "--port", "1", "--url", url, "hello").err
