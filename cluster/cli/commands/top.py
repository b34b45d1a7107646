"""Watch a cluster in the terminal: workers, tenants and requests, a snapshot a second. It changes nothing.

j, k, arrows   next and previous row          tab            next list
gg, G          first and last row             / , Esc        filter, all rows again
Ctrl-D, Ctrl-U half a page                    s, S           sort by the next column, the other way round
Enter, l       everything about the row       q              close, or quit

With tenants the key of an admin is needed, in BATON_API_KEY or OPENAI_API_KEY; --operator-port needs none.
"""

import argparse
from typing import Final

from baton.cluster.cli import output
from baton.cluster.cli.http_client import HttpClient, add_url_options, url_of
from baton.cluster.cli.options import CliCommand
from baton.errors import ConfigError

SILENCE_S: Final = 10.0  # of a stream that tells something every second


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    try:
        from baton.cluster.cli.top_screen import TopApp  # textual is an extra, and takes 0.3 s to load
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise ConfigError("textual is not installed: pip install '.[top]', in Baton's checkout") from None
    client = HttpClient(url_of(arguments), timeout_s=SILENCE_S)
    client.ask("GET", "/load").read()  # a wrong address or key is told before the screen is taken
    TopApp(client).run()


top = CliCommand(__doc__, add_url_options, _run)
