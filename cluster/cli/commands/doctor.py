"""Look at this machine, and say what `baton serve` with the same options would miss, and how to mend it.

Addresses are really asked: Ray's head (--ray-address), Redis (--redis), and the routers of --router.

Exit status: 0, or 1 when something would keep it from serving.
"""

import argparse

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.options import FAILED
from baton.cluster.cli.serve_options import add_options as add_serve_options
from baton.cluster.cli.serve_options import addresses, key_file, settings
from baton.cluster.cli.settings import Given
from baton.cluster.cluster_key import read_keys
from baton.cluster.doctor import Finding, examine, routers

MARKS = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_serve_options(parser)
    parser.add_argument(
        "--router", type=addresses, metavar="HOST:PORT", help="routers to ask; several with commas"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    given = settings(arguments)
    given.given.setdefault("model", Given("tiny", "default"))
    findings = examine(given.build())
    if arguments.router is not None:
        given_file = given.given.get("cluster_key_file")
        findings += routers(
            arguments.router, read_keys(key_file(str(given_file.value) if given_file else None))
        )
    if arguments.json:
        output.write(f"{msgspec.json.encode(findings).decode()}\n")
    else:
        output.write("".join(map(_lines, findings)))
    return FAILED if any(finding.verdict == "error" for finding in findings) else 0


def _lines(finding: Finding) -> str:
    mend = f"        -> {finding.mend}\n" if finding.mend else ""
    return f"{MARKS[finding.verdict]} {finding.what}\n{mend}"
