import os
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest

from baton.errors import WireError
from baton.kvtransfer.transports.process_watch import ProcessWatch, peer_process
from baton.rpc.connection import DroppedPeers
from tests.transfer_ends import open_files


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_each_death_is_reported_once_when_it_happens() -> None:
    deaths: queue.Queue[str] = queue.Queue()
    watch = ProcessWatch()
    first, second = sleeper(), sleeper()
    watch.add(os.pidfd_open(first.pid), lambda: deaths.put("first"))
    watch.add(os.pidfd_open(second.pid), lambda: deaths.put("second"))
    second.send_signal(signal.SIGSTOP)
    first.kill()
    assert deaths.get(timeout=5.0) == "first"
    with pytest.raises(queue.Empty):
        deaths.get(timeout=0.1)  # stopped is not dead
    second.kill()
    assert deaths.get(timeout=5.0) == "second"
    first.wait()
    second.wait()
    watch.close()


def test_closed_watch_keeps_no_descriptor() -> None:
    before = open_files()
    watch = ProcessWatch()
    watch.close()
    watch.add(os.pidfd_open(os.getpid()), lambda: None)
    assert open_files() == before


def test_descriptor_that_cannot_be_watched_is_closed() -> None:
    watch = ProcessWatch()
    before = open_files()
    with pytest.raises(PermissionError):  # epoll refuses regular files
        watch.add(os.open(__file__, os.O_RDONLY), lambda: None)
    assert open_files() == before
    watch.close()


def test_a_process_that_is_dead_already_is_told_at_once() -> None:
    process = sleeper()
    descriptor = os.pidfd_open(process.pid)
    process.kill()
    process.wait()
    deaths: queue.Queue[str] = queue.Queue()
    watch = ProcessWatch()
    watch.add(descriptor, lambda: deaths.put("dead"))
    assert deaths.get(timeout=5.0) == "dead"
    watch.close()


def test_one_report_that_fails_does_not_silence_the_next() -> None:
    deaths: queue.Queue[str] = queue.Queue()
    watch = ProcessWatch()

    def fail() -> None:
        raise ValueError("a report that fails")

    for report in (fail, lambda: deaths.put("tell")):
        process = sleeper()
        watch.add(os.pidfd_open(process.pid), report)
        process.kill()
        process.wait()
    assert deaths.get(timeout=5.0) == "tell"
    watch.close()


def test_closing_leaves_nothing() -> None:
    process = sleeper()
    before = (open_files(), threading.active_count())
    watch = ProcessWatch()
    watch.add(os.pidfd_open(process.pid), lambda: None)
    watch.close()
    watch.close()
    assert (open_files(), threading.active_count()) == before
    process.kill()
    process.wait()


def test_the_other_end_of_a_socket_is_known() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    descriptor = peer_process(left, DroppedPeers())
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:
        assert f"Pid:\t{os.getpid()}\n" in lines
    for opened in (left, right):
        opened.close()
    os.close(descriptor)


def test_process_of_another_user_is_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    dropped, user = DroppedPeers(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with left, right, pytest.raises(WireError, match=f"user {user} may not"):
        peer_process(left, dropped)
    assert dropped.counts() == {"user": 1}
