"""A folder, a socket, a cache or a limit that somebody has prepared: training goes on and writes no file of others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from crossrank.errors import CrossrankError
from crossrank.instrument.compiled import build
from crossrank.instrument.locks import take_lock
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, PAUSING, VERDICT, file_name, temporary_name
from crossrank.tools.cli import main
from tests.integration import jobs
from tests.integration.fork_server import ROOT

TRAIN = """
crossrank.enable(tracing="ALL", window="1:2", hang_seconds=0.4)
for step in range(4):
    dist.all_reduce(torch.ones(8))
    crossrank.step()
with crossrank.expect_pause():
    pass
crossrank.disable()
print("trained")
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def names_of_a_run() -> list[str]:
    """Every name that a process of rank 0 writes to, in a window too."""
    whole = [file_name(kind, 0) for kind in (COMMS, EXECUTION_TRACE, KINETO, FLIGHT)]
    growing = [temporary_name(name) for name in whole]
    return [*whole, *growing, *(f"{name}{end}" for name in growing for end in (".tmp", ".zst")), VERDICT, f"{PAUSING}0"]


def test_a_run_does_not_write_through_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    recording = tmp_path / "crossrank-recording"
    recording.mkdir()
    for name in names_of_a_run():
        (recording / name).symlink_to(victim)

    result = jobs.python(tmp_path, TRAIN)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert victim.read_text() == "mine"
    assert main(["inspect", str(recording)]) == 0


def test_a_run_does_not_wait_for_pipes(tmp_path: Path) -> None:
    recording = tmp_path / "crossrank-recording"
    recording.mkdir()
    for name in names_of_a_run():
        os.mkfifo(recording / name)

    result = jobs.python(tmp_path, TRAIN)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert main(["inspect", str(recording)]) == 0


@needs_root
def test_a_lock_of_another_user_counts_as_free() -> None:
    ours = take_lock("a folder")
    assert ours is not None
    address = ours.getsockname()
    assert take_lock("a folder") is None
    ours.close()
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER, repr(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == b"listens\n"
    lock = take_lock("a folder")
    stranger.communicate(b"")
    assert lock is not None
    lock.close()


_STRANGER = """
import ast, os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
    listener.bind(ast.literal_eval(sys.argv[1]))
    listener.listen(8)
    print("listens", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["a link", "a parent that others may write", "a folder of another user"])
def test_a_recorder_file_others_could_write_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Path(str(build.load().__file__))
    folder = tmp_path / "shared" / "cache" / "crossrank"
    folder.mkdir(mode=0o700, parents=True)
    if how == "a link":
        (folder / built.name).symlink_to(built)
    else:
        os.chmod(shutil.copy(built, folder), 0o700)
    if how == "a parent that others may write":
        (tmp_path / "shared").chmod(0o777)
    if how == "a folder of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(tmp_path / "shared" / "cache", 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setattr(build, "_loaded", None)

    with pytest.raises(CrossrankError, match=r"is refused: it (is a link|belongs to or may be changed by another)"):
        build.load()


@pytest.mark.parametrize("module", ["msgspec", "zstandard", "orjson"])
def test_training_continues_without_a_requirement_and_prints_one_line(module: str, tmp_path: Path) -> None:
    source = f"""
import sys
sys.modules[{module!r}] = None
import crossrank
with crossrank.enable() as tracing:
    crossrank.step()
with crossrank.window(), crossrank.expect_pause():
    pass
crossrank.disable()
print(tracing.active, crossrank.enabled())
"""
    (tmp_path / "train.py").write_text(source)

    result = jobs.run([sys.executable, "train.py"], tmp_path)

    assert (result.returncode, result.stdout) == (0, "False False\n"), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("crossrank: tracing is off: ")
    assert module in line


def test_training_continues_without_file_descriptors(tmp_path: Path) -> None:
    source = TRAIN.replace(
        "crossrank.enable(",
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
crossrank.enable(""",
        1,
    )
    result = jobs.python(tmp_path, source)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert "crossrank: tracing is off: " in result.stderr


def test_a_folder_name_may_be_invalid_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(b"run-\xff")
    result = jobs.python(tmp_path, TRAIN, TRACING_DIR=name)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert main(["inspect", str(tmp_path / name)]) == 0


@pytest.mark.parametrize("texts", ["1", "0"])
def test_a_recording_has_no_environment_arguments_or_values_and_exception_texts_only_if_wanted(
    texts: str, tmp_path: Path
) -> None:
    source = TRAIN.replace("crossrank.disable()", "").replace("torch.ones(8)", "torch.tensor([777.125] * 8)")
    source += 'raise ValueError("hunter2 was refused")'
    variables = {"TOKEN": "token-in-environment", "TRACING_EXCEPTION_TEXTS": texts}

    result = jobs.python(tmp_path, source, "--password", "password-in-arguments", **variables)

    assert result.returncode == 1
    recording = tmp_path / "crossrank-recording"
    decompress = zstandard.ZstdDecompressor()
    content = b"".join(
        decompress.stream_reader(path.read_bytes(), read_across_frames=True).read() for path in recording.glob("*.zst")
    )
    assert b"ValueError" in content
    assert (b"hunter2" in content) == (texts == "1")
    assert not [one for one in (b"token-in-environment", b"password-in-arguments", b"777.125") if one in content]


@pytest.mark.parametrize("part", ["0", "1"])
def test_no_exception_in_the_recorder_reaches_the_training_loop(part: str) -> None:
    ended = jobs.fork(["-m", "tests.attack.injected_faults", part, "2"], ROOT, 240)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["reached the loop"] == {}
    assert said["functions"] > 300


@needs_root
def test_a_full_disk_prints_one_line_per_job(tmp_path: Path) -> None:
    small = tmp_path / "crossrank-recording"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=False)
    if mounted.returncode:
        pytest.skip("this machine mounts nothing")
    source = """
    import torch, torch.distributed as dist, crossrank
    dist.init_process_group("gloo")
    crossrank.enable(tracing="CROSSNODE", window="1:2")
    sizes = torch.ones(20_000)
    for step in range(3):
        for size in range(2_000):
            dist.all_reduce(sizes[: size + step * 2_000])
        crossrank.step()
    crossrank.disable()
    print("trained")
    """
    try:
        ended = jobs.ranks(tmp_path, jobs.write_script(tmp_path, source))
    finally:
        subprocess.run(["umount", small], check=True)

    assert (ended.codes, ended.stdout) == ([0, 0], "trained\n" * 2), ended.stderr
    assert [line for line in ended.stderr.splitlines() if "crossrank: " in line] == [
        "crossrank: the disk of the recording is full: data that does not fit is lost. Training continues. Free "
        "space there, or set another folder with TRACING_DIR"
    ]
