"""Traces the Python processes that a script starts by multiprocessing's spawn or `subprocess`, under the runner.

A few lines before the child's program pass it to the runner. If the child cannot import crossrank, they replace the
process by the original one. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import crossrank
from crossrank.instrument.hooks import imports
from crossrank.instrument.hooks.patches import Patches

# Runs before the program of a spawned process. If the process cannot import crossrank, its program still runs.
_FOLLOW = """try:
    from crossrank.instrument import runner
    runner.follow()
except ImportError:
    pass
"""
# The child must import this crossrank, and the runner must then find the child's own `sys.path`.
_BOOTSTRAP = """import os, sys
sys.path.append({home!r})
try:
    from crossrank.instrument import runner
except ImportError:
    words = len(sys.orig_argv) - len(sys.argv) - 1
    os.execv(sys.executable, [*sys.orig_argv[:words], *sys.orig_argv[words + 2:]])
finally:
    sys.path.pop()
runner.main()
"""
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(crossrank.__file__)))

_OPTION = re.compile(r"-(?P<flags>[bBdEIOPqRsSuv]*)((?P<option>[cmWX])(?P<value>.*))?", re.DOTALL)
_COMPILE_WORKER = os.path.join("torch", "_inductor", "compile_worker", "")
"""Worker processes of torch.compile: they import torch and are never ranks."""

_patches = Patches()
_wanted = False
_installed = False


def follow() -> bool:
    """Trace child processes until `uninstall`, and again after the next `install`.

    Return False if this was called before.
    """
    global _wanted
    if _wanted:
        return False
    _wanted = True
    install()
    return True


def install(_: object = None) -> None:
    """Trace child processes, if the runner has called `follow`."""
    global _installed
    if _wanted and not _installed:
        _installed = True
        imports.install({"subprocess": _patch_subprocess, "multiprocessing.spawn": _patch_spawn})


def uninstall() -> None:
    global _installed
    _installed = False
    imports.uninstall()
    _patches.undo()


def _patch_spawn() -> None:
    from multiprocessing import spawn

    original = spawn.get_command_line

    def get_command_line(**kwargs: object) -> list[str]:
        command = list(original(**kwargs))
        if "-c" in command:
            program = command.index("-c") + 1
            command[program] = _FOLLOW + command[program]
        return command

    _patches.replace(spawn, "get_command_line", get_command_line)


def _patch_subprocess() -> None:
    import subprocess

    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, args: Any, *positional: Any, **named: Any) -> None:
        followed = None
        # With a shell, or a program to execute that is not the first word, `args` is no command line of Python.
        if not positional[1:] and not named.get("executable") and not named.get("shell"):
            with contextlib.suppress(Exception):  # start other commands unchanged
                followed = follow_command(args, named.get("env"), named.get("cwd"))
        original(self, args if followed is None else followed, *positional, **named)
        self.args = args

    _patches.replace(subprocess.Popen, "__init__", start)


def follow_command(
    command: object, environment: Mapping[str, str] | None = None, folder: str | os.PathLike[str] | None = None
) -> Sequence[Any] | None:
    """Return the command that traces the Python program of `command`; None if it has no such program.

    `environment` and `folder` are those of the child, None for those of this process.
    """
    if not isinstance(command, list | tuple) or not command:
        return None
    words = [os.fsdecode(word) for word in command]
    if not _is_this_interpreter(words[0], environment):
        return None
    program = _find_program(words)
    if program is None:
        return None
    options, rest = program
    if rest[0] not in ("-c", "-m") and not _is_plain_script(os.path.join(folder or "", rest[0])):
        return None
    return [*options, "-c", _BOOTSTRAP.format(home=_HOME), *rest]


def _is_this_interpreter(word: str, environment: Mapping[str, str] | None) -> bool:
    """Return whether `word` is the Python of this environment, by any of its names."""
    import shutil

    path = shutil.which(word, path=(os.environ if environment is None else environment).get("PATH", os.defpath))
    if path is None or not sys.executable:
        return False
    same_folder = os.path.dirname(os.path.abspath(path)) == os.path.dirname(os.path.abspath(sys.executable))
    return same_folder and os.path.samefile(path, sys.executable)


def _find_program(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split a command after Python's own options, before `-c`, `-m` or the script. None if it has none of these.

    >>> _find_program(["python", "-u", "-X", "dev", "train.py", "--lr", "1"])
    (['python', '-u', '-X', 'dev'], ['train.py', '--lr', '1'])
    >>> _find_program(["python", "-Bm", "package.train", "-c"])
    (['python', '-B'], ['-m', 'package.train', '-c'])
    """
    index = 1
    while index < len(words) and words[index].startswith("-"):
        match = _OPTION.fullmatch(words[index])
        if match is None or match[0] == "-":
            return None
        if match["option"] in ("c", "m"):
            before = [*words[:index], *([f"-{match['flags']}"] if match["flags"] else [])]
            after = [*([match["value"]] if match["value"] else []), *words[index + 1 :]]
            return (before, [f"-{match['option']}", *after]) if after else None
        index += 2 if match["option"] and not match["value"] else 1
    return (list(words[:index]), list(words[index:])) if index < len(words) else None


def _is_plain_script(path: str) -> bool:
    """Return whether Python runs this as source: no folder, zip, byte code or worker of torch.compile."""
    return (
        os.path.isfile(path)
        and not path.endswith(".pyc")
        and pkgutil.get_importer(path) is None
        and _COMPILE_WORKER not in path
    )
