"""What streams notice when a node of Ray stands still, and when its head dies: four nodes on one machine.

python -m baton.bench.faults.ray_faults [--streams 30] [--head-away 300] [--json FILE]

The head, a node without cores where `baton serve` runs, and two nodes for its workers, on loopback addresses
of their own; Ray keeps its tables in a Redis of this benchmark. First every process of the node that has the
only decode worker is stopped (SIGSTOP) under streams. Then the head is killed under streams, a prefill worker
meanwhile, and a head comes back. Every answer is compared with what an undisturbed run said.
"""

import argparse
import asyncio
import http
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from baton.bench.report import RESULTS, Row, at_most, print_table, write_json
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import connected
from baton.cluster.runtimes.base import descendants, kill_tree

START_S: Final = 180.0
MAX_TOKENS: Final = 400
REPLACED_S: Final = 20.0
NOTICED_S: Final = 5.0
BACK_S: Final = 60.0
TITLE: Final = "A node of Ray that stands still, and a head that is away"
HEAD, SERVE, FIRST, SECOND = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
# On one machine Ray takes other nodes' raylets for its own: each program is told which node it is on.
RAY: Final = """
import sys
import ray._private.services as services
services.find_gcs_addresses = lambda: set()
from ray.scripts.scripts import main
sys.exit(main())
"""
SERVER: Final = f"""
import functools, sys
import ray
ray.init = functools.partial(ray.init, _node_ip_address={SERVE!r})
from baton.cluster.cli.main import main
sys.exit(main())
"""


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until it is true. TimeoutError when it takes longer."""
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() - begun_s > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - begun_s


class RayNodes:
    """Raylets of one Ray cluster on this machine, by their addresses."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self.folder = folder
        self.port = _free_port(HEAD)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._number = 0
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
        }

    def start(self, address: str, *, num_cpus: int) -> None:
        """Start a node and wait until it runs; the one at HEAD is the head."""
        self._number += 1
        log = self.folder / f"node-{self._number}.log"
        # fmt: off
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}/ray"]
            if address == HEAD else [f"--address={HEAD}:{self.port}"]
        )
        command = [
            sys.executable, "-c", RAY, "start", "--block", "--disable-usage-stats",
            f"--node-ip-address={address}", f"--num-cpus={num_cpus}", "--num-gpus=0",
            "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0", *where,
        ]
        # fmt: on
        with log.open("wb") as output:
            self._processes[address] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        ended = self._processes[address].poll
        until(
            lambda: ended() is not None or "Ray runtime started" in log.read_text(),
            START_S,
            f"the start of Ray at {address}",
        )
        if ended() is not None:
            raise RuntimeError(f"Ray at {address} ended: {log.read_text()}")

    def pids(self, address: str) -> list[int]:
        """All processes of a node, its actors included."""
        return [self._processes[address].pid, *descendants(self._processes[address].pid)]

    def node_of(self, pid: int) -> str:
        """The address of the node that a process belongs to."""
        return next(address for address in self._processes if pid in self.pids(address))

    def kill(self, address: str) -> None:
        kill_tree(self._processes[address].pid)
        self._processes[address].wait()

    def close(self) -> None:
        for address in self._processes:
            self.kill(address)


class Served:
    """`baton serve` on these nodes."""

    def __init__(self, nodes: RayNodes, arguments: Sequence[str]) -> None:
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "serve", "tiny", "--port", "0", *arguments],
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        errors, banner = self.process.stderr, ""
        self._listening = threading.Thread(target=lambda: self.said.extend(errors), daemon=True)
        self._listening.start()
        for line in self.process.stdout:
            banner += line
            if line.startswith("curl"):
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", banner)
        if found is None:
            raise RuntimeError("".join(self.said))
        self.port = int(found[1])

    def get(self, path: str) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def workers(self) -> dict[str, tuple[str, int]]:
        """Name of each worker -> its id and its process, as routers list them."""
        return asyncio.run(self._workers())

    async def _workers(self) -> dict[str, tuple[str, int]]:
        record = find_record(self.port)
        async with connected(record.routers, record.keys) as operator:
            status = await operator.status()
        workers = [entry.worker for entry in status.workers]
        return {worker.name: (worker.id, worker.pid) for worker in workers}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait()
        self._listening.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Stream(threading.Thread):
    """One streamed answer; `text` is None as long as it has not come to its end, `problem` tells why."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self.num_chunks = 0
        self.text: str | None = None
        self.problem = ""
        self._port, self._number = port, number

    def run(self) -> None:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=400)) as connection:
                self._read(connection)
        except (OSError, http.client.HTTPException) as error:
            self.problem = repr(error)

    def _read(self, connection: http.client.HTTPConnection) -> None:
        body = {
            "model": "tiny", "prompt": f"stream {self._number}:", "max_tokens": MAX_TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        text = ""
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            self.problem = f"{response.status}: {response.read().decode()}"
            return
        for line in response:
            event = line.decode().strip()
            if event == "data: [DONE]":
                self.text = text
            elif event.startswith("data: "):
                chunk = json.loads(event.removeprefix("data: "))
                self.problem = str(chunk.get("error", ""))
                text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                self.num_chunks += 1


def begin(port: int, num_streams: int) -> list[Stream]:
    streams = [Stream(port, number) for number in range(num_streams)]
    for stream in streams:
        stream.start()
    return streams


def all_begun(streams: Sequence[Stream]) -> None:
    """Wait for the first chunks of each stream, or for its end: some have few characters.

    RuntimeError when a stream fails, TimeoutError when one hangs.
    """

    def are_all_begun() -> bool:
        problems = [stream.problem for stream in streams if stream.problem]
        if problems:
            raise RuntimeError(f"{len(problems)} of {len(streams)} streams failed: {problems[0]}")
        return all(stream.num_chunks > 5 or stream.text is not None for stream in streams)

    until(are_all_begun, START_S, "the first chunks")


def undisturbed(port: int, num_streams: int) -> list[str | None]:
    """The text of each stream where nothing goes wrong."""
    streams = begin(port, num_streams)
    for stream in streams:
        stream.join(400)
    return [stream.text for stream in streams]


def judge(streams: Sequence[Stream], golden: Sequence[str | None]) -> tuple[int, int]:
    """How many failed, and how many said something else."""
    for stream in streams:
        stream.join(400)
    failed = sum(stream.text is None for stream in streams)
    wrong = sum(
        stream.text is not None and stream.text != text for stream, text in zip(streams, golden, strict=True)
    )
    return failed, wrong


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def world() -> Iterator[tuple[RayNodes, Served]]:
    """Redis, four nodes and a cluster of two prefill workers and one decode worker; all is ended at last."""
    with ExitStack() as ends:
        folder = Path(tempfile.mkdtemp(prefix="baton-ray-"))
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        port = _free_port("127.0.0.1")
        redis = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
            stdout=subprocess.DEVNULL,
        )
        ends.callback(redis.wait)
        ends.callback(redis.kill)
        nodes = RayNodes(folder, port)
        ends.callback(nodes.close)
        nodes.start(HEAD, num_cpus=0)
        nodes.start(SERVE, num_cpus=0)
        nodes.start(FIRST, num_cpus=3)
        nodes.start(SECOND, num_cpus=3)
        options = ["--ray-address", f"{HEAD}:{nodes.port}", "--prefill", "2", "--decode", "1"]
        served = Served(nodes, [*options, "--kv-cache-memory", "64MiB", "--drain-timeout", "5"])
        ends.callback(served.stop)
        yield nodes, served


def frozen_node(nodes: RayNodes, served: Served, golden: Sequence[str | None]) -> list[Row]:
    """Stop every process of the node with the decode worker, under streams."""
    streams = begin(served.port, len(golden))
    all_begun(streams)
    before, pid = served.workers()["decode-0"]
    frozen = nodes.pids(nodes.node_of(pid))
    for each in frozen:
        os.kill(each, signal.SIGSTOP)
    try:
        replaced_s = until(
            lambda: served.workers().get("decode-0", (before, 0))[0] != before, START_S, "a new decode worker"
        )
        failed, wrong = judge(streams, golden)
    finally:
        for each in frozen:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
    return [
        at_most("frozen node: failed", failed, f"of {len(streams)} streams", 0),
        at_most("frozen node: wrong", wrong, f"of {len(streams)} streams", 0),
        at_most("frozen node: new worker after", replaced_s, "s", REPLACED_S),
    ]


def head_away(nodes: RayNodes, served: Served, golden: Sequence[str | None], away_s: float) -> list[Row]:
    """Kill the head, and a worker meanwhile, under streams; a head comes back after `away_s`."""
    streams = begin(served.port, len(golden))
    all_begun(streams)
    nodes.kill(HEAD)
    killed_s = time.monotonic()
    noticed_s = until(lambda: "warnings" in served.get("/health"), START_S, "a warning in /health")
    before, pid = served.workers()["prefill-0"]
    os.kill(pid, signal.SIGKILL)
    found = [judge(streams, golden), judge(begin(served.port, len(golden)), golden)]
    time.sleep(max(0.0, away_s - (time.monotonic() - killed_s)))
    nodes.start(HEAD, num_cpus=0)
    back_s = until(
        lambda: served.workers().get("prefill-0", (before, 0))[0] != before, START_S, "the killed worker"
    )
    found.append(judge(begin(served.port, len(golden)), golden))
    unit = f"of {len(found) * len(golden)} streams"
    return [
        at_most(f"head away {away_s:.0f} s: failed", sum(failed for failed, _ in found), unit, 0),
        at_most(f"head away {away_s:.0f} s: wrong", sum(wrong for _, wrong in found), unit, 0),
        at_most("head away: noticed after", noticed_s, "s", NOTICED_S),
        at_most("killed worker, back after the head", back_s, "s", BACK_S),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--head-away", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, default=RESULTS / "ray_faults.json", metavar="FILE")
    arguments = parser.parse_args()
    with world() as (nodes, served):
        golden = undisturbed(served.port, arguments.streams)
        try:
            rows = frozen_node(nodes, served, golden)
            print_table(TITLE, rows)
            rows += head_away(nodes, served, golden, arguments.head_away)
        except Exception:
            print("".join(served.said), json.dumps(served.get("/health")), file=sys.stderr)
            raise
    print_table(TITLE, rows)
    write_json(arguments.json, TITLE, rows, {"streams": arguments.streams})
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
