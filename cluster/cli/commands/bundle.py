"""Write what a cluster did lately into one file, for `baton sim --replay` and for people who help.

The file is a ZIP archive: the routers' decisions and inputs, faults, the gateways' metrics, the status and
the settings. Prompts are in it as their lengths and the first halves of their pages' keys. It has no text, no
token, no key and no password. Where /metrics needs a key, set BATON_API_KEY to an admin's.
"""

import argparse
import asyncio
import contextlib
import datetime
import re
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.connections import HttpClient, add_router_options, no_answer, routers_of, spelled
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cluster_key import Keys
from baton.cluster.cluster_record import find_record, url
from baton.cluster.operator_node import Operator, connected
from baton.config.loader import duration_s
from baton.errors import BatonError, ConfigError, PeerGone, reason_of
from baton.messages.operations import Status
from baton.messages.workers import Address, Routers
from baton.sim.replay import Replay, frame_chunks

FORMAT: Final = 1
REPORTS_S: Final = 5.0  # for the reports of gateways to a router
SCRAPE_TIMEOUT_S: Final = 10.0
MAX_SCRAPE_BYTES: Final = 64 * 2**20


class Bundle:
    """The files of a bundle, and the parts that could not be had."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.missing: list[str] = []  # a reason each

    def add_json(self, name: str, content: object) -> None:
        """Add a file with one JSON value."""
        self.files[name] = msgspec.json.format(msgspec.json.encode(content), indent=1)

    def add_recording(self, chunks: Sequence[bytes]) -> None:
        """Add what one router recorded, and the decisions and faults in it. Raises ConfigError."""
        replay = Replay(chunks)
        folder = f"routers/{replay.checkpoint.router}"
        self.files[f"{folder}/recording"] = frame_chunks(chunks)
        self.files[f"{folder}/decisions.jsonl"] = _lines(replay.decisions())
        self.files[f"{folder}/faults.jsonl"] = _lines(replay.faults())
        self.add_json(f"{folder}/settings.json", replay.checkpoint.config)

    def write(self, path: Path, last_s: float) -> None:
        """Write the archive, with a manifest. Raises ConfigError when the file cannot be written."""
        self.add_json(
            "manifest.json",
            {
                "format": FORMAT,
                "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "last_s": last_s,
                "missing": self.missing,
                "files": {name: len(body) for name, body in self.files.items()},
            },
        )
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, body in self.files.items():
                    archive.writestr(name, body)
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {reason_of(error)}") from None


def _lines(objects: Iterator[Mapping[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in objects)


async def collect(routers: Routers, keys: Keys, last_s: float) -> Bundle:
    """Ask routers for recordings, and gateways for metrics. Raises WorkerLost when no router answers."""
    bundle, statuses = Bundle(), list[Status]()
    for router in routers:
        where = f"the router at {spelled((router,))}"
        try:
            async with connected([router], keys) as operator:
                statuses.append(await _reported_status(operator))
                chunks = await operator.recording(last_s)
            if chunks:
                bundle.add_recording(chunks)
            else:
                bundle.missing.append(f"{where} records nothing")
        except (TimeoutError, PeerGone):
            bundle.missing.append(f"{where} does not answer")
        except BatonError as error:
            bundle.missing.append(f"{where}: {error}")
    if not statuses:
        raise no_answer(routers)
    bundle.add_json("status.json", statuses)
    await _scrape(bundle, statuses)
    return bundle


async def _reported_status(operator: Operator) -> Status:
    """Return the status of a router, to which a gateway that has just started soon tells its address."""
    until_s = time.monotonic() + REPORTS_S
    while True:
        status = await operator.status()
        listening = [each for each in status.gateways if each.address is not None]
        if len(listening) >= max(1, status.num_gateways) or time.monotonic() >= until_s:
            return status
        await asyncio.sleep(0.25)


async def _scrape(bundle: Bundle, statuses: Sequence[Status]) -> None:
    """Add the metrics of each address, which are those of all gateways behind the port."""
    gateways = {each.id: each for status in statuses for each in status.gateways}
    addresses = {each.address for each in gateways.values() if each.address is not None}
    if not addresses:
        bundle.missing.append("the metrics: no gateway has told a router its address")
    for address in sorted(addresses, key=lambda address: (address.host, address.port)):
        try:
            metrics = await asyncio.to_thread(_metrics_of, address)
        except BatonError as error:
            bundle.missing.append(f"the metrics of the gateway at {spelled((address,))}: {error}")
            continue
        bundle.files[f"metrics/{re.sub('[^0-9A-Za-z.-]', '_', spelled((address,)))}.prom"] = metrics


def _metrics_of(address: Address) -> bytes:
    """Scrape a gateway. Raises BatonError when it does not answer, or wants another key."""
    client = HttpClient(url(address.host, address.port), timeout_s=SCRAPE_TIMEOUT_S)
    return client.read("/metrics", MAX_SCRAPE_BYTES)


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "--last",
        default="15m",
        metavar="TIME",
        help="how far back to go, such as 90s (default: 15m)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: baton-bundle-DATE.zip")
    add_router_options(parser)


def _run(arguments: argparse.Namespace) -> None:
    last_s = duration_s(arguments.last, "--last")
    routers, keys = routers_of(arguments)
    bundle = asyncio.run(collect(routers, keys, last_s))
    settings = None
    with contextlib.suppress(ConfigError):
        record = find_record(arguments.port)
        settings = record.settings if record.routers == routers else None
    if settings:
        bundle.add_json("settings.json", settings)
    else:
        bundle.missing.append("the settings of gateways and workers: `baton serve` runs elsewhere")
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = arguments.out or Path(f"baton-bundle-{date}.zip")
    bundle.write(path, last_s)
    missing = [f"not in it: {each}" for each in bundle.missing]
    output.show(f"{path}: {path.stat().st_size} bytes, {len(bundle.files)} files", *missing)


bundle = CliCommand(__doc__, _add_options, _run)
