"""A rank knows which process of its node can end what it waits for: a lock, a pipe or a socket that has two ends."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from crossrank.instrument.hang.other_ends import OtherEnds
from crossrank.recording import C_SLEEPS, PYTHON_SLEEPS, STORE

WAITED_IN = ("futex", PYTHON_SLEEPS, "select", "poll", "epoll_wait")
HOLDS = {
    "a file lock": "import fcntl; f = open(path); fcntl.flock(f, fcntl.LOCK_EX); ready()",
    "a TCP socket": """
import socket
server = socket.create_server(("127.0.0.1", 0)); ready(server.getsockname()[1]); connection, _ = server.accept()
""",
    "a TCP socket with a timeout": """
import socket
server = socket.create_server(("127.0.0.1", 0)); ready(server.getsockname()[1]); connection, _ = server.accept()
""",
    "a Unix socket": """
import socket
server = socket.socket(socket.AF_UNIX); server.bind(path + ".socket"); server.listen(); ready()
connection, _ = server.accept()
""",
    "a named pipe": "import os; os.mkfifo(path + '.pipe'); ready(); end = os.open(path + '.pipe', os.O_WRONLY)",
    "an event loop": """
import socket
server = socket.create_server(("127.0.0.1", 0)); ready(server.getsockname()[1]); connection, _ = server.accept()
""",
    "a lock of SQLite": """
import sqlite3
db = sqlite3.connect(path + ".db", isolation_level=None); db.execute("create table t(n)"); db.execute("begin exclusive")
ready()
""",
    "the server of a queue": """
import multiprocessing.managers
manager = multiprocessing.managers.SyncManager(("127.0.0.1", 0), b"key"); manager.start(); ready(manager.address[1])
""",
    "a pipe of its own": "ready()",
    "torch's store": """
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1)); ready(store.port)
""",
    "torch's store without libuv": """
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False); ready(store.port)
""",
}
WAITS = {
    "a file lock": "import fcntl; fcntl.flock(open(path), fcntl.LOCK_EX)",
    "a TCP socket": "import socket; socket.create_connection(('127.0.0.1', port)).recv(1)",
    "a TCP socket with a timeout": "import socket; socket.create_connection(('127.0.0.1', port), 3600).recv(1)",
    "a Unix socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect(path + '.socket'); s.recv(1)",
    "a named pipe": "open(path + '.pipe', 'rb', 0).read(1)",
    "an event loop": """
import select, socket
s = socket.create_connection(("127.0.0.1", port)); e = select.epoll(); e.register(s, select.EPOLLIN); e.poll()
""",
    "a lock of SQLite": """
import sqlite3
sqlite3.connect(path + ".db", timeout=3600, isolation_level=None).execute("insert into t values (1)")
""",
    "the server of a queue": """
import multiprocessing.connection
multiprocessing.connection.Client(("127.0.0.1", port), authkey=b"key").recv()
""",
    "a pipe of its own": "import os; os.read(os.pipe()[0], 1)",
    "torch's store": """
from datetime import timedelta
from torch.distributed import TCPStore
TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1)).get("a key that nobody sets")
""",
}
WAITS["torch's store without libuv"] = WAITS["torch's store"].replace("False,", "False, use_libuv=False,")
HOLDER = """
import signal, sys
path = sys.argv[1]
def ready(port=0): print(port, flush=True)
"""
WAITER = """
import json, os, sys, threading, time
path, port = sys.argv[1], int(sys.argv[2])
from crossrank.instrument.hang.other_ends import OtherEnds
def wait(): exec(sys.argv[3], globals())
thread = threading.Thread(target=wait, daemon=True); thread.start()
for line in sys.stdin:
    found = OtherEnds().blocked(thread.native_id, ends=True)
    print(json.dumps([found.call, found.released_by]), flush=True)
os._exit(0)
"""


@contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def blocked(tmp_path: Path, what: str, calls: tuple[str, ...], *, known: bool) -> tuple[list[int], int]:
    """What a process knows of the thread that waits, once it is in one of `calls` and, if `known`, who ends that; and
    the process that can end it."""
    path = tmp_path / "file"
    path.touch()
    with ExitStack() as stack:
        holder = stack.enter_context(python(f"{HOLDER}{HOLDS[what]}\nsignal.pause()", str(path)))
        port = said(holder).strip()
        waiter = stack.enter_context(python(WAITER, str(path), port, WAITS[what]))
        assert waiter.stdin is not None
        for _ in range(20_000):
            print(file=waiter.stdin, flush=True)
            call, by = json.loads(said(waiter))
            if call in calls and (by or not known):
                return by, holder.pid
        raise AssertionError(f"the thread is in {call}, which {by} can end")


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("a file lock", "flock"),
        ("a TCP socket", "recvfrom"),
        ("a TCP socket with a timeout", "poll"),
        ("a Unix socket", "recvfrom"),
        ("a named pipe", "read"),
        ("an event loop", "epoll_wait"),
        ("a lock of SQLite", C_SLEEPS),
    ],
)
def test_the_process_that_can_end_a_wait_is_known(what: str, call: str, tmp_path: Path) -> None:
    by, holder = blocked(tmp_path, what, (call,), known=True)
    assert by == [holder]


@pytest.mark.parametrize("what", ["torch's store", "torch's store without libuv"])
def test_any_client_of_a_store_may_set_the_key_that_a_thread_waits_for(what: str, tmp_path: Path) -> None:
    by, _ = blocked(tmp_path, what, (STORE,), known=False)
    assert by == []


def test_any_client_of_a_server_may_end_the_wait_of_another_one(tmp_path: Path) -> None:
    by, _ = blocked(tmp_path, "the server of a queue", ("read", "recvfrom"), known=False)
    assert by == []


def test_a_process_that_can_end_its_own_wait_waits_for_no_other_one(tmp_path: Path) -> None:
    by, _ = blocked(tmp_path, "a pipe of its own", ("read",), known=False)
    assert by == []


@pytest.mark.parametrize(
    ("wait", "timed"),
    [
        (threading.Event.wait, False),
        (lambda over: over.wait(3600), True),
        (lambda _: time.sleep(3600), True),
        (lambda _: select.select([os.pipe()[0]], [], []), False),
        (lambda _: select.select([os.pipe()[0]], [], [], 3600), True),
        (lambda _: polled().poll(), False),
        (lambda _: polled().poll(3_600_000), True),
        (lambda _: select.epoll().poll(), False),
        (lambda _: select.epoll().poll(3600), True),
    ],
    ids=["event", "event, timed", "sleep", "select", "select, timed", "poll", "poll, timed", "epoll", "epoll, timed"],
)
def test_a_wait_with_a_limit_ends_by_itself(wait: Callable[[threading.Event], object], timed: bool) -> None:
    thread = threading.Thread(target=wait, args=(threading.Event(),), daemon=True)
    thread.start()
    assert thread.native_id is not None
    deadline = time.monotonic() + 30
    while (found := OtherEnds().blocked(thread.native_id, ends=False)).call not in WAITED_IN:
        assert time.monotonic() < deadline, found
    assert found.timed is timed


def polled() -> select.poll:
    found = select.poll()
    found.register(os.pipe()[0], select.POLLIN)
    return found
