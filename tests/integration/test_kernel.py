"""The compiled recorder records what the one in Python records. If there can be none, the one in Python records."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from crossrank.errors import CrossrankError
from crossrank.instrument.compiled import build
from tests.integration import jobs, names
from tests.integration.forked_jobs import wait_until
from tests.integration.jobs import RECORDING, Scripts
from tests.integration.traces import Recorded

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


def kernel_of(comms: Recorded) -> str:
    return comms.header.versions["recorder"] or ""


@names.needs_reductions
def test_both_recorders_record_the_same(scripts: Scripts) -> None:
    found = {}
    for kernel in ("compiled", "python"):
        scripts(folder=kernel, TRACING_RECORDER=kernel).python(MANY_CALLS)
        comms = scripts(folder=kernel).recorded()
        assert kernel_of(comms) == kernel
        found[kernel] = [msgspec.structs.replace(one, t=0, thread=None) for one in comms.calls]
    assert found["compiled"] == found["python"]
    assert len(found["python"]) == 3 * 19 + 1
    assert len({one.source for one in found["python"]}) == 18


COMPILER = r"""#!/bin/sh
# Makes the kernel that was compiled before, and notes how nice it was, or fails where there is none.
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
case "$out" in *.o) exit 0;; esac
nice >> "$CALLS"
sleep 1
cp "$BUILT" "$out" || { echo "error: of the compiler" >&2; exit 1; }
"""


_PATIENCE = 180.0
"""Seconds for a build that gets what other tests leave of the processor."""


class Cache:
    """An empty folder of kernels, and a compiler that notes when it is called."""

    def __init__(self, folder: Path, built: str) -> None:
        self.folder, self._calls = folder, folder / "calls"
        compiler = folder / "c++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        self.variables = {"CXX": str(compiler), "CALLS": str(self._calls), "BUILT": built}
        self.variables["XDG_CACHE_HOME"] = str(folder / "cache")

    def job(self, name: str, **variables: str) -> str:
        """What a job of one rank says and which kernel recorded it."""
        scripts = Scripts(self.folder)(folder=name, **self.variables, **variables)
        result, comms = scripts.python(ONE_CALL), scripts.recorded()
        assert (result.stdout, comms.ops) == ("trained\n", ["all_reduce"])
        return f"{result.stderr}{kernel_of(comms)}"

    def files(self, pattern: str) -> list[Path]:
        return list(self.folder.glob(f"cache/crossrank/{pattern}"))

    def niceness(self) -> list[int]:
        """That of the compiler, of each call."""
        return [int(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, str(build.load().__file__))


@pytest.fixture
def broken_compiler(tmp_path: Path) -> Cache:
    return Cache(tmp_path, "/nowhere/kernel.so")


def test_a_job_records_in_python_until_the_compiled_recorder_is_built(cache: Cache) -> None:
    why = "the compiled recorder is not built yet, and is being built for the next job"
    said, _, kernel = cache.job("first").rpartition("\n")
    assert said.startswith(f"crossrank: calls are recorded in Python, which is slower: {why}")
    assert "\n" not in said
    assert kernel.startswith(f"python ({why}")
    wait_until(lambda: bool(cache.files("*.so")), "no kernel is built", _PATIENCE)
    assert cache.job("second") == "compiled"
    assert cache.niceness() == [19]


def test_concurrent_ranks_build_once_and_do_not_wait(cache: Cache) -> None:
    ranks = [Scripts(cache.folder)(folder=str(rank), **cache.variables) for rank in range(4)]
    processes = [jobs.start(rank.folder, jobs.ONE_RANK + ONE_CALL, **cache.variables) for rank in ranks]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert all(kernel_of(rank.recorded()).startswith("python (") for rank in ranks)
    wait_until(lambda: bool(cache.files("*.so")), "no kernel is built", _PATIENCE)
    assert len(cache.niceness()) == len(cache.files("*.so")) == 1


def test_a_job_waits_for_an_explicitly_requested_recorder(cache: Cache) -> None:
    assert cache.job("first", TRACING_RECORDER="compiled") == "compiled"
    assert cache.niceness() == [0]


def test_a_failed_build_is_not_repeated_and_each_job_reports_why(broken_compiler: Cache) -> None:
    broken_compiler.job("first")
    wait_until(lambda: bool(broken_compiler.files("*.failed")), "nothing says that the build failed", _PATIENCE)
    why = f"{broken_compiler.folder}/c++ failed with exit code 1: "
    for name, kernel in (("second", "auto"), ("third", "compiled")):
        said = broken_compiler.job(name, TRACING_RECORDER=kernel)
        assert said.startswith(f"crossrank: calls are recorded in Python, which is slower: {why}"), said
        assert said.count("`crossrank build-recorder` tries again") == 2  # the line and the header
    assert len(broken_compiler.niceness()) == 1


@pytest.mark.parametrize(
    "text", ["fatal error: Killed signal terminated program", "virtual memory exhausted: Cannot allocate memory"]
)
def test_an_interrupted_build_is_repeated(text: str, broken_compiler: Cache) -> None:
    compiler = Path(broken_compiler.variables["CXX"])
    compiler.write_text(COMPILER.replace("error: of the compiler", text))
    broken_compiler.job("first")
    wait_until(
        lambda: bool(broken_compiler.niceness()) and _is_free(broken_compiler), "the build does not end", _PATIENCE
    )
    broken_compiler.job("second")
    wait_until(lambda: len(broken_compiler.niceness()) == 2, "nothing is built again", _PATIENCE)
    wait_until(lambda: _is_free(broken_compiler), "the build does not end", _PATIENCE)
    assert broken_compiler.files("*.failed") == []


def _is_free(cache: Cache) -> bool:
    """Whether no process holds the lock of a build."""
    (path,) = cache.files("*.lock")
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_build_recorder_repeats_a_failed_build(broken_compiler: Cache) -> None:
    command = ["-m", "crossrank", "build-recorder"]
    result = jobs.fork(command, broken_compiler.folder, **broken_compiler.variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"crossrank: {broken_compiler.folder}/c++ failed with exit code 1: ")
    working = broken_compiler.variables | {"BUILT": str(build.load().__file__)}
    for _ in range(2):  # the second time it is there
        result = jobs.fork(command, broken_compiler.folder, **working)
        assert (result.returncode, result.stderr) == (0, "")
        assert [Path(result.stdout.strip())] == broken_compiler.files("*.so")
    result = jobs.fork([*command, "--json"], broken_compiler.folder, **working)
    assert [Path(json.loads(result.stdout)["recorder"])] == broken_compiler.files("*.so")
    assert broken_compiler.files("*.failed") == []
    assert len(broken_compiler.niceness()) == 2


ENDLESS_COMPILER = """#!/bin/sh
sh -c 'echo started; exec sleep 1000' > "$OUTPUT" &
wait
"""
"""Like g++, it has another process do the work. While that one runs, it has the pipe `OUTPUT` open."""


@pytest.fixture
def endless(tmp_path: Path) -> dict[str, str]:
    """The variables with which a build never ends."""
    compiler, output = tmp_path / "c++", tmp_path / "output"
    compiler.write_text(ENDLESS_COMPILER)
    compiler.chmod(0o755)
    os.mkfifo(output)
    return {"CXX": str(compiler), "OUTPUT": str(output), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_build_that_takes_too_long_is_ended_and_one_line_says_what_to_do(
    endless: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in endless.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "_PATIENCE", 2.0)
    with open(os.open(endless["OUTPUT"], os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as output:
        with pytest.raises(CrossrankError) as raised:
            build.make()
        assert output.read(100) in (b"started\n", b"")
        assert output.read(100) == b""  # None while a process has it open
    assert str(raised.value) == (
        f"{endless['CXX']} did not finish within 2 s and was ended; run `crossrank build-recorder` when the machine is "
        "less busy, or set CXX to another compiler"
    )
    assert list(Path(endless["XDG_CACHE_HOME"], "crossrank").glob("*.failed")) == []


SLOW_START = """
import subprocess, time
class Slow(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        time.sleep(2)
subprocess.Popen = Slow
"""
"""The compiler runs before Python knows it, as on a busy machine."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("before", ["", SLOW_START], ids=["while it runs", "while it starts"])
def test_build_recorder_ends_the_compiler_with_itself(
    number: signal.Signals, before: str, endless: dict[str, str], tmp_path: Path
) -> None:
    source = f"{before}import sys; from crossrank.tools.cli import main; sys.exit(main(['build-recorder']))"
    process = jobs.start(tmp_path, source, **endless)
    with open(endless["OUTPUT"]) as output:
        assert output.readline() == "started\n"
        process.send_signal(number)
        assert output.read() == ""  # the compiler's process has ended
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert [path.suffix for path in Path(endless["XDG_CACHE_HOME"], "crossrank").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"CXX": "/nowhere/c++"}, "there is no C++ compiler (/nowhere/c++)"),
        ({"XDG_CACHE_HOME": "/dev/null/cache"}, "/dev/null/cache/crossrank cannot be created (Not a directory)"),
    ],
    ids=["no compiler", "no folder"],
)
@pytest.mark.parametrize("recorder_kernel", ["auto", "compiled"])
def test_python_records_if_no_build_is_possible_and_one_line_says_why(
    variables: dict[str, str], why: str, recorder_kernel: str, scripts: Scripts, tmp_path: Path
) -> None:
    result = scripts(**{"XDG_CACHE_HOME": str(tmp_path / "cache")} | variables).python(ONE_CALL)
    assert result.stdout == "trained\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"crossrank: calls are recorded in Python, which is slower: {why}")
    assert scripts.recorded().ops == ["all_reduce"]
    assert kernel_of(scripts.recorded()).startswith(f"python ({why}")


def test_a_python_untested_with_the_recorder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_UNTRIED", sys.version_info[:2])
    with pytest.raises(CrossrankError, match="the compiled recorder is untested on Python 3"):
        build.load()


def test_calls_with_changing_splits_do_not_slow_unchanging_calls(scripts: Scripts) -> None:
    result = scripts(TRACING_RECORDER="compiled").python("""
        from crossrank.instrument.compiled.recorder import CompiledRecorder

        described, describe = [], CompiledRecorder.describe

        def count(recorder, op, *of_call):
            described.append(recorder.readers[op].op)
            return describe(recorder, op, *of_call)

        CompiledRecorder.describe = count
        crossrank.enable()
        tokens, loss = torch.ones(3000), torch.ones(1)
        for rows in range(3000):
            dist.all_to_all_single(tokens[:rows].clone(), tokens[:rows], [rows], [rows])
            dist.all_reduce(loss)
        crossrank.disable()
        print(described.count("all_reduce"), described.count("all_to_all"))
        """)
    assert result.stdout == "1 3000\n"
    assert [one.in_split for one in scripts.recorded().calls[::2]] == [[rows] for rows in range(3000)]


@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_a_recorder_another_user_could_write_is_refused(is_file: bool, scripts: Scripts, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "crossrank"
    cache.mkdir(mode=0o700, parents=True)
    if is_file:
        os.chmod(shutil.copy(str(build.load().__file__), cache), 0o666)
    else:
        cache.chmod(0o777)
    result = scripts(XDG_CACHE_HOME=str(tmp_path / "cache")).python(ONE_CALL)
    assert result.stdout == "trained\n"
    assert "is refused: it belongs to or may be changed by another user" in result.stderr
    assert kernel_of(scripts.recorded()).startswith("python (")


def test_a_process_with_several_recordings_loads_one_recorder_and_forks(scripts: Scripts) -> None:
    result = scripts.python("""
        for number in range(3):
            with crossrank.enable(directory=f"recording-{number}", recorder="compiled"):
                dist.all_reduce(torch.ones(8))
        child = os.fork()
        if child == 0:
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        print(sum("_crossrank_recorder" in os.readlink(name) for name in names if os.path.islink(name)))
        """)
    assert result.stdout == "3\n1\n"


def test_inspect_says_which_recorder_ran(scripts: Scripts) -> None:
    scripts.python(ONE_CALL)
    assert "recorder compiled" in scripts.crossrank("inspect", RECORDING).stdout


def test_a_cpp_exception_becomes_a_python_exception(scripts: Scripts) -> None:
    result = scripts(TRACING_RECORDER="compiled").python("""
        recording = crossrank.enable()
        try:
            recording._session.recorder.native.begin(1 << 60)
        except MemoryError:
            print("no memory")
        """)
    assert result.stdout == "no memory\n"
