"""Two gateway processes behind one port, as `baton serve --gateways 2` starts them: a scrape sees both."""

import http.client
import itertools
import json
import re

from baton.bench.serve.overhead import Plane, hosted

NUM_REQUESTS = 24


def ask(port: int, method: str, path: str, body: object = None) -> str:
    """The answer's body, over a connection of its own: the kernel chooses a gateway for it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text
    finally:
        connection.close()


def answered(scrape: str) -> dict[str, int]:
    """gateway -> completions that it has answered."""
    pattern = r'^baton_requests_total\{gateway="(\w+)",route="/v1/completions",status="200"\} (\S+)$'
    return {name: int(float(count)) for name, count in re.findall(pattern, scrape, re.MULTILINE)}


def use(port: int) -> None:
    scrapes = []
    for number in range(NUM_REQUESTS):
        ask(port, "POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
        scrape = ask(port, "GET", "/metrics")
        scrapes.append(answered(scrape))
        assert sum(scrapes[-1].values()) == number + 1  # whichever gateway was asked, and whichever answered
        assert len(set(re.findall(r'^baton_open_requests\{gateway="(\w+)"', scrape, re.MULTILINE))) == 2
    for before, after in itertools.pairwise(scrapes):
        assert all(after[name] >= count for name, count in before.items())
    assert json.loads(ask(port, "GET", "/load")) == {"server_load": 0}


def test_any_of_them_shows_what_all_have_answered() -> None:
    with hosted(Plane("tiny", num_gateways=2)) as target:
        before_s = target.cpu_s()
        use(int(target.url.rpartition(":")[2]))
        assert target.cpu_s() > before_s > 0
