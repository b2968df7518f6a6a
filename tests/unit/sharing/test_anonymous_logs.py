"""A log without names says the same of a hang as the log with names."""

from __future__ import annotations

from pathlib import Path

import zstandard

from crossrank.tools.parallel import Fleet
from crossrank.tools.sharing.anonymize import anonymize, verify
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, roots
from tests.unit.traces.logs.lines import monitor, traceback, watchdog

SCRIPT = ["loading /home/ines/secret-llm", "[rank1]: step 7 on gpu-secret"]


def written(folder: Path, *lines: str, name: str = "train.log") -> Path:
    path = folder / "named" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def anonymous(folder: Path) -> tuple[Path, str]:
    """The folder of the new log, and its text."""
    new = folder / "anonymous"
    result = anonymize([str(folder / "named")], str(new), Fleet())
    assert verify(result) == {}
    (log,) = (one for one in new.rglob("*") if one.is_file())
    return new, zstandard.ZstdDecompressor().decompressobj().decompress(log.read_bytes()).decode()


def test_a_hang_stays_and_the_lines_of_the_script_do_not(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in watchdog(rank, 412, enqueued=415)]
    written(tmp_path, *SCRIPT, *lines, monitor(2, 411, 411))
    folder, text = anonymous(tmp_path)
    assert "secret" not in text
    assert len(text.splitlines()) == len(SCRIPT) + len(lines) + 1
    found = diagnosis_of(folder)
    assert (
        roots(found) == roots(diagnosis_of(tmp_path / "named")) == [("missing_rank", "default_pg", 412, [2], [0, 1, 3])]
    )
    assert [line.split(":")[1] for line in found.findings[0].lines] == ["9", "3", "4", "5", "6"]


def test_an_exception_keeps_its_type_and_loses_its_text_and_path(tmp_path: Path) -> None:
    frames = traceback("ValueError: bad batch of customer-7", "[rank2]: ")
    written(tmp_path, *(line.replace("/job/train.py", "/home/ines/secret.py") for line in frames))
    folder, text = anonymous(tmp_path)
    assert not any(word in text for word in ("ines", "secret", "customer"))
    found = diagnosis_of(folder)
    assert found.suspect_ranks == [2]
    assert found.findings[0].text.startswith("rank 2: ValueError: ")


def test_a_file_of_log_dir_keeps_its_attempt_and_number(tmp_path: Path) -> None:
    written(tmp_path, *traceback("ValueError: x"), name="none_abc/attempt_1/3/stderr.log")
    folder, _ = anonymous(tmp_path)
    assert [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()] == ["attempt_1/3/stderr.log"]
