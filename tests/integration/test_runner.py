"""`python -m crossrank.instrument` changes nothing that a script can see, and records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.integration.test_interception import records_of

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


@pytest.mark.parametrize("argument", ["0", "3", "a message", "raise"])
def test_a_script_sees_and_returns_what_it_would_without(argument: str, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    jobs.write_script(folder, SCRIPT)
    plain = jobs.run([sys.executable, "scripts/train.py", argument, "--lr", "1"], tmp_path)
    traced = jobs.run([sys.executable, *RUNNER, "scripts/train.py", argument, "--lr", "1"], tmp_path)
    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout)
    assert traced.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_module_sees_and_returns_what_it_would_without(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    jobs.write_script(package, SCRIPT, "train.py")
    plain = jobs.run([sys.executable, "-m", "package.train", "4", "--lr"], tmp_path)
    traced = jobs.run([sys.executable, *RUNNER, "-m", "package.train", "4", "--lr"], tmp_path)
    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout)
    assert traced.stdout.startswith(f"['{package}/train.py', '4', '--lr']")


def test_a_missing_script_is_one_line(tmp_path: Path) -> None:
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
    result = jobs.run([sys.executable, *RUNNER, "train.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert [record.op for record in records_of(tmp_path / "crossrank-recording", rank)] == ["all_reduce"]


def test_looking_for_torch_without_importing_it_changes_nothing(tmp_path: Path) -> None:
    jobs.write_script(
        tmp_path,
        """
        import importlib.util
        assert importlib.util.find_spec("torch") is not None
        import crossrank, torch
        print(crossrank.enabled(), type(torch.__spec__.loader).__name__)
        """,
    )
    result = jobs.run([sys.executable, *RUNNER, "train.py"], tmp_path)
    assert (result.returncode, result.stdout) == (0, "True SourceFileLoader\n"), result.stderr


def test_a_spawned_process_that_cannot_import_crossrank_runs_all_the_same(tmp_path: Path) -> None:
    jobs.write_script(
        tmp_path,
        """
        import multiprocessing, sys

        def work():
            print("worked", flush=True)

        if __name__ == "__main__":
            from multiprocessing import spawn
            runner = sys.modules["crossrank.instrument.runner"]
            runner._FOLLOW = runner._FOLLOW.replace("crossrank", "nowhere_to_be_found")
            assert "nowhere_to_be_found" in str(spawn.get_command_line(pipe_handle=1))
            worker = multiprocessing.get_context("spawn").Process(target=work)
            worker.start()
            worker.join()
            sys.exit(worker.exitcode)
        """,
    )
    result = jobs.run([sys.executable, *RUNNER, "train.py"], tmp_path)
    assert (result.returncode, result.stdout) == (0, "worked\n"), result.stderr


def test_a_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    jobs.write_script(tmp_path, "import sys\nprint(sys.path[0])\n")
    plain = jobs.run([sys.executable, "train.py"], tmp_path, PYTHONSAFEPATH="1", PYTHONPATH="/somewhere")
    traced = jobs.run([sys.executable, *RUNNER, "train.py"], tmp_path, PYTHONSAFEPATH="1", PYTHONPATH="/somewhere")
    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout)
