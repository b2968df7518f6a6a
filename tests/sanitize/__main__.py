"""The compiled recorder under AddressSanitizer, UBSan and ThreadSanitizer: `python -m tests.sanitize`.

Two gloo ranks run `stress.py` with a kernel that is built for each. Exit code 1 if a sanitizer reports anything, or a
rank does not come to its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OPTIONS = "-g -fno-omit-frame-pointer"
SANITIZERS = {
    "address,undefined": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}),
    # torch and Python are not built for it: what they do among themselves it cannot judge.
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0"}),
}


def main() -> int:
    failed = [name for name, (library, options) in SANITIZERS.items() if not _passes(name, library, options)]
    return int(bool(failed))


def _passes(sanitizer: str, library: str, options: dict[str, str]) -> bool:
    compiler = os.environ.get("CXX", "c++")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder, "report")
        environment = os.environ | {
            "CXX": f"{compiler} {_OPTIONS} -fsanitize={sanitizer}",
            "XDG_CACHE_HOME": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TRACING": "ALL",
            "FOLDER": folder,
        }
        subprocess.run([sys.executable, "-m", "crossrank", "build-recorder"], env=environment, cwd=ROOT, check=True)
        # With it, before what throws: a sanitizer looks for the C++ library when it starts.
        environment["LD_PRELOAD"] = " ".join(_library_of(compiler, name) for name in (library, "libstdc++.so.6"))
        environment |= {key: f"{value}:log_path={reports}" for key, value in options.items()}
        command = [sys.executable, "-m", "tests.sanitize.stress"]
        ranks = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=1200)[0] for rank in ranks]
        codes = [rank.returncode for rank in ranks]
        found = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("report.*"))]
    for report in found[:3]:
        print(report)
    ended = codes == [0, 0] and all("all calls were made" in text for text in said)
    print(
        f"{sanitizer}: {len(found)} reports; exit codes {codes}; {'to its end' if ended else 'NOT to its end'} "
        f"in {time.monotonic() - begun:.0f} s"
    )
    return ended and not found


def _library_of(compiler: str, name: str) -> str:
    command = [*compiler.split(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
