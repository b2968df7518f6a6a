"""Runs a training script with tracing, without a changed line in it.

    torchrun --nproc-per-node 8 -m crossrank.instrument train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m crossrank.instrument -m package.train --lr 1e-4

The script sees its own `sys.argv`, `sys.path[0]` and `__main__`, and its exit code is the process's. Tracing is
enabled right after the script itself has imported torch, so whatever it does before that (setting
`OMP_NUM_THREADS`, say) works as ever. Processes that it starts through `multiprocessing` with `spawn` are traced
the same way; forked ones enable tracing themselves if they communicate.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import spawn
from types import CodeType, ModuleType

# Goes before the program of a spawned process, which may be unable to import crossrank and runs all the same.
_FOLLOW = """try:
    from crossrank.instrument import runner
    runner.follow()
except ImportError:
    pass
"""
_USAGE = "usage: python -m crossrank.instrument [-m MODULE | SCRIPT] [ARGUMENT ...]"


class _EnableAfterTorch(MetaPathFinder):
    """Enables tracing as soon as `import torch` is through."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._asking:
            return None
        from importlib.util import find_spec

        self._asking = True
        try:
            spec = find_spec("torch")
        finally:
            self._asking = False
        # Libraries also look for torch without importing it, so this finder stays until it is imported.
        if spec is not None and spec.loader is not None:
            spec.loader = _EnablingLoader(spec.loader, self)
        return spec


class _EnablingLoader(Loader):
    """Loads a module as its own loader does, then enables tracing."""

    def __init__(self, loader: Loader, finder: MetaPathFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._loader.exec_module(module)
        _enable()


def _enable() -> None:
    """Never fails: the script goes on without tracing then."""
    try:
        import crossrank

        crossrank.enable()
    except Exception as error:
        print(f"crossrank: tracing is off: {type(error).__name__}: {error}", file=sys.stderr)


def follow() -> None:
    """Have tracing enabled once torch is imported, here and in processes that are spawned from here."""
    if "torch" in sys.modules:
        _enable()
    else:
        sys.meta_path.insert(0, _EnableAfterTorch())
    if getattr(spawn.get_command_line, "_follows", False):
        return
    original = spawn.get_command_line

    def get_command_line(**kwargs: object) -> list[str]:
        command = list(original(**kwargs))
        if "-c" in command:
            program = command.index("-c") + 1
            command[program] = _FOLLOW + command[program]
        return command

    get_command_line._follows = True  # type: ignore[attr-defined]
    spawn.get_command_line = get_command_line


def _read_script(path: str) -> CodeType:
    with io.open_code(os.path.abspath(path)) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _run_script(path: str) -> None:
    """Run a file as `python path` does: in this process's `__main__`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    absolute = os.path.abspath(path)
    code = _read_script(absolute)
    fresh: dict[str, object] = {
        "__name__": "__main__",
        "__doc__": None,
        "__package__": None,
        "__loader__": SourceFileLoader("__main__", absolute),
        "__spec__": None,
        "__annotations__": {},
        "__builtins__": __builtins__,
        "__file__": absolute,
        "__cached__": None,
    }
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(fresh)
    exec(code, main)


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE if not words else f"{_USAGE}\n\n{__doc__}", file=sys.stderr if not words else sys.stdout)
        sys.exit(2 if not words else 0)
    if words[0] == "-m":
        if len(words) < 2:
            sys.exit(_USAGE)
        sys.argv = words[1:]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd()
        follow()
        fresh = sys.modules["__main__"].__dict__
        for name in [name for name in fresh if not name.startswith("__")]:
            del fresh[name]
        # What `python -m` itself calls: the module becomes this process's __main__.
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if not os.path.isfile(words[0]):
        print(f"crossrank: {words[0]}: no such script", file=sys.stderr)
        sys.exit(2)
    sys.argv = words
    follow()
    _run_script(words[0])
