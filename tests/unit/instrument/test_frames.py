"""The compiled recorder reads Python's frames as `sys._getframe` shows them, in every installed version of Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crossrank.instrument.compiled import build

SOURCE = Path(build.__file__).parent / "frames.c"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

WALK = """
import asyncio, ctypes, sys, threading

library = ctypes.PyDLL(sys.argv[1])
for name in ("first_frame", "next_frame", "code", "local"):
    getattr(library, "crossrank_" + name).restype = ctypes.c_void_p
for name in ("next_frame", "code", "offset"):
    getattr(library, "crossrank_" + name).argtypes = [ctypes.c_void_p]
library.crossrank_local.argtypes = [ctypes.c_void_p, ctypes.c_int]
checks = 0

def walk():
    frame, found = library.crossrank_first_frame(), []
    while frame:
        found.append((library.crossrank_code(frame), library.crossrank_offset(frame)))
        frame = library.crossrank_next_frame(frame)
    return found

def check():
    global checks
    checks += 1
    frame, codes = sys._getframe(), []
    while frame:
        codes.append(id(frame.f_code))
        frame = frame.f_back
    (_, *found) = walk()
    assert [code for code, _ in found] == codes
    return found[1]  # of the caller

def two_calls():
    return [check() for _ in range(2)], check(), check()

def generator():
    yield check()

async def coroutine():
    check()
    await asyncio.sleep(0)
    check()

class Dies:
    def __del__(self):
        check()

(first, again), here, there = two_calls()
assert first == again and here[0] == there[0] and here[1] != there[1]
next(generator())
sorted([2, 1], key=lambda number: (check(), number)[1])
exec("check()")
Dies()
asyncio.run(coroutine())
thread = threading.Thread(target=check)
thread.start()
thread.join()

def with_a_local():
    requests = [1, 2, 3]
    index = with_a_local.__code__.co_varnames.index("requests")
    assert library.crossrank_local(library.crossrank_first_frame(), index) == id(requests)

with_a_local()
print(checks)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_match_those_of_python(version: str, tmp_path: Path) -> None:
    is_ours = sys.version_info[:2] == tuple(map(int, version.split(".")))
    python = sys.executable if is_ours else shutil.which(f"python{version}")
    include = python and _output(python, "import sysconfig; print(sysconfig.get_paths()['include'])")
    if not python or not include or not Path(include, "Python.h").exists():
        pytest.skip(f"there is no Python {version} with its headers")
    library = tmp_path / "frames.so"
    subprocess.run(
        ["cc", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{include}", str(SOURCE), "-o", str(library)],
        check=True,
    )
    assert _output(python, WALK, str(library)) == "12"


def _output(python: str, program: str, *arguments: str) -> str:
    done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not arguments, done.stderr
    return done.stdout.strip()
