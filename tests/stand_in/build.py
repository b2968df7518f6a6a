"""Builds the stand-in for the torch of this interpreter, and prints what to preload.

Headers come from NVIDIA's wheels, which torch's CUDA build depends on. Functions that torch's libraries ask for and the
sources do not have are generated: they return "not supported" and are counted in the log.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
CACHE = Path(__file__).parents[2] / ".stand-in"

NOT_SUPPORTED = {"cublas": 15, "cupti": 27, "cuda": 801, "nccl": 5, "nvml": 3, "cu": 801}
"""First letters of functions, the longest first -> what they return that are not here."""

_STANDS_FOR = re.compile(r"lib(cudart|cublas|cublasLt|cupti|nccl)\.so\.\d+")
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that are opened by name, and belong to the driver."""


class NoBuildError(Exception):
    """Why there is no stand-in, and what to do."""


def build() -> list[Path]:
    """The libraries to preload, built unless they are there. Raises `NoBuildError`."""
    torch = _torch_folder()
    includes = _includes(torch.parent)
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    sources = sorted(SOURCES.glob("*.cpp"))
    facts = [*compiler, *map(str, includes), version("torch"), Path(__file__).read_text()]
    content = "".join([*facts, *(path.read_text() for path in sorted(SOURCES.iterdir()))])
    folder = CACHE / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile([*compiler, *(f"-I{path}" for path in includes)], sources, folder, _libraries(torch))
        (folder / "done").touch()
    return sorted(folder.glob("lib*.so*"), key=lambda path: path.name != "libstand_in.so")


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoBuildError(f"{sys.executable} has no torch: pip install 'torch===2.13.0' (its CUDA build)")
    folder = Path(spec.origin).parent
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise NoBuildError(
            f"torch {version('torch')} in {folder} is a build without CUDA: pip install 'torch===2.13.0' (three equals "
            "signs) installs the one with it"
        )
    return folder


def _includes(packages: Path) -> list[Path]:
    """Folders with the headers of CUDA, NCCL and CUPTI, of the wheels that came with torch."""
    found = sorted((packages / "nvidia").glob("*/include"))
    # The wheels of the runtime lack `crt`, which triton's wheel has.
    found += sorted((packages / "triton").glob("backends/nvidia/include"))
    for header, wheel in (("cuda_runtime_api.h", "nvidia-cuda-runtime"), ("nccl.h", "nvidia-nccl"), ("crt", "triton")):
        if not any((folder / header).exists() for folder in found):
            raise NoBuildError(
                f"no wheel in {packages} has {header}: install {wheel} in the version that torch asks for"
            )
    return found


def _libraries(torch: Path) -> list[Path]:
    return sorted((torch / "lib").glob("lib*torch*.so")) + sorted((torch / "lib").glob("libc10*.so"))


def _compile(compiler: list[str], sources: list[Path], folder: Path, users: list[Path]) -> None:
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        _run([*compiler, "-fvisibility=default", "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    own = {name for one in objects for name in _names(one, "--defined-only")}
    asked = {name for user in users for name in _names(user, "--undefined-only", "-D")}
    missing = folder / "missing.cpp"
    missing.write_text(_missing(sorted(asked - own)))
    compile_one(missing, folder / "missing.o")
    core = folder / "libstand_in.so"
    _run(
        [*compiler[:1], "-shared", "-o", str(core), *map(str, [*objects, folder / "missing.o"]), "-ldl", "-lpthread"]
        + ["-Wl,-soname,libstand_in.so", "-Wl,-z,nodelete"]
    )
    needed = {name for user in users for name in _needed(user) if _STANDS_FOR.fullmatch(name)}
    for name in sorted({*needed, *_ALWAYS}):
        _run(
            [*compiler[:1], "-shared", "-o", str(folder / name), f"-Wl,-soname,{name}", "-Wl,--no-as-needed", str(core)]
            + [f"-Wl,-rpath,{folder}", "-nostartfiles"]
        )


def _missing(names: list[str]) -> str:
    lines = ["namespace stand_in { void log_missing(const char* function); }", 'extern "C" {']
    for name in names:
        prefix = next((one for one in NOT_SUPPORTED if name.lstrip("_").startswith(one)), None)
        if prefix is not None and re.match(rf"_*{prefix}[A-Z]", name):
            code = NOT_SUPPORTED[prefix]
            lines.append(f'int {name}() {{ stand_in::log_missing("{name}"); return {code}; }}')
    return "\n".join([*lines, "}", ""])


def _names(library: Path, *options: str) -> set[str]:
    rows = _run(["nm", *options, str(library)]).splitlines()
    return {row.split()[-1].partition("@")[0] for row in rows if row.split()}


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _run(["readelf", "-d", str(library)]))


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoBuildError(
            f"there is no {words[0]}: install a C++17 compiler and binutils, or name one in CXX"
        ) from None
    if done.returncode:
        raise NoBuildError(f"{' '.join(words[:1])} failed:\n{done.stderr.strip()}")
    return done.stdout


def main() -> int:
    try:
        print(":".join(map(str, build())))
    except (NoBuildError, PackageNotFoundError) as error:
        print(f"stand-in: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
