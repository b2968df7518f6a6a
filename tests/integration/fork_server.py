"""Python processes that start in milliseconds: a server imports torch once and forks itself for every script.

A fork runs its script as the interpreter does, and ends as the interpreter ends: its own traceback, exit status and
atexit. What it does not show is how a process starts; where that is the subject, start a real one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]

_PRELOADED = (
    "crossrank.instrument.session",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.data",
)
"""What takes long to import, and what torch imports late. Not nvtx, which tests replace."""

TEARDOWN = "TESTS_TEAR_DOWN"
"""Variable with which a fork ends as the interpreter does to the last, which takes 0.2 s: all modules and C++ objects
are destroyed. Without it a fork whose script has run waits for its threads, runs what is registered with atexit, and
ends."""

ADDRESS = "CROSSRANK_FORK_SERVER"
"""Variable with the path of the socket at which the server of all processes of a test run is reached."""

_LARGEST_REQUEST = 1 << 20


class ForkedProcess(subprocess.Popen[str]):
    """A process as `subprocess.Popen([sys.executable, script, …])` starts it, or with `-m module`, but a fork.

    It is no child of this process; its parent tells of its end.
    """

    _ended: int
    """Where its parent writes its exit status."""
    _lock: threading.Lock

    def _execute_child(self, *given: Any) -> None:
        args, cwd, env, start_new_session = given[0], given[5], given[6], given[21]
        p2cread, _, _, c2pwrite, _, errwrite = given[10:16]
        interpreter, *words = map(str, args)
        assert interpreter == sys.executable, f"{interpreter} cannot be forked"
        request = {
            "words": words,
            "folder": str(cwd or os.getcwd()),
            "environment": env if env is not None else dict(os.environ),
            "new_session": bool(start_new_session),
        }
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._lock = threading.Lock()
        self._ended, write_end = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(os.environ[ADDRESS])
            socket.send_fds(server, [json.dumps(request).encode()], [*streams, write_end])
            self.pid = int(server.recv(64))
        self._child_created = True
        for stream in {p2cread, c2pwrite, errwrite, write_end} - {-1}:
            os.close(stream)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = os.waitstatus_to_exitcode(int(os.read(self._ended, 64)))
                os.close(self._ended)
        return self.returncode


def start_server() -> None:
    """Start the server of this process and those that it starts; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="crossrank-tests-"))
    atexit.register(shutil.rmtree, folder)
    # Its frames are below those of every script; a file of a library is not taken for the user's code.
    program = folder / "lib" / "python3" / "fork_server.py"
    program.parent.mkdir(parents=True)
    shutil.copy(__file__, program)
    os.environ[ADDRESS] = str(folder / "socket")
    alive, kept_open = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, program, str(listener.fileno()), str(alive)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), alive],
        )
    os.close(alive)

    @atexit.register
    def stop() -> None:
        os.close(kept_open)
        server.wait(10)


def serve(listener: socket.socket, alive: int) -> None:
    """Fork for every request until the process that started this one ends.

    Returns there, and in a fork where the interpreter is to end it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    asked, own = listener.fileno(), (listener.fileno(), alive, woken, wakes)
    ends: dict[int, int] = {}
    """Where the exit status of each fork is to be written."""
    while alive not in (ready := select.select([asked, alive, woken], [], [])[0]):
        if woken in ready:
            os.read(woken, 1024)
            for pid, status in _ended():
                with suppress(BrokenPipeError):  # who started it is gone
                    os.write(ends[pid], str(status).encode())
                os.close(ends.pop(pid))
        if asked in ready:
            if "torch" not in sys.modules:
                _preload()
            with listener.accept()[0] as client:
                message, (*streams, end), _, _ = socket.recv_fds(client, _LARGEST_REQUEST, 4)
                pid = os.fork()
                if pid == 0:
                    listener.detach()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for stream in (*own, client.detach(), end, *ends.values()):
                        os.close(stream)
                    _become(streams=streams, **json.loads(message))
                    return
                ends[pid] = end
                client.send(str(pid).encode())
            for stream in streams:
                os.close(stream)


def _ended() -> Iterator[tuple[int, int]]:
    """Forks that have ended since they were last asked for, and their status."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _preload() -> None:
    for module in _PRELOADED:
        import_module(module)
    gc.collect()
    # A fork that ends would look through all that was imported, and take it apart: a copy of every page it touches.
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(_leave_out, {name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names})


def _leave_out(preloaded: set[str]) -> None:
    """Runs last of all at exit: the interpreter takes apart what the fork imported itself, and not thousands of modules
    whose pages the fork would have to copy for that, a quarter of a second."""
    kept = [sys.modules.pop(name, None) for name in preloaded]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _become(
    *, words: list[str], folder: str, environment: dict[str, str], new_session: bool, streams: list[int]
) -> None:
    """Run a script, or `-m module`, as the interpreter does. Returns where that goes on to its end."""
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    # What was opened for the server may have been no pipe.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[1:1] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    main = ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.path[0] = folder
        sys.argv[:] = words[1:]
        run_module(words[1])
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        sys.argv[:] = words
        run_file(words[0])


def run_file(path: str) -> None:
    """Run a script in `__main__` with the interpreter's own function, so that its errors end it as they do there.

    Returns where the process is to end with an interrupt.
    """
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    run = ctypes.pythonapi.PyRun_SimpleFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    failed = run(libc.fopen(os.fsencode(path), b"rb"), os.fsencode(path), 1, None)
    if failed and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        return  # the interpreter has noted it, and ends as that signal ends a process
    end(int(bool(failed)))


def run_module(name: str) -> None:
    """Run a module as `__main__`. Returns where the process is to end with an interrupt, or a message."""
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        end(0)
    except SystemExit as left:
        if isinstance(left.code, str):
            raise
        end(left.code or 0)
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        end(1)


def end(status: int) -> NoReturn:
    """End the process with an exit status."""
    if TEARDOWN not in os.environ:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
