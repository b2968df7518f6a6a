"""`python -m crossrank.instrument` changes nothing that a script can see, and records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.integration.traces import records_of

RUNNER = ("-m", "crossrank.instrument")

SCRIPT = """
import os, pickle, sys

class Kept:
    pass

print(sys.argv)
print(__name__, __file__, __package__, __spec__ if __spec__ is None else __spec__.name, __doc__)
print(sys.path[0])
print(pickle.loads(pickle.dumps(Kept())).__class__ is sys.modules["__main__"].Kept)
print(sorted(name for name in globals() if not name.startswith("__")))
code = sys.argv[1]
if code == "raise":
    raise RuntimeError("the script's own")
sys.exit(int(code) if code.isdigit() else code)
"""


def with_and_without(folder: Path, *words: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """How a program ends with the runner and without it: with the same code, having printed the same."""
    traced, plain = (jobs.run([sys.executable, *runner, *words], folder, **variables) for runner in (RUNNER, ()))
    assert (traced.returncode, _without_frames(traced.stdout)) == (plain.returncode, _without_frames(plain.stdout))
    return [traced, plain]


def _without_frames(text: str) -> str:
    """Tracebacks show the runner's frames above those of the program."""
    return re.sub(r"(?m)^  .*\n", "", text)


def record(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the runner."""
    result = jobs.run([sys.executable, *RUNNER, *words], folder, **variables)
    assert result.returncode == 0, result.stderr
    return result


def assert_both_ranks_are_recorded(folder: Path) -> None:
    for rank in (0, 1):
        assert [record.op for record in records_of(folder / jobs.RECORDING, rank)] == ["all_reduce"]


@pytest.mark.parametrize("argument", ["0", "3", "a message", "raise"])
def test_recording_does_not_change_a_script(argument: str, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    jobs.write_script(folder, SCRIPT)
    traced, plain = with_and_without(tmp_path, "scripts/train.py", argument, "--lr", "1")
    assert traced.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_recording_does_not_change_a_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    jobs.write_script(package, SCRIPT, "train.py")
    traced, _ = with_and_without(tmp_path, "-m", "package.train", "4", "--lr")
    assert traced.stdout.startswith(f"['{package}/train.py', '4', '--lr']")


def test_a_missing_script_prints_one_line(tmp_path: Path) -> None:
    result = jobs.run([sys.executable, *RUNNER, "nowhere.py"], tmp_path)
    assert (result.returncode, result.stderr) == (2, "crossrank: nowhere.py: no such script\n")


def test_torchrun_records_an_unchanged_script(tmp_path: Path) -> None:
    script = jobs.write_script(
        tmp_path,
        """
        import os
        os.environ["TRACING_NODE"] = "set-before-torch"  # the script may still steer what torch reads
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        import time
        time.sleep(1.0)  # for the ranks to hear of each other
        dist.destroy_process_group()
        """,
    )
    result = jobs.torchrun(tmp_path, script, "-m", "crossrank.instrument")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        (record,) = records_of(tmp_path / "crossrank-recording", rank)
        assert (record.op, record.source, record.locality) == ("all_reduce", "train.py:7", "intra_node")


def test_spawned_processes_are_recorded_too(tmp_path: Path) -> None:
    jobs.write_script(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def work(rank):
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
            dist.all_reduce(torch.ones(4))
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, nprocs=2)
        """,
    )
    record(tmp_path, "train.py")
    assert_both_ranks_are_recorded(tmp_path)


def test_finding_torch_without_import_has_no_effect(tmp_path: Path) -> None:
    jobs.write_script(
        tmp_path,
        """
        import importlib.util
        assert importlib.util.find_spec("torch") is not None
        import crossrank, torch
        print(crossrank.enabled(), type(torch.__spec__.loader).__name__)
        """,
    )
    assert record(tmp_path, "train.py").stdout == "True SourceFileLoader\n"


def test_a_spawned_process_without_crossrank_still_runs(tmp_path: Path) -> None:
    jobs.write_script(
        tmp_path,
        """
        import multiprocessing, sys

        def work():
            print("worked", flush=True)

        if __name__ == "__main__":
            from multiprocessing import spawn
            from crossrank.instrument.hooks import spawn as followed
            followed._FOLLOW = followed._FOLLOW.replace("crossrank", "nowhere_to_be_found")
            assert "nowhere_to_be_found" in str(spawn.get_command_line(pipe_handle=1))
            worker = multiprocessing.get_context("spawn").Process(target=work)
            worker.start()
            worker.join()
            sys.exit(worker.exitcode)
        """,
    )
    assert record(tmp_path, "train.py").stdout == "worked\n"


LAUNCHER = """
import os, subprocess, sys
import torch
import torch.distributed as dist

def launch():
    \"\"\"As Lightning's own launcher: the first rank starts the others with its own command line.\"\"\"
    os.environ.update(MASTER_ADDR="127.0.0.1", STORE=os.path.join(os.getcwd(), "store"), WORLD_SIZE="2")
    if os.environ.setdefault("LOCAL_RANK", "0") == "0":
        return subprocess.Popen(COMMAND, env=os.environ | {"LOCAL_RANK": "1"})

child = launch()
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
if child is not None:
    assert child.args == COMMAND
    assert child.wait() == 0
"""
THROUGH = {
    "the interpreter": ("train.py", '[sys.executable, os.path.abspath(sys.argv[0]), "--rank"]'),
    "its name": ("train.py", '["python", "-u", "train.py"]'),
    "a module": ("-m package.train", '[sys.executable, "-X", "dev", "-m", "package.train"]'),
    "a text": ("train.py", '[sys.executable, "-c", open("train.py").read()]'),
    "a program that starts it": (
        "train.py",
        '[sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call([sys.executable, \'train.py\']))"]',
    ),
}


@pytest.mark.parametrize(("program", "command"), THROUGH.values(), ids=THROUGH)
def test_ranks_that_a_script_starts_are_recorded_too(program: str, command: str, tmp_path: Path) -> None:
    source = LAUNCHER.replace("COMMAND", command)
    jobs.write_script(tmp_path, source)
    (tmp_path / "package").mkdir()
    jobs.write_script(tmp_path / "package", source)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    record(tmp_path, *program.split(), PATH=path)
    assert_both_ranks_are_recorded(tmp_path)


LOOK = (
    SCRIPT.split("code =")[0]
    + """
print(sys.flags, sys.warnoptions, sys._xoptions, sys.stdin.read())
print(sorted(set(sys.modules) & {"torch", "subprocess", "pickle"}), file=sys.stderr)
sys.exit(7)
"""
)
START = """
import os, subprocess, sys
command = eval(sys.argv[1])
result = subprocess.run(command, input="from stdin", capture_output=True, text=True, cwd="elsewhere")
print(result.args == command, result.returncode, result.stdout, result.stderr)
"""
CHILDREN = [
    '[sys.executable, "look.py", "-m", "a b"]',
    '[sys.executable, "-Bu", "-W", "ignore", "-Xutf8", "look.py"]',
    '[sys.executable, "-um", "look", "-c"]',
    '[sys.executable, "-c", open("elsewhere/look.py").read().replace("__file__", "0"), "x"]',
    '[sys.executable, "-I", os.path.abspath("elsewhere/look.py")]',
    '[sys.executable, "-IS", "-c", open("elsewhere/look.py").read().replace("__file__", "0")]',
    "[sys.executable, b'look.py', __import__('pathlib').Path('x')]",
    '[sys.executable, "folder"]',
    '[sys.executable, "-"]',
    '[sys.executable, "nowhere.py"]',
    '[sys.executable, "-m"]',
    '[sys.executable, "-c", "from __future__ import annotations; 1 / 0"]',
    '[sys.executable, "-V"]',
    '["sh", "-c", "echo $0", "train.py"]',
]


@pytest.mark.parametrize("command", CHILDREN)
def test_recording_does_not_change_a_child_process(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    (folder / "folder").mkdir(parents=True)
    jobs.write_script(folder, LOOK, "look.py")
    jobs.write_script(folder / "folder", LOOK, "__main__.py")
    jobs.write_script(tmp_path, START, "start.py")
    assert with_and_without(tmp_path, "start.py", command)[1].returncode == 0
    assert not list(tmp_path.rglob("crossrank-recording"))


def test_a_child_process_without_crossrank_still_runs(tmp_path: Path) -> None:
    jobs.write_script(tmp_path, LOOK, "look.py")
    jobs.write_script(
        tmp_path,
        """
        import subprocess, sys
        from crossrank.instrument.hooks import spawn
        if "--without" in sys.argv:
            spawn._BOOTSTRAP = spawn._BOOTSTRAP.replace("crossrank", "nowhere_to_be_found")
        for command in (["-Bu", "look.py", "x"], ["-W", "ignore", "-m", "look"], ["-c", "import sys; sys.exit(9)"]):
            words = [sys.executable, *command]
            print(spawn.follow_command(words)[:1], subprocess.run(words, input="", text=True), flush=True)
        """,
        "start.py",
    )
    plain = jobs.run([sys.executable, "start.py"], tmp_path)
    traced = jobs.run([sys.executable, *RUNNER, "start.py", "--without"], tmp_path)
    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout), traced.stderr
    assert plain.stdout.count("returncode=7") == 2
    assert plain.stdout.count("returncode=9") == 1


def test_a_child_that_is_not_a_rank_stays_small_and_writes_nothing(tmp_path: Path) -> None:
    large = {"torch", "msgspec", "nvtx", "asyncio", "logging", "multiprocessing", "subprocess"}
    jobs.write_script(tmp_path, f"import sys\nprint({large} & set(sys.modules))\n", "look.py")
    jobs.write_script(tmp_path, "import subprocess, sys\nsubprocess.run([sys.executable, 'look.py'])\n", "start.py")
    assert record(tmp_path, "start.py").stdout == "set()\n"
    assert not list(tmp_path.rglob("crossrank-recording"))


def test_a_safe_path_is_unchanged(tmp_path: Path) -> None:
    jobs.write_script(tmp_path, "import sys\nprint(sys.path[0])\n")
    with_and_without(tmp_path, "train.py", PYTHONSAFEPATH="1", PYTHONPATH="/somewhere")


def test_the_process_of_async_save_has_its_own_recording(tmp_path: Path) -> None:
    script = jobs.write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            model = torch.nn.Linear(8, 8)
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
            kind = AsyncCheckpointerType.PROCESS
            dcp.async_save({"model": model.state_dict()}, checkpoint_id="saved", async_checkpointer_type=kind).result()
            dist.all_reduce(torch.ones(4))
        """,
    )
    result = jobs.ranks(tmp_path, "-m", 2, "crossrank.instrument", str(script))
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "crossrank-recording"
    for rank in (0, 1):
        calls = [record.op for record in records_of(folder, rank) if record.source and "train.py" in record.source]
        assert calls.count("all_reduce") == 4
        assert "gather" in {record.op for record in records_of(folder / "spawned-1", rank)}
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["spawned-1"]
