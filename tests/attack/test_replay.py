"""A recording or a plan that names operations which write files: none is written, and the rest is replayed."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from torch.distributed import HashStore

from crossrank.errors import CrossrankError
from crossrank.machine import memory
from crossrank.replay.run.messages import OwnOptions, State, WorkItem
from crossrank.replay.run.rendezvous import Rendezvous
from crossrank.tools.traces.replayed import Settings
from tests.attack.operations import RECORDING, attack, save_plan
from tests.gpu.raw_kineto import unpacked
from tests.integration import jobs
from tests.unit.replay.plans import plan_of, record

FROM_FILE = (
    "aten::from_file(str filename, bool? shared=None, int? size=0, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None) -> Tensor"
)
FILL = "aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)"


def replay(*words: str | Path, folder: Path) -> str:
    command = ["-m", "crossrank", "replay", *words, "--compute", "--repeat", "1", "--warmup", "0"]
    ended = jobs.fork(command, folder, 120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def with_a_write(trace: dict[str, Any], victim: Path) -> dict[str, Any]:
    """An execution trace in which the last operations make a file and write into it."""
    model = [node for node in trace["nodes"] if node["name"] == "aten::ones"][-1]
    top = max(node["id"] for node in trace["nodes"])
    last = max(int(one["value"]) for node in trace["nodes"] for one in node["attrs"] if one["name"] == "rf_id")
    made = [[top + 5, top + 6, 0, 64, 4, "cpu"], [64], "Tensor(float)"]

    def node(number: int, schema: str, inputs: list[list[Any]]) -> dict[str, Any]:
        given = {"rf_id": last + number, "op_schema": schema}
        attrs = [one | {"value": given.get(one["name"], one["value"])} for one in model["attrs"]]
        sides = {
            side: {
                "values": [row[0] for row in rows],
                "shapes": [row[1] for row in rows],
                "types": [row[2] for row in rows],
                "strides": [[1] if row[1] else [] for row in rows],
            }
            for side, rows in (("inputs", inputs), ("outputs", [made]))
        }
        name = schema.partition("(")[0].partition(".")[0]
        return {"id": top + 10 * number, "name": name, "ctrl_deps": model["ctrl_deps"], **sides, "attrs": attrs}

    arguments = [(str(victim), "String"), (True, "Bool"), (64, "Int"), (6, "Int"), ("<None>", "None")]
    arguments += [("cpu", "Device"), (False, "Bool")]
    write = [node(1, FROM_FILE, [[value, [], kind] for value, kind in arguments])]
    write += [node(2, FILL, [made, [7.0, [], "Double"]])]
    return trace | {"nodes": trace["nodes"] + write}


def test_an_execution_trace_writes_no_file(tmp_path: Path) -> None:
    victim, recording = tmp_path / "profile", tmp_path / "recording"
    shutil.copytree(RECORDING, recording)
    path = recording / "rank-0.et.json.zst"
    path.write_bytes(zstandard.compress(json.dumps(with_a_write(json.loads(unpacked(path)), victim)).encode()))
    said = replay(recording, folder=tmp_path)
    assert not victim.exists()
    assert "1 x aten::from_file (0 ms): may do more than compute on tensors: not run from a file" in said


def test_a_plan_writes_no_file(tmp_path: Path) -> None:
    victim, plan = tmp_path / "profile", tmp_path / "plan.json"
    content = save_plan(tmp_path)
    for rank in content["ranks"]:
        compute = rank["compute"]
        compute["schemas"].append(FROM_FILE)
        first = next(one for one in compute["operations"] if one.get("results") and one.get("schema", -1) >= 0)
        arguments = [str(victim), True, 64, 6, None, {"device": "cpu"}, False]
        first.update(name="aten::from_file", schema=len(compute["schemas"]) - 1, arguments=arguments)
    plan.write_text(json.dumps(content))
    said = replay(plan, folder=tmp_path)
    assert not victim.exists()
    assert "2 x aten::from_file" in said


def test_an_operation_over_the_memory_share_of_a_rank_fails_alone(tmp_path: Path) -> None:
    content = save_plan(tmp_path)
    for rank in content["ranks"]:
        compute = rank["compute"]
        compute["schemas"].append("aten::repeat(Tensor self, SymInt[] repeats) -> Tensor")
        slot, elements = next(
            (number, prod(one["shape"]))
            for number, one in enumerate(compute["slots"])
            if one.get("block", -1) >= 0 and one["dtype"] == "float32" and len(one["shape"]) == 1
        )
        runs = [one for one in compute["operations"] if one.get("node") and one.get("results") and "call" not in one]
        repeats = memory() * 3 // 4 // 4 // elements  # two ranks together would take half as much again as there is
        runs[0].update(name="aten::repeat", schema=len(compute["schemas"]) - 1, arguments=[{"slot": slot}, [repeats]])
    plan = tmp_path / "huge.json"
    plan.write_text(json.dumps(content))
    said = replay(plan, folder=tmp_path)
    assert re.search(r"idle instead: .*2 x aten::repeat \(RuntimeError: .*can't allocate memory", said), said


@pytest.mark.parametrize("seed", range(2))
def test_no_torch_operation_writes_a_file_named_in_a_plan(seed: int, tmp_path: Path) -> None:
    assert attack(save_plan(tmp_path), seed, tmp_path).problem == ""


@pytest.mark.parametrize("schema", ["aten::add._qualified_op_name(Tensor self) -> Tensor", "what?"])
def test_an_invalid_schema_is_skipped_and_reported(schema: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    content = save_plan(tmp_path)
    content["ranks"][0]["compute"]["schemas"] = [schema] * len(content["ranks"][0]["compute"]["schemas"])
    plan.write_text(json.dumps(content))
    said = replay(plan, "--dry-run", folder=tmp_path)
    assert "this torch has no such operation" in said


@pytest.mark.parametrize("key", [b"", b"another"])
def test_a_work_item_from_outside_the_job_ends_the_replay(key: bytes) -> None:
    store = HashStore()
    ours, stranger = Rendezvous(store, 2, key=b"secret"), Rendezvous(store, 2, key=key)
    ours.put("work/0", WorkItem(world_size=2))
    assert ours.work_item(0).world_size == 2

    stranger.put("work/0", WorkItem(world_size=2))

    with pytest.raises(CrossrankError, match="holds a 'work/0' that none of its ranks put there"):
        ours.work_item(0)


def test_the_store_names_no_module_and_no_folder() -> None:
    own = OwnOptions(imports=("this",), record="/a", profile="/b", save_data="/c", compare_data="/d")
    settings = own.put_into(Settings(backend="gloo", device="cpu", repeats=7))
    ours = Rendezvous(HashStore(), 2)
    ours.send_plan(plan_of([record("barrier")], [record("barrier")]), settings)
    assert ours.work_item(1).settings == Settings(backend="gloo", device="cpu", repeats=7)


def test_a_rank_keeps_the_modules_and_folders_of_its_own_command_line() -> None:
    own = Settings(backend="gloo", device="cpu", imports=("mine",), record="/mine")
    named = Settings(backend="nccl", device="cuda", imports=("this",), record="/other", save_data="/other")
    assert OwnOptions.of(own).put_into(named) == Settings(
        backend="nccl", device="cuda", imports=("mine",), record="/mine"
    )


@pytest.mark.parametrize("key", [b"", b"another"])
def test_a_state_from_outside_the_job_is_not_shown(key: bytes) -> None:
    store = HashStore()
    ours, stranger = Rendezvous(store, 2, key=b"secret"), Rendezvous(store, 2, key=key)
    ours.put("state/0", State(phase="warming up"))
    stranger.put("state/1", State(phase="in pass 7", call=1))
    assert ours.states() == {
        0: State(phase="warming up"),
        1: State(phase="unknown", error="another process replaced its state in the store"),
    }


@pytest.mark.parametrize("kind", ["huge", "no frame", "other content"])
@pytest.mark.parametrize("key", [b"", b"secret"])
def test_a_small_state_cannot_take_much_memory_or_break_the_report(kind: str, key: bytes) -> None:
    ours = Rendezvous(HashStore(), 1, key=key)
    huge = zstandard.compress(msgspec.msgpack.encode(State(phase="a" * (300 << 20))))
    assert len(huge) < 40_000
    content = {"huge": huge, "no frame": b"x" * 100, "other content": zstandard.compress(b"\x91\xc1")}[kind]
    ours.store.set("state/0", ours._seal("state/0", content) + content)  # type: ignore[arg-type]
    tracemalloc.start()
    states = ours.states()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert states == {0: State(phase="unknown", error="another process replaced its state in the store")}
    assert most < 20 << 20


def test_a_small_work_item_cannot_expand_to_a_huge_one() -> None:
    ours = Rendezvous(HashStore(), 1)
    content = zstandard.compress(b"\xdd\x10\x00\x00\x00" + bytes(200 << 20))
    ours.store.set("work/0", ours._seal("work/0", content) + content)  # type: ignore[arg-type]
    with pytest.raises(CrossrankError, match="holds a 'work/0' that none of its ranks put there"):
        ours.work_item(0)


def test_an_item_of_one_rank_is_refused_for_another() -> None:
    ours = Rendezvous(HashStore(), 2, key=b"secret")
    ours.put("work/0", WorkItem(world_size=2))
    ours.store.set("work/1", ours.store.get("work/0"))  # type: ignore[arg-type]

    with pytest.raises(CrossrankError, match="'work/1'"):
        ours.work_item(1)
