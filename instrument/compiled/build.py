"""Builds the compiled kernel once per version of torch and Python on a machine, into a folder of the user's.

The sources are compiled with the machine's own compiler against the headers that torch and Python ship, because the
dispatcher's boxed kernels and the process groups among their arguments are no part of an ABI that torch keeps stable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import ModuleType

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.log import ONE_RANK, log

_HERE = Path(__file__).parent
_PATIENCE = 180.0
"""Seconds that a rank waits for another one's build, and for its own."""
_MODULE = "_crossrank_recorder"


def load() -> ModuleType:
    """The compiled kernel, built if it is not there. Raises `CrossrankError` where it cannot be had: why."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CrossrankError("it has not been tried on a Python without the global interpreter lock")
    try:
        built = _folder() / f"{_MODULE}-{_fingerprint()}.so"
        if not built.exists():
            _build(_compiler(), built)
        _refuse_others_file(built)
        try:
            return _import(built)
        except ImportError:  # cut off, or of a machine with other libraries
            built.unlink(missing_ok=True)
            _build(_compiler(), built)
            return _import(built)
    except (OSError, RuntimeError, ImportError) as error:
        raise CrossrankError(f"the compiled kernel cannot be had ({one_line(error)})") from error


def _import(built: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(built))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _folder() -> Path:
    """Where kernels are kept: `$XDG_CACHE_HOME/crossrank`, of this user alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossrank"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CrossrankError(f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME") from error
    _refuse_others_file(folder)
    return folder


def _refuse_others_file(path: Path) -> None:
    """Raise for what another user may have written: it would run in this process."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CrossrankError(
            f"{path} is refused: it belongs to or may be changed by another user (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}); remove it, or set XDG_CACHE_HOME"
        )


def _fingerprint() -> str:
    """What a built kernel fits: these sources, this torch, this Python, this kind of machine."""
    digest = hashlib.sha256()
    for source in sorted(path for path in _HERE.iterdir() if path.suffix in (".h", ".c", ".cpp")):
        digest.update(source.read_bytes())
    for text in (
        *_nvtx_options(),
        torch.__version__,
        torch.__file__,
        sysconfig.get_config_var("SOABI"),
        platform.machine(),
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


@contextmanager
def _alone(built: Path) -> Iterator[None]:
    """One rank of a machine builds, the others wait until it has."""
    path = built.with_suffix(".lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CrossrankError(f"{path} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
    try:
        deadline = time.monotonic() + _PATIENCE
        while not built.exists():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CrossrankError(f"another process has held {path} for {_PATIENCE:.0f} s") from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: each builds, and the first one's stays
                break
        yield
    finally:
        with contextlib.suppress(OSError):  # said, and not left to `close`: a forked process may share the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _build(compiler: Sequence[str], built: Path) -> None:
    include, torch_root = sysconfig.get_paths()["include"], Path(torch.__file__).parent
    for header, what in (
        (Path(include, "Python.h"), "Python's headers"),
        (torch_root / "include/ATen/ATen.h", "torch's headers"),
    ):
        if not header.exists():
            raise CrossrankError(f"{what} are not installed: there is no {header}")
    options = [
        *("-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in (torch_root / "include", include, _HERE)),
        *_nvtx_options(),
        *("-x", "c", str(_HERE / "frames.c"), "-x", "c++", "-std=c++20", str(_HERE / "recorder.cpp")),
        *(f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    with _alone(built), tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        if built.exists():
            return
        # At once on the first node, for its ranks wait for it.
        extra = ONE_RANK if os.environ.get("GROUP_RANK", "0") == "0" else None
        what = "crossrank: building its kernel for torch %s, once on this machine: %s"
        log.warning(what, torch.__version__, built, extra=extra)
        made = Path(scratch, built.name)
        try:
            done = subprocess.run(
                [*compiler, *options, "-o", str(made)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CrossrankError(f"{compiler[0]} could not be run ({one_line(error)})") from error
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise CrossrankError(f"{compiler[0]} failed with exit code {done.returncode}: {first}")
        made.chmod(0o755)  # whatever the umask: one that a group may write is refused
        try:
            os.link(made, built)  # never over one that another node runs
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, built)


def _nvtx_options() -> list[str]:
    """Options for NVTX's headers where they are installed; without them ranges are pushed from Python."""
    with contextlib.suppress(PackageNotFoundError):
        for file in files("nvidia-nvtx") or ():
            if file.parts[-2:] == ("nvtx3", "nvToolsExt.h"):
                return ["-DCROSSRANK_NVTX", f"-I{Path(str(file.locate())).parent.parent}"]
    return []
