"""Builds the compiled recorder once per version of torch and Python on a machine, into a folder of the user's.

The sources are compiled with the machine's own compiler against the headers that torch and Python ship. The reason: the
dispatcher's boxed kernels, and the process groups among their arguments, are not part of a stable ABI of torch.

A job never waits for that: it takes the kernel that is there (`load`). Where there is none, a process of low priority
builds one for the next job (`start`); `crossrank build-recorder` does so beforehand (`make`). Why a build failed is
written down, and it is not tried again with the same compiler unless somebody asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import ModuleType

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.locks import lock_file
from crossrank.instrument.unpatched import subprocess, threading, time

_HERE = Path(__file__).parent
PATIENCE_OF_COMMAND = 3600.0
"""Seconds that a build may take for `crossrank build-recorder`. It takes 12 s, and minutes on a busy machine."""
_PATIENCE = 180.0
"""Seconds that a build may take if a job waits for it. A build in the background may take as long as it needs."""
_CUT_OFF = ("signal terminated program", "memory exhausted", "Cannot allocate memory", "No space left on device")
"""What a compiler says of a part of itself that was ended, or that lacked memory or space."""
_MODULE = "_crossrank_recorder"
_OPTIONS = ("-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_UNMAPPED = 65534
"""Owner of what is root's outside of a container that knows few users."""
_ALL_USERS = ["0", "0", "4294967295"]
_UNTRIED = (3, 14)
"""The first version of Python whose frames the kernel is untested on."""


class NotBuiltError(CrossrankError):
    """There is no kernel yet, and no known reason why it cannot be built."""


class _CutOffError(CrossrankError):
    """A build that was ended, took too long or lacked memory or space: that says nothing about the next one."""


_loaded: ModuleType | None = None
"""The kernel of this process; a later build does not replace it."""


def load() -> ModuleType:
    """Return the compiled recorder. Raises `NotBuiltError` if there is none yet, and `CrossrankError` if there can be
    none, with the reason."""
    global _loaded
    try:
        built = _place()
        if _loaded is not None:  # a second copy would have threads, kernels and handlers of fork() of its own
            return _loaded
        if (descriptor := _opened(built)) is not None:
            try:
                _loaded = _import(built, descriptor)
                return _loaded
            except ImportError:  # cut off, or of a machine with other libraries
                if os.path.samestat(os.fstat(descriptor), built.lstat()):
                    built.unlink(missing_ok=True)
                os.close(descriptor)
        _refuse_known_failure(built)
    except (OSError, RuntimeError) as error:
        raise CrossrankError(f"the compiled recorder is not available ({one_line(error)})") from error
    raise NotBuiltError("the compiled recorder is not built yet")


def _opened(built: Path) -> int | None:
    """The descriptor of the kernel, which no other user may have written; None if there is none yet. The checked file
    is the one that is loaded, even if its name points to another file later."""
    try:
        descriptor = os.open(built, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CrossrankError(f"{built} is refused: it is a link; remove it, or set XDG_CACHE_HOME") from error
        raise
    try:
        _refuse_others_file(built, os.fstat(descriptor))
    except CrossrankError:
        os.close(descriptor)
        raise
    return descriptor


def make(*, again: bool = False, patience: float | None = None) -> Path:
    """Build the kernel unless it is there, and wait until it is; with `again` although that failed before.

    Raises `CrossrankError` where it cannot be built, and after `patience` seconds: without a number, those of a job.
    """
    patience = _PATIENCE if patience is None else patience
    built = _place()
    if again:
        _failure(built, _compiler()).unlink(missing_ok=True)
    deadline = time.monotonic() + patience
    while not built.exists():
        with _lock(built) as descriptor:
            if descriptor is not None and not built.exists():
                _refuse_known_failure(built)  # of another process that was just waited for
                _build(built, patience)
        if time.monotonic() > deadline:
            raise CrossrankError(
                f"another process has been building {built} for {patience:.0f} s; run `crossrank build-recorder` when "
                "the machine is less busy, or end that process first"
            )
        if descriptor is None:
            time.sleep(0.1)
    _refuse_others_file(built, built.lstat())
    return built


def start() -> None:
    """Have a process of low priority build the kernel for the next job, unless one does so already.

    No process waits for it, and it continues when this job ends. It inherits the lock that is taken here.
    """
    built = _place()
    with _lock(built) as descriptor:
        if descriptor is None or built.exists():
            return
        path = [entry or os.getcwd() for entry in sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from {__name__} import build_idly; build_idly({str(built)!r})"
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-c", program],  # no child of this process
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(descriptor,),
            env=os.environ | {"TRACING": "NONE", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            check=True,
        )


def build_idly(built: str) -> None:
    """What the process of `start` does. Where all cores are busy it takes 1.5 % of one."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(CrossrankError):  # it is written down
        _build(Path(built), None)


def _place() -> Path:
    """Where the kernel for this torch and Python is, or is to be. Raises `CrossrankError` where there can be none."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CrossrankError("the compiled recorder is untested on a Python without the global interpreter lock")
    if sys.version_info >= _UNTRIED:
        raise CrossrankError(f"the compiled recorder is untested on Python {platform.python_version()}")
    return _folder() / f"{_MODULE}-{_fingerprint()}.so"


def _refuse_known_failure(built: Path) -> None:
    failure = _failure(built, _compiler())
    if failure.exists():
        raise CrossrankError(f"{failure.read_text()}; `crossrank build-recorder` tries again")


def _import(built: Path, descriptor: int) -> ModuleType:
    """The module in a file that is open. It stays open: a library is known by the name that it was loaded by."""
    name = f"/proc/self/fd/{descriptor}"
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, name if os.path.exists(name) else str(built))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.__file__ = str(built)
    return module


def _folder() -> Path:
    """Where kernels are kept: `$XDG_CACHE_HOME/crossrank`, of this user alone."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossrank"
    except RuntimeError as error:
        raise CrossrankError("this user has no home directory to keep it in; set XDG_CACHE_HOME") from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CrossrankError(f"{folder} cannot be created ({error.strerror}); set XDG_CACHE_HOME") from error
    folder = folder.resolve()
    _refuse_others_file(folder, folder.stat())
    is_contained = False
    with contextlib.suppress(OSError):  # there is no /proc
        is_contained = Path("/proc/self/uid_map").read_text().split() != _ALL_USERS
    for parent in folder.parents:
        found = parent.stat()
        if not (is_contained and found.st_uid == _UNMAPPED) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _refuse_others_file(parent, found)
    return folder


def _refuse_others_file(path: Path, found: os.stat_result) -> None:
    """Raise if another user may have written the file or folder: it would run in this process. In a folder with the
    sticky bit, users cannot replace files of other users."""
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (
        stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    )
    if found.st_uid not in (os.getuid(), 0) or is_open:
        raise CrossrankError(
            f"{path} is refused: it belongs to or may be changed by another user (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}); remove it, or set XDG_CACHE_HOME"
        )


def _fingerprint() -> str:
    """What a built kernel fits: these sources and options, this torch, this Python, this kind of machine."""
    digest = hashlib.sha256()
    for source in sorted(path for path in _HERE.iterdir() if path.suffix in (".h", ".c", ".cpp")):
        digest.update(source.read_bytes())
    for text in (
        *_OPTIONS,
        *_nvtx_options(),
        torch.__version__,
        torch.version.git_version,
        torch.__file__,
        torch.compiled_with_cxx11_abi(),
        sys.version,
        sysconfig.get_config_var("SOABI"),
        platform.machine(),
        *platform.libc_ver(),
    ):
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    """The command of the C++ compiler, with the options that `CXX` has."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    raise CrossrankError(f"there is no C++ compiler ({' '.join(wanted) or 'c++, g++, clang++'})")


def _failure(built: Path, compiler: list[str]) -> Path:
    """The file that says why a build with this compiler failed."""
    facts = os.stat(compiler[0])
    digest = hashlib.sha256(f"{compiler} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()
    return built.with_suffix(f".{digest[:8]}.failed")


@contextmanager
def _lock(built: Path) -> Iterator[int | None]:
    """The descriptor of a lock that one process of those that share the folder holds while it builds; None while
    another has it."""
    path = built.with_suffix(".lock")
    with contextlib.ExitStack() as opened:
        try:
            descriptor = opened.enter_context(lock_file(path))
        except OSError as error:
            raise CrossrankError(f"{path} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
        yield descriptor


def _build(built: Path, patience: float | None) -> None:
    """Compile the kernel. Where that fails, write down why and raise `CrossrankError`; so after `patience` seconds."""
    compiler = _compiler()
    failure = _failure(built, compiler)
    try:
        _refuse_missing_headers()
        _compile(compiler, built, patience)
    except _CutOffError:
        raise
    except CrossrankError as error:
        with contextlib.suppress(OSError):
            failure.write_text(str(error))
        raise
    failure.unlink(missing_ok=True)


def _refuse_missing_headers() -> None:
    for header, what in (
        (Path(sysconfig.get_paths()["include"], "Python.h"), "Python's headers"),
        (Path(torch.__file__).parent / "include/ATen/ATen.h", "torch's headers"),
    ):
        if not header.exists():
            raise CrossrankError(f"{what} are not installed: there is no {header}")


def _compile(compiler: list[str], built: Path, patience: float | None) -> None:
    torch_root = Path(torch.__file__).parent
    options = [
        *_OPTIONS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_HERE}",
        # Warnings are about our sources alone.
        *(f"-isystem{folder}" for folder in (torch_root / "include", sysconfig.get_paths()["include"])),
        *_nvtx_options(),
    ]
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        frames, made = Path(scratch, "frames.o"), Path(scratch, built.name)
        _run([*compiler, *options, "-c", "-x", "c", str(_HERE / "frames.c"), "-o", str(frames)], patience)
        sources = (str(_HERE / "recorder.cpp"), str(frames))
        libraries = ("-shared", f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10")
        _run([*compiler, *options, "-std=c++20", *sources, *libraries, "-o", str(made)], patience)
        made.chmod(0o755)  # for any umask: a kernel that a group may write is refused
        try:
            os.link(made, built)  # never over one that another node runs
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, built)


def _run(command: list[str], patience: float | None) -> None:
    try:
        code, errors = _run_group(command, patience)
    except subprocess.TimeoutExpired as error:
        raise _CutOffError(
            f"{command[0]} did not finish within {patience:.0f} s and was ended; run `crossrank build-recorder` when "
            "the machine is less busy, or set CXX to another compiler"
        ) from error
    except OSError as error:
        raise CrossrankError(f"{command[0]} could not be run ({one_line(error)})") from error
    if code:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[-200:])
        kind = _CutOffError if code < 0 or any(text in errors for text in _CUT_OFF) else CrossrankError
        raise kind(f"{command[0]} failed with exit code {code}: {first}")


def _run_group(command: list[str], patience: float | None) -> tuple[int, str]:
    """Run a compiler; return its exit code and its messages. However this ends, no process of the compiler is left: its
    driver starts others, which do the work."""
    started: list[subprocess.Popen[str]] = []
    failures: list[Exception] = []
    is_started, is_over = threading.Event(), threading.Event()

    def end() -> None:
        with contextlib.suppress(IndexError):  # it has not started yet, or the other thread ends it
            compiler = started.pop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(compiler.pid, signal.SIGKILL)
            compiler.communicate()

    def start() -> None:
        try:
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            )
        except Exception as error:
            failures.append(error)
        is_started.set()
        if is_over.is_set():
            end()

    # A handler of a signal may raise on the main thread, and would lose a process that just starts there. It may also
    # raise in `join`, which then takes the thread for one that has ended.
    try:
        threading.Thread(target=start).start()
        is_started.wait()
        if failures:
            raise failures[0]
        compiler = started[0]
        _, errors = compiler.communicate(timeout=patience)
    except BaseException:  # Ctrl-C does not reach the other session
        is_over.set()
        end()
        raise
    return compiler.returncode, errors


def _nvtx_options() -> list[str]:
    """Options for NVTX's headers where they are installed; without them ranges are pushed from Python."""
    with contextlib.suppress(PackageNotFoundError):
        for file in files("nvidia-nvtx") or ():
            if file.parts[-2:] == ("nvtx3", "nvToolsExt.h"):
                return ["-DCROSSRANK_NVTX", f"-isystem{Path(str(file.locate())).parent.parent}"]
    return []
