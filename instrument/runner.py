"""Runs a training script with tracing, without a change to the script.

    torchrun --nproc-per-node 8 -m crossrank.instrument train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m crossrank.instrument -m package.train --lr 1e-4

The script has its own `sys.argv`, `sys.path[0]` and `__main__`, and its exit code is the exit code of the process.
Tracing starts right after the script has imported torch. The code before that import, which may set `OMP_NUM_THREADS`,
works as usual.

Processes that the script starts through `multiprocessing` with `spawn` are traced too. So are Python programs that it
starts through `subprocess` with the same interpreter, as launchers start their ranks. Only processes that communicate
write files. Forked processes must enable tracing themselves. Programs that a shell starts are not traced.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import CodeType

from crossrank.instrument.hooks import imports, spawn

_USAGE = "usage: python -m crossrank.instrument [-m MODULE | SCRIPT] [ARGUMENT ...]"


def _enable() -> None:
    """Enable tracing. Never raises: on an error the script runs without tracing."""
    try:
        import crossrank

        crossrank.enable()
    except Exception as error:
        print(f"crossrank: tracing is off: {type(error).__name__}: {error}", file=sys.stderr)


def follow() -> None:
    """Enable tracing once torch is imported, in this process and in the Python processes that it starts."""
    if spawn.follow():
        imports.install({"torch": _enable})


def _read_script(path: str) -> CodeType:
    with io.open_code(os.path.abspath(path)) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _set_first_path(folder: str) -> None:
    """Replace the folder of the program that Python has put on the path, if it has."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def _run(code: CodeType, **names: object) -> None:
    """Run a program as the `__main__` of this process."""
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(
        {
            "__name__": "__main__",
            **dict.fromkeys(("__doc__", "__package__", "__spec__")),
            "__annotations__": {},
            "__builtins__": builtins,
            **names,
        }
    )
    exec(code, main)


def _run_script(path: str, /) -> None:
    """Do as `python path` does."""
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    loader = SourceFileLoader("__main__", absolute)
    _run(_read_script(absolute), __loader__=loader, __file__=absolute, __cached__=None)


def _run_module(name: str, /) -> None:
    """Do as `python -m name` does."""
    _set_first_path(os.getcwd())
    fresh = sys.modules["__main__"].__dict__
    for old in [old for old in fresh if not old.startswith("__")]:
        del fresh[old]
    # `python -m` calls this too: the module becomes the __main__ of this process.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_text(program: str, /) -> None:
    """Do as `python -c program` does."""
    _set_first_path("")
    _run(compile(program, "<string>", "exec", dont_inherit=True), __loader__=BuiltinImporter)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{__doc__}")
        return
    if words in ([], ["-m"], ["-c"]):
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    run, program, sys.argv = _run_script, words[0], words
    if words[0] == "-m":
        run, program, sys.argv = _run_module, words[1], words[1:]
    elif words[0] == "-c":
        run, program, sys.argv = _run_text, words[1], ["-c", *words[2:]]
    elif not os.path.isfile(program):
        print(f"crossrank: {program}: no such script", file=sys.stderr)
        sys.exit(2)
    follow()
    run(program)
