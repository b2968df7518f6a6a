"""Runs a training script with tracing, without a changed line in it.

    torchrun --nproc-per-node 8 -m crossrank.instrument train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m crossrank.instrument -m package.train --lr 1e-4

The script sees its own `sys.argv`, `sys.path[0]` and `__main__`, and its exit code is the process's. Tracing is
enabled right after the script itself has imported torch, so whatever it does before that (setting
`OMP_NUM_THREADS`, say) works as ever.

Processes that it starts through `multiprocessing` with `spawn`, and Python programs that it starts through
`subprocess` with the same interpreter (as launchers start their ranks), are traced the same way. Only processes that
communicate write files. Forked ones enable tracing themselves; what a shell starts is not followed.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

# Goes before the program of a spawned process, which may be unable to import crossrank and runs all the same.
_FOLLOW = """try:
    from crossrank.instrument import runner
    runner.follow()
except ImportError:
    pass
"""
_USAGE = "usage: python -m crossrank.instrument [-m MODULE | SCRIPT] [ARGUMENT ...]"


class _AfterImport:
    """A finder that runs an action as soon as a module has been imported."""

    def __init__(self, actions: Mapping[str, Callable[[], None]]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._actions:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in (finder.find_spec(name, path, target) for finder in others) if spec), None)
        # Libraries also look for torch without importing it, so the action stays until it is imported.
        if spec is not None and spec.loader is not None:
            loader: Any = _ActingLoader(spec.loader, lambda: self._act(name))
            spec.loader = loader
        return spec

    def _act(self, name: str) -> None:
        action = self._actions.pop(name, None)
        if not self._actions and self in sys.meta_path:
            sys.meta_path.remove(self)
        if action is not None:
            action()


class _ActingLoader:
    """Loads a module as its own loader does, then acts."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()


def _enable() -> None:
    """Never fails: the script goes on without tracing then."""
    try:
        import crossrank

        crossrank.enable()
    except Exception as error:
        print(f"crossrank: tracing is off: {type(error).__name__}: {error}", file=sys.stderr)


def _follow_spawned() -> None:
    from multiprocessing import spawn

    original = spawn.get_command_line

    def get_command_line(**kwargs: object) -> list[str]:
        command = list(original(**kwargs))
        if "-c" in command:
            program = command.index("-c") + 1
            command[program] = _FOLLOW + command[program]
        return command

    spawn.get_command_line = get_command_line


def _follow_subprocesses() -> None:
    import functools
    import subprocess

    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, args: Any, *positional: Any, **named: Any) -> None:
        followed = None
        # With a shell, or a program to execute that is not the first word, `args` is no command line of Python.
        if not positional[1:] and not named.get("executable") and not named.get("shell"):
            followed = _follow_command(args, named.get("env"), named.get("cwd"))
        original(self, args if followed is None else followed, *positional, **named)
        self.args = args

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def _follow_command(command: object, environment: Mapping[str, str] | None, folder: str | None) -> Any:
    """Never fails: what is not understood is started as it is."""
    try:
        from crossrank.instrument.hooks.spawn import follow_command

        return follow_command(command, environment, folder)
    except Exception:
        return None


_ACTIONS = {"torch": _enable, "subprocess": _follow_subprocesses, "multiprocessing.spawn": _follow_spawned}
_following = False


def follow() -> None:
    """Have tracing enabled once torch is imported, here and in Python processes that are started from here."""
    global _following
    if _following:
        return
    _following = True
    # A module that is there already, and one that nobody imports, both cost nothing.
    sys.meta_path.insert(0, _AfterImport({name: act for name, act in _ACTIONS.items() if name not in sys.modules}))
    for name, act in _ACTIONS.items():
        if name in sys.modules:
            act()


def _read_script(path: str) -> CodeType:
    with io.open_code(os.path.abspath(path)) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _set_first_path(folder: str) -> None:
    """Where Python has put the program's folder on the path, this takes its place."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def _run(code: CodeType, **names: object) -> None:
    """Run a program as the `__main__` of this process."""
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(
        {
            "__name__": "__main__",
            "__doc__": None,
            "__package__": None,
            "__spec__": None,
            "__annotations__": {},
            "__builtins__": builtins,
            **names,
        }
    )
    exec(code, main)


def _run_script(path: str) -> None:
    """As `python path` does."""
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    loader = SourceFileLoader("__main__", absolute)
    _run(_read_script(absolute), __loader__=loader, __file__=absolute, __cached__=None)


def _run_module(name: str) -> None:
    """As `python -m name` does."""
    _set_first_path(os.getcwd())
    fresh = sys.modules["__main__"].__dict__
    for old in [old for old in fresh if not old.startswith("__")]:
        del fresh[old]
    # What `python -m` itself calls: the module becomes this process's __main__.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_text(program: str) -> None:
    """As `python -c program` does."""
    from importlib.machinery import BuiltinImporter

    _set_first_path("")
    _run(compile(program, "<string>", "exec", dont_inherit=True), __loader__=BuiltinImporter)


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE if not words else f"{_USAGE}\n\n{__doc__}", file=sys.stderr if not words else sys.stdout)
        sys.exit(2 if not words else 0)
    if words[0] in ("-m", "-c"):
        if len(words) < 2:
            sys.exit(_USAGE)
        sys.argv = ["-c", *words[2:]] if words[0] == "-c" else words[1:]
        follow()
        run = _run_text if words[0] == "-c" else _run_module
        run(words[1])
        return
    if not os.path.isfile(words[0]):
        print(f"crossrank: {words[0]}: no such script", file=sys.stderr)
        sys.exit(2)
    sys.argv = words
    follow()
    _run_script(words[0])
