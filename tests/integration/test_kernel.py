"""The compiled kernel: what it records is what the one in Python records, and where it cannot be had that one does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from crossrank.comm import CommRecord
from crossrank.instrument.compiled import build
from crossrank.recording import CommsFile
from tests.integration import jobs, names

RECORDING = "crossrank-recording"
ONE_CALL = """
crossrank.enable()
dist.all_reduce(torch.ones(4))
print("trained")
"""
MANY_CALLS = """
import gc
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable

crossrank.enable()
group = dist.new_group([0])
wide = torch.ones(4, 2)
for step in range(3):
    dist.all_reduce(wide, op=dist.ReduceOp.MAX)
    dist.all_reduce(wide.bfloat16(), group=group, async_op=True).wait()
    dist.broadcast(wide, 0)
    dist.all_gather([torch.empty(4, 2)], wide)
    dist.ALL_GATHER(torch.empty(4, 2), wide)
    dist.REDUCE_SCATTER(torch.empty(4, 2), wide, op=dist.ReduceOp.PRODUCT)
    dist.all_to_all_single(torch.empty(4, 2), wide, [4], [4])
    dist.gather(wide, [torch.empty(4, 2)])
    dist.scatter(torch.empty(4, 2), [wide])
    dist.barrier(group)
    dist.broadcast_object_list([{"a": step}])
    functional.wait_tensor(functional.all_reduce(wide, "sum", group))
    differentiable.all_reduce(wide)
    group.allreduce([torch.ones(step + 1)]).wait()
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(1, 1)])
    exec(compile(f"dist.all_reduce(torch.ones({step} + 5))", "<generated>", "exec"))
    gc.collect()
    threads = [threading.Thread(target=dist.all_reduce, args=(torch.ones(2),)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    crossrank.step()
dist.destroy_process_group(group)
del group
gc.collect()
dist.all_reduce(wide, group=dist.new_group([0]))
""".replace("ALL_GATHER", names.ALL_GATHER).replace("REDUCE_SCATTER", names.REDUCE_SCATTER)


def recorded(folder: Path) -> list[CommRecord]:
    return list(CommsFile(str(folder / RECORDING / "rank-0.comms.jsonl.zst")).records())


def kernel_of(folder: Path) -> str | None:
    file = CommsFile(str(folder / RECORDING / "rank-0.comms.jsonl.zst"))
    next(file.records())
    assert file.header is not None
    return file.header.versions["kernel"]


@names.needs_reductions
def test_both_kernels_record_the_same(tmp_path: Path) -> None:
    found = {}
    for kernel in ("compiled", "python"):
        folder = tmp_path / kernel
        folder.mkdir()
        result = jobs.python(folder, MANY_CALLS, TRACING_KERNEL=kernel)
        assert result.returncode == 0, result.stderr
        assert kernel_of(folder) == kernel
        found[kernel] = [msgspec.structs.replace(one, t=0, thread=None) for one in recorded(folder)]
    assert found["compiled"] == found["python"]
    assert len(found["python"]) == 3 * 19 + 1
    assert len({one.source for one in found["python"]}) == 18


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"CXX": "/nowhere/c++"}, "there is no C++ compiler (/nowhere/c++)"),
        ({"CXX": "/bin/false"}, "/bin/false failed with exit code 1"),
        ({"XDG_CACHE_HOME": "/dev/null/cache"}, "/dev/null/cache/crossrank cannot be made (Not a directory)"),
    ],
    ids=["no compiler", "a build that fails", "no folder"],
)
@pytest.mark.parametrize("recorder_kernel", ["auto", "compiled"])
def test_where_it_cannot_be_built_one_line_says_why_and_python_records(
    variables: dict[str, str], why: str, recorder_kernel: str, tmp_path: Path
) -> None:
    result = jobs.python(tmp_path, ONE_CALL, **({"XDG_CACHE_HOME": str(tmp_path / "cache")} | variables))
    assert (result.returncode, result.stdout) == (0, "trained\n")
    lines = [line for line in result.stderr.splitlines() if "building its kernel" not in line]
    (line,) = lines
    assert line.startswith(f"crossrank: calls are recorded in Python, at more cost: {why}")
    assert [one.op for one in recorded(tmp_path)] == ["all_reduce"]
    kernel = kernel_of(tmp_path) or ""
    assert kernel.startswith(f"python ({why}")


@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_what_another_user_may_have_written_is_refused(is_file: bool, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "crossrank"
    cache.mkdir(mode=0o700, parents=True)
    if is_file:
        os.chmod(shutil.copy(str(build.load().__file__), cache), 0o666)
    else:
        cache.chmod(0o777)
    result = jobs.python(tmp_path, ONE_CALL, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (result.returncode, result.stdout) == (0, "trained\n")
    assert "is refused: it belongs to or may be changed by another user" in result.stderr
    assert (kernel_of(tmp_path) or "").startswith("python (")


COMPILER = r"""#!/bin/sh
# Notes that it was called, takes a second, and makes the kernel that was compiled before.
echo "$$" >> "$CALLS"
sleep 1
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
cp "$BUILT" "$out"
"""


def test_ranks_that_start_together_build_once(tmp_path: Path) -> None:
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {"CXX": str(compiler), "CALLS": str(calls), "BUILT": str(build.load().__file__)}
    processes = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        source = jobs.ONE_RANK + ONE_CALL
        processes.append(jobs.start(tmp_path / str(rank), source, XDG_CACHE_HOME=str(tmp_path / "cache"), **variables))
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert sum("building its kernel" in text for text in said) == 1
    assert len(calls.read_text().splitlines()) == 1
    assert [kernel_of(tmp_path / str(rank)) for rank in range(4)] == ["compiled"] * 4
    assert len(list((tmp_path / "cache" / "crossrank").glob("*.so"))) == 1


def test_inspect_says_which_kernel_recorded(tmp_path: Path) -> None:
    assert jobs.python(tmp_path, ONE_CALL).returncode == 0
    result = jobs.fork(["-m", "crossrank", "inspect", RECORDING], tmp_path)
    assert "kernel compiled" in result.stdout
