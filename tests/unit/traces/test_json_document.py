"""Large JSON files, whole, cut off and with single rows that are broken."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrank.budget import OBJECTS
from crossrank.budget import ROWS as ROWS_READ
from crossrank.errors import CrossrankError
from crossrank.recording import read_chunks
from crossrank.tools.traces import json_document
from crossrank.tools.traces.json_document import Document, Shape


class Row(msgspec.Struct):
    a: int
    text: str = ""
    time: float | None = None


class File(msgspec.Struct):
    rows: list[Row]
    version: str = "none"


SHAPE = Shape(what="a list of rows", content=File, rows="rows", row=Row, bare_list=True)
ROWS = [{"a": i, "text": '"}],[{ \\u00e9', "time": i / 8} for i in range(20)]
WHOLE = json.dumps({"version": "1", "rows": ROWS, "other": {"x": [1]}}).encode()


def read(path: Path, content: bytes) -> tuple[list[int], str, tuple[str, ...]]:
    path.write_bytes(content)
    rows: list[Row] = []
    document = Document(str(path), SHAPE, rows.extend)
    return [row.a for row in rows], document.content.version, tuple(document.damage)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_whole_file_is_read_with_any_compression(tmp_path: Path, compress: type[bytes]) -> None:
    assert read(tmp_path / "f", compress(WHOLE)) == (list(range(20)), "1", ())


@settings(max_examples=100)
@given(
    st.integers(1, 400), st.integers(1, 400), st.sampled_from(["{}", '{"a": NaN}', '{"a": 9}', "cut"]), st.booleans()
)
def test_pieces_of_any_size_give_the_same_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, batch: int, chunk: int, row: str, bare: bool
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "f"
    rows = json.dumps(ROWS).replace('{"a": 9,', row + ', {"a": 9,') if row != "cut" else json.dumps(ROWS)[:-100]
    content = (rows if bare else f'{{"version": "1", "rows": {rows}, "other": [{{"a": 1}}]}}').encode()
    whole = read(path, content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_document, "_BATCH", batch)
        patched.setattr(json_document, "read_chunks", partial(read_chunks, size=chunk))
        assert read(path, content) == whole
    assert len(whole[0]) == {"{}": 20, '{"a": NaN}': 20, '{"a": 9}': 21, "cut": len(whole[0])}[row]


def test_rows_are_passed_on_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_document, "_BATCH", 100)
    monkeypatch.setattr(json_document, "read_chunks", partial(read_chunks, size=150))
    (tmp_path / "f").write_bytes(WHOLE)
    batches: list[list[Row]] = []
    document = Document(str(tmp_path / "f"), SHAPE, batches.append)
    assert [row.a for batch in batches for row in batch] == list(range(20))
    assert len(batches) > 5
    assert (document.content.rows, document.sha256) == ([], hashlib.sha256(WHOLE).hexdigest())
    assert (document.budget.used[ROWS_READ], document.budget.used[OBJECTS]) == (20, 42)  # braces in texts count as well


def test_a_bare_list_is_read(tmp_path: Path) -> None:
    assert read(tmp_path / "f", json.dumps(ROWS).encode()) == (list(range(20)), "none", ())


@settings(max_examples=200)
@given(st.integers(1, len(WHOLE) - 1))
def test_a_file_cut_off_anywhere_gives_its_whole_rows_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "f"
    cut = WHOLE[:length]
    whole_rows = sum(cut.count(json.dumps(row).encode()) for row in ROWS)
    if whole_rows == 0:
        with pytest.raises(CrossrankError, match="is not a list of rows"):
            read(path, cut)
        return
    rows, version, damage = read(path, cut)
    assert rows == list(range(whole_rows))
    assert version == "1"
    after_the_list = length > WHOLE.index(b'], "other"')
    assert damage if not after_the_list else whole_rows == 20


def test_invalid_rows_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    content = (
        b'{"version": "2", "rows": [{"a": 1, "time": NaN}, {"a": "7"}, {"a": {}}, {"b": 3}, {"a": 4, "text": "\xff"}]}'
    )
    rows, version, damage = read(tmp_path / "f", content)
    assert (rows, version) == ([1, 7, 4], "2")
    assert damage == (
        "2 of 5 rows are unusable (first: number 3, ValidationError: Expected `int`, got `object` - at `$.a`)",
        "numbers that JSON lacks (inf, nan): 1; they are taken as unknown",
    )


@pytest.mark.parametrize(
    "row",
    ["null", '{"a": ' + "9" * 5000 + "}", '{"a": 1, "text": ' + "[" * 5000 + "]" * 5000 + "}", '{"a": [1]}'],
)
def test_one_bad_row_affects_no_other_row(tmp_path: Path, row: str) -> None:
    content = '{"rows": [{"a": 0}, ROW, {"a": 2}, {"a": 3, "text": "\x1b"}], "version": "5"}'.replace("ROW", row)
    rows, version, damage = read(tmp_path / "f", content.encode())
    assert (rows, version) == ([0, 2, 3], "5")
    assert len(damage) == 1
    assert damage[0].startswith("1 of 4 rows are unusable (first: number 2, ")


DAMAGE = {
    "a lost quote": ('"text": "b"', '"text": "b'),
    "a lost quote at the start": ('"text": "b"', '"text: "b"'),
    "a lost comma": ('"text": "b",', '"text": "b"'),
    "a lost colon": ('"text":', '"text"'),
    "a lost brace": ('{"a": 2', '"a": 2'),
    "a lost brace at the end": ('"time": 0.5}', '"time": 0.5'),
    "a quote within a name": ('"b"', '"f("b")"'),
    "a bracket too many": ('"b"', '"b"]'),
    "a number cut short": ("0.5", "0."),
    "a byte of another file": ('"a": 2', '"a": \x002'),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_row_that_is_not_json_costs_itself_alone(damage: str, place: int, tmp_path: Path) -> None:
    rows = [f'{{"a": {i}, "text": "c"}}' for i in range(4)]
    rows[place] = '{"a": 2, "text": "b", "time": 0.5}'.replace(*DAMAGE[damage])
    expected = [i for i in range(4) if i != place]
    read_rows, version, said = read(tmp_path / "f", f'{{"rows": [{", ".join(rows)}], "version": "5"}}'.encode())
    assert (read_rows, version) == (expected, "5")
    assert [text for text in said if text.startswith("1 of 4 rows are unusable (first: number ")] == list(said)


@pytest.mark.timeout(20)
def test_a_long_run_of_spaces_in_a_broken_row_takes_no_time_for_each_pair_of_them(tmp_path: Path) -> None:
    spaces = " " * 1_000_000
    rows = f'[{{"a": 0}}, {{"a": bad {spaces}x, {{"a": 2}}, {{"a": bad {spaces}]'
    assert read(tmp_path / "f", f'{{"rows": {rows}, "version": "5"}}'.encode())[:2] == ([0, 2], "5")


def test_rows_with_a_bare_inf_are_read_without_it(tmp_path: Path) -> None:
    rows = '[{"a": 0, "time": inf}, {"a": 1, "time": -nan}, {"a": 2, "text": ": inf,", "time": 1}]'
    assert read(tmp_path / "f", f'{{"rows": {rows}}}'.encode()) == (
        [0, 1, 2],
        "none",
        ("numbers that JSON lacks (inf, nan): 2; they are taken as unknown",),
    )


def test_a_cut_off_gzip_file_is_reported_and_its_rows_are_read(tmp_path: Path) -> None:
    many = json.dumps({"rows": [{"a": i, "text": str(i * 7919)} for i in range(5000)]}).encode()
    rows, _, damage = read(tmp_path / "f", gzip.compress(many)[:-4000])
    assert 1000 < len(rows) < 5000
    assert rows == list(range(len(rows)))
    assert damage[0] == "the last gzip stream is cut off; the part before it was read"
    assert damage[1].endswith(f"{len(rows)} whole rows were read")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; it should be a list of rows"),
        (b"  \n", "is empty; it should be a list of rows"),
        (b"\x00\x01binary", "is not a list of rows"),
        (b'{"columns": []}', "is not a list of rows"),
        (b"[" * 100_000, "is not a list of rows"),
    ],
)
def test_a_file_without_rows_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f"
    with pytest.raises(CrossrankError) as caught:
        read(path, content)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CrossrankError, match=r"gone\.json: cannot be opened"):
        Document(str(tmp_path / "gone.json"), SHAPE, list)


def test_a_file_too_large_for_the_machine_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_document, "_MEMORY_PER_BYTE", 1 << 50)
    with pytest.raises(CrossrankError, match=r"too much for this machine's \d+ GB of memory; record a shorter window"):
        read(tmp_path / "f", WHOLE)
