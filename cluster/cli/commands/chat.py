"""Talk to a cluster: what is typed is sent with all that was said before, and answered as it is made.

With MESSAGE it answers that one and ends. An empty line or Ctrl-D ends it. Where the API wants a key, that is
BATON_API_KEY's or OPENAI_API_KEY's.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from baton.cluster.cli import output
from baton.cluster.cli.client import ApiClient, Message
from baton.cluster.cluster_record import find_record
from baton.config.environment import api_key
from baton.errors import ConfigError

PROMPT: Final = "> "


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="what to say")
    parser.add_argument("--url", metavar="URL", help="of the API (that of the cluster on this machine)")
    parser.add_argument("--port", type=int, metavar="N", help="of the API of a cluster on this machine")
    parser.add_argument("--model", metavar="NAME", help="as the API names it (its first)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer (512)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest (0.7)")


def run(arguments: argparse.Namespace) -> None:
    """The key is BATON_API_KEY's or OPENAI_API_KEY's. Raises ConfigError and WorkerLost."""
    output.check()
    if arguments.url and arguments.port is not None:
        raise ConfigError("--port: --url has one already, leave one of them out")
    client = ApiClient(arguments.url or find_record(arguments.port).url, api_key())
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    model = arguments.model or client.first_model()
    said: list[Message] = []
    if arguments.system:
        said.append({"role": "system", "content": arguments.system})
    for question in [arguments.message] if arguments.message else _typed():
        said.append({"role": "user", "content": question})
        answer = ""
        for text in client.chat(model, said, settings):
            output.write(text)
            answer += text
        output.write("\n")
        said.append({"role": "assistant", "content": answer})


def _typed() -> Iterator[str]:
    if sys.stdin is None:
        raise ConfigError("MESSAGE: expected one, as there is nothing to read one from")
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            output.write(PROMPT)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
