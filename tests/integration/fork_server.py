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
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]

_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.utils.data",
)
"""What takes seconds to import and what torch imports late. Not crossrank, and not nvtx, which tests replace."""

TEARDOWN = "TESTS_TEAR_DOWN"
"""Variable with which a fork ends as the interpreter does to the last, which takes 0.2 s: all modules and C++ objects
are destroyed. Without it a fork whose script has run waits for its threads, runs what is registered with atexit, and
ends."""

_LARGEST_REQUEST = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_server: socket.socket | None = None


class ForkedProcess(subprocess.Popen[str]):
    """A process as `subprocess.Popen([sys.executable, script, …])` starts it, or with `-m module`, but a fork.

    It is a child of this process: the server forks twice, and this process takes over orphans.
    """

    def _execute_child(
        self,
        args: list[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: Path | None,
        env: dict[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *rest: Any,
    ) -> None:
        start_new_session = rest[5]
        interpreter, *words = map(str, args)
        assert interpreter == sys.executable, f"{interpreter} cannot be forked"
        request = {
            "words": words,
            "folder": str(cwd or os.getcwd()),
            "environment": env if env is not None else dict(os.environ),
            "new_session": bool(start_new_session),
        }
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        server = _connected()
        socket.send_fds(server, [json.dumps(request).encode()], streams)
        self.pid = int(server.recv(64))
        self._child_created = True
        for stream in {p2cread, c2pwrite, errwrite} - {-1}:
            os.close(stream)


def _connected() -> socket.socket:
    """The connection to this process's server, which is started when it is first needed."""
    global _server
    if _server is None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its frames are below those of every script; a file of a library is not taken for the user's code.
        program = Path(tempfile.mkdtemp(prefix="crossrank-tests-"), "lib", "python3", "fork_server.py")
        atexit.register(shutil.rmtree, program.parents[2])
        program.parent.mkdir(parents=True)
        shutil.copy(__file__, program)
        with theirs:
            subprocess.Popen(
                [sys.executable, program, str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
    return _server


def serve(connection: socket.socket) -> None:
    """Fork for every request until the other side closes. Returns there, and in the forks when their script has run."""
    for module in _PRELOADED:
        import_module(module)
    gc.collect()
    # A fork that ends would look through all that was imported, and take it apart: a copy of every page it touches.
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(_leave_out, {name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names})
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 3)
        if not message:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                connection.send(str(pid).encode())
                os._exit(0)
            connection.close()
            while os.getppid() == between:
                time.sleep(0.0005)
            _become(streams=streams, **json.loads(message))
            return
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


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
    serve(socket.socket(fileno=int(sys.argv[1])))
