"""Chakra files as a stream: framing, the contract, generated code, reading what others wrote."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.tools.cli import main
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.chakra_graph import NumberedGroup, merge, number_group
from crossrank.tools.graph.chakra.feeder_contract import RUN_BY_ASTRA_SIM, Checked, check
from crossrank.tools.graph.chakra.framing import read_trace, write_message
from crossrank.tools.varint import varint

LOWER = "convert with --lower astra-sim"
SEND: dict[str, Any] = {"kind": pb.COMM_SEND_NODE, "comm_dst": 1, "comm_tag": 1, "comm_size": 8}
SOURCE = Path(pb.__file__).with_name("et_def.proto")


def file_of(path: Path, *nodes: pb.Node) -> str:
    buffer = io.BytesIO()
    write_message(buffer, pb.GlobalMetadata(version="0.0.4").SerializeToString())
    for node in nodes:
        write_message(buffer, node.SerializeToString())
    path.write_bytes(buffer.getvalue())
    return str(path)


def node(node_id: int, *deps: int, kind: Any = pb.COMP_NODE, ctrl: tuple[int, ...] = (), **attributes: Any) -> pb.Node:
    message = pb.Node(id=node_id, name=f"n{node_id}", type=kind, data_deps=deps, ctrl_deps=ctrl)
    for name, value in attributes.items():
        field = "bool_val" if isinstance(value, bool) else "string_val" if isinstance(value, str) else "int64_val"
        field = "int32_val" if name in ("comm_src", "comm_dst", "comm_tag") else field
        message.attr.add(name=name, **{field: value})
    return message


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    out = tmp_path / "et_def.bin"
    options = [f"-I{SOURCE.parent}", f"--descriptor_set_out={out}", SOURCE.name]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options], check=True)
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    checked_in = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(checked_in)
    for field in (field for message in compiled.message_type for field in message.field):
        field.ClearField("json_name")  # the compiler adds it, the generated code leaves it out
    assert checked_in == compiled


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_framed_messages_are_read_back(tmp_path_factory: pytest.TempPathFactory, names: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("framed") / "t.0.et"
    nodes = [pb.Node(id=i, name=name.hex()) for i, name in enumerate(names)]
    metadata, read = read_trace(file_of(path, *nodes))
    assert metadata.version == "0.0.4"
    assert [message for _, message in read] == nodes


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    plain = file_of(tmp_path / "a.0.et", node(1), node(2, 1, kind=99))
    path = tmp_path / "b.0.et.gz"
    compressed = gzip.compress(Path(plain).read_bytes())
    path.write_bytes(compressed)
    assert check(str(path)) == Checked(path=str(path), nodes=2, types=Counter({"COMP_NODE": 1, "type 99": 1}))
    path.write_bytes(compressed[:-9])
    with pytest.raises(CrossrankError, match=r"b\.0\.et\.gz: cut off in the message at byte \d+ \("):
        check(str(path))
    with pytest.raises(CrossrankError, match=r"gone\.et: cannot be opened: No such file"):
        check(str(tmp_path / "gone.et"))


def test_nodes_of_a_large_file_have_their_offsets(tmp_path: Path) -> None:
    nodes = [pb.Node(id=i, name="n" * (i * 700_000)) for i in range(4)]
    path = Path(file_of(tmp_path / "a.0.et", *nodes))
    content = path.read_bytes()
    found = list(read_trace(str(path))[1])
    assert [node for _, node in found] == nodes
    for offset, node in found:
        assert content[offset:].startswith(varint(node.ByteSize()) + node.SerializeToString())
    for broken, what in ((content[:-1], f"cut off in the message at byte {found[-1][0]};"),
                         (content + b"\xff" * 5, f"no message length at byte {len(content)};")):  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(CrossrankError, match=what):
            list(read_trace(str(path))[1])


def test_a_truncated_file_is_refused_with_the_offset(tmp_path: Path) -> None:
    path = Path(file_of(tmp_path / "a.0.et", node(1), node(2, 1)))
    content = path.read_bytes()
    whole = {0, *(offset for offset, _ in read_trace(str(path))[1]), len(content)}
    for length in set(range(1, len(content))) - whole:
        path.write_bytes(content[:length])
        with pytest.raises(CrossrankError, match=r"a\.0\.et: cut off in the message at byte \d+; convert it again"):
            list(read_trace(str(path))[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a Chakra trace starts with its metadata"),
        (b"\xff" * 20, "no message length at byte 0; the file is damaged or not a Chakra trace"),
        (
            b"\x81\x80\x80\x80\x04",
            "no message length at byte 0; the file is damaged or not a Chakra trace",
        ),  # above 1 GiB
        (b"\x80\x80\x80\x80\x04", "cut off in the message at byte 0"),
        (b"\x80", "cut off in the message at byte 0"),
        (b'{"nodes": []}', "cut off in the message at byte 0"),
        (b"\x03\xff\xff\xff", "the first message is not Chakra metadata"),
        (b"\x02\x08\x05", "does not start with Chakra metadata"),
        (b"\x00\x03\xff\xff\xff", "node 1 at byte 1 is not a Chakra node"),
    ],
)
def test_an_invalid_trace_prints_one_line_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "a.0.et"
    path.write_bytes(content)
    for command in ("check", "inspect"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert f"{path}: {message}" in error
        assert error.count("\n") == 1


def test_a_duplicate_id_is_refused_in_one_line_with_both_offsets(tmp_path: Path) -> None:
    nodes = [node(7), node(8), node(7)]
    nodes[0].name = "a\nb"
    places = r"node 7 \(n7\) at byte 27 has the id of the one \(a\\nb\) at byte 8"
    with pytest.raises(CrossrankError, match=places) as refused:
        check(file_of(tmp_path / "a.0.et", *nodes))
    assert "\n" not in str(refused.value)


def test_a_dependency_on_a_missing_node_breaks_the_contract(tmp_path: Path) -> None:
    result = check(file_of(tmp_path / "a.0.et", node(1, 99), node(2, ctrl=(0,))))
    assert result.faults == {"a dependency on a node that is not in the file": 2}
    assert result.first["a dependency on a node that is not in the file"] == "node 1 (n1) at byte 8 waits for 99"


def test_control_and_data_dependencies_together_must_not_form_a_cycle(tmp_path: Path) -> None:
    result = check(file_of(tmp_path / "a.0.et", node(1, 3), node(2, 1), node(3, ctrl=(2,)), node(4, 1)))
    assert result.faults == {"dependencies form a cycle": 1}
    assert result.first["dependencies form a cycle"] == "nodes 1 <- 3 <- 2"


def test_nodes_in_another_order_are_accepted_with_a_note(tmp_path: Path) -> None:
    result = check(file_of(tmp_path / "a.et", node(512, 0), node(0)))
    assert result.faults == {}
    assert result.notes == {
        "the name does not end in .RANK.et, which ASTRA-sim needs": 1,
        "nodes before their dependencies: an older feeder keeps all of them in memory": 1,
    }


def test_communication_nodes_need_the_fields_of_feeders(tmp_path: Path) -> None:
    collective: dict[str, Any] = {"comm_type": 0, "comm_size": 8}
    path = file_of(
        tmp_path / "a.3.et",
        node(1, kind=pb.COMM_COLL_NODE, **collective),
        node(2, kind=pb.COMM_COLL_NODE, comm_size=8),
        node(3, kind=pb.COMM_COLL_NODE, is_cpu_op=True, **collective),
        node(4, kind=pb.COMM_COLL_NODE, pg_name="mesh_dp", **collective),
        node(5, kind=pb.COMM_COLL_NODE, pg_name="5", **collective),
        node(6, kind=pb.COMM_COLL_NODE, comm_type=pb.BARRIER, comm_size=0),
        node(7, kind=pb.COMM_SEND_NODE, comm_src=2, comm_dst=1, comm_size=8, comm_tag=1),
        node(8, kind=pb.COMM_RECV_NODE, comm_src=1, comm_size=8),
        node(9, kind=pb.METADATA_NODE),
    )
    result = check(path, groups={"4": [0, 3]})
    assert result.faults == {
        "a COMM_COLL_NODE has no comm_type": 1,
        "a communication node with is_cpu_op true; ASTRA-sim stops at it": 1,
        "pg_name is not an integer; ASTRA-sim stops at it": 1,
        "pg_name is not in the group file": 1,
        "comm_src is not the rank of the file": 1,
        "a COMM_RECV_NODE has no comm_tag": 1,
        "a metadata node with a list of groups that the feeder cannot parse": 1,
        "a METADATA_NODE, at which the statistics of ASTRA-sim stop; convert without --group-node and give it the "
        "groups with --comm-group-configuration": 1,
        "ASTRA-sim cannot run BARRIER; convert with --lower astra-sim": 1,
    }
    assert result.notes == {}


@pytest.mark.parametrize(
    ("kind", "attributes", "fault"),
    [
        *((pb.COMM_COLL_NODE, {"comm_type": number, "comm_size": 64}, f"ASTRA-sim cannot run {name}; {LOWER}")
          for name, number in pb.CollectiveCommType.items() if number not in RUN_BY_ASTRA_SIM),
        (pb.COMM_COLL_NODE, {"comm_type": 99, "comm_size": 64}, "ASTRA-sim cannot run comm_type 99"),
        *((pb.COMM_COLL_NODE, {"comm_type": pb.ALL_GATHER, "comm_size": size},
           f"an ALL_GATHER of less than 4 B, which never ends in ASTRA-sim; {LOWER}") for size in (0, 3)),
        (pb.COMM_COLL_NODE, {"comm_type": pb.ALL_REDUCE, "comm_size": 64, "pg_name": "7"},
         f"a collective in a group of one rank, which never ends in ASTRA-sim; {LOWER}"),
        (pb.COMM_SEND_NODE, {"comm_dst": 1, "comm_tag": 1, "comm_size": 0},
         f"a message of 0 B, at which ASTRA-sim stops; {LOWER}"),
        (pb.COMM_RECV_NODE, {"comm_src": 0, "comm_tag": 1, "comm_size": 8},
         f"a message of a rank to itself, at which ASTRA-sim stops; {LOWER}"),
    ],
)  # fmt: skip
def test_nodes_that_astra_sim_cannot_finish_break_the_contract(
    tmp_path: Path, kind: Any, attributes: dict[str, Any], fault: str
) -> None:
    path = file_of(tmp_path / "a.0.et", node(1, kind=kind, **attributes))
    assert check(path, groups={"7": [0]}).faults == {fault: 1}


@pytest.mark.parametrize("number", sorted(RUN_BY_ASTRA_SIM))
def test_collectives_of_astra_sim_meet_the_contract(tmp_path: Path, number: int) -> None:
    path = file_of(tmp_path / "a.0.et", node(1, kind=pb.COMM_COLL_NODE, comm_type=number, comm_size=64, pg_name="7"))
    assert check(path, groups={"7": [0, 1]}).faults == {}


@pytest.mark.parametrize(
    ("nodes", "faults"),
    [
        ((node(1, is_cpu_op=True), node(5, **SEND)), ["a message without a dependent node"]),
        ((node(5, **SEND), node(9, 5, is_cpu_op=True)), []),
        ((node(9, 5, is_cpu_op=True), node(5, **SEND)), []),
        ((node(1, is_cpu_op=False), node(5, **SEND)), []),
    ],
    ids=["nothing waits", "a later node waits", "an earlier node waits", "no host"],
)
def test_a_rank_with_host_nodes_must_not_end_with_a_message(
    tmp_path: Path, nodes: tuple[pb.Node, ...], faults: list[str]
) -> None:
    assert [fault.partition(",")[0] for fault in check(file_of(tmp_path / "a.0.et", *nodes)).faults] == faults


def test_host_nodes_are_noted_because_astra_sim_reports_no_overlap(tmp_path: Path) -> None:
    result = check(file_of(tmp_path / "a.0.et", node(1, is_cpu_op=True), node(2, is_cpu_op=False)))
    assert result.faults == {}
    assert [(note.split(":")[0], count) for note, count in result.notes.items()] == [("a computation on the host", 1)]


def test_invalid_values_break_the_contract(tmp_path: Path) -> None:
    listed = node(2, kind=pb.COMM_COLL_NODE, comm_size=8)
    listed.attr.add(name="comm_type").int64_list.values.append(0)
    path = file_of(
        tmp_path / "a.0.et",
        node(1, kind=pb.COMM_SEND_NODE, comm_dst=-1, comm_size=-8, comm_tag=1),
        listed,
        node(3, kind=pb.COMM_COLL_NODE, comm_type=0, comm_size=8, pg_name="\u0663"),
        node(4, kind=pb.COMM_COLL_NODE, comm_type=0, comm_size=8, pg_name="2147483648"),
        node(5, kind=pb.MEM_LOAD_NODE, tensor_size=8),
    )
    result = check(path)
    assert result.notes == {"tensor_size is int64_val, the older feeder reads uint64_val": 1}
    assert result.faults == {
        "comm_size is negative": 1,
        "comm_dst is negative": 1,
        "comm_type is int64_list, not int64_val": 1,
        "pg_name is not an integer; ASTRA-sim stops at it": 2,
    }


def test_a_long_cycle_is_found_quickly(tmp_path: Path) -> None:
    count = 20_000
    path = file_of(tmp_path / "a.0.et", *(node(i, i % count + 1) for i in range(1, count + 1)))
    started = time.process_time()
    assert check(path).faults == {"dependencies form a cycle": 1}
    assert time.process_time() - started < 5


def test_the_command_reports_faults_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = file_of(tmp_path / "a.0.et", node(1)), file_of(tmp_path / "a.1.et", node(1, 5))
    assert main(["check", good]) == 0
    capsys.readouterr()
    assert main(["check", good, bad, "--json"]) == 1
    captured = capsys.readouterr()
    fault = "a dependency on a node that is not in the file"
    assert [result["faults"] for result in json.loads(captured.out)] == [{}, {fault: 1}]
    assert captured.err == (
        f"crossrank: {bad}: a dependency on a node that is not in the file: 1, "
        "first node 1 (n1) at byte 8 waits for 5\n"
    )


def test_different_amounts_in_a_collective_break_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, size: int) -> str:
        call = node(1, kind=pb.COMM_COLL_NODE, comm_type=pb.ALL_TO_ALL, comm_size=size, pg_name="0")
        return file_of(tmp_path / name, call)

    first, same, other = written("a.0.et", 96), written("a.1.et", 96), written("a.2.et", 64)
    assert main(["check", first, same]) == 0
    capsys.readouterr()
    assert main(["check", first, same, other]) == 1
    assert capsys.readouterr().err == (
        f"crossrank: {other}: the ranks of group 0 give different amounts to a collective, which never ends in "
        "ASTRA-sim; convert with --lower astra-sim: 1, first ALL_TO_ALL of 64 B here and ALL_TO_ALL of 96 B in "
        f"{first}\n"
    )


def test_inspect_prints_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path / "a.0.et", node(1), node(2, 1, comm_size=8, pg_name="0"))
    assert main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "metadata": {"version": "0.0.4", "attr": {}},
        "nodes": [
            {"id": 1, "name": "n1", "type": "COMP_NODE", "start_time_micros": 0, "duration_micros": 0, "attr": {}},
            {"id": 2, "name": "n2", "type": "COMP_NODE", "data_deps": [1], "start_time_micros": 0, "duration_micros": 0,
             "attr": {"comm_size": 8, "pg_name": "0"}},
        ],
    }  # fmt: skip


def test_a_group_has_the_same_number_on_every_rank() -> None:
    ours = number_group(Group(pg="7", size=2, ranks=[0, 2], desc="dp"), 4)
    theirs = number_group(Group(pg="7", size=2, ranks=[0, 2], desc="dp"), 4)
    other = number_group(Group(pg="8", size=2, ranks=[0, 2], desc="tp"), 4)
    assert ours.number == theirs.number == "302173221" != other.number
    assert number_group(Group(pg="0", size=4, ranks=[0, 1, 2, 3]), 4).number == "0"
    assert number_group(Group(pg="94594108284448", size=4, ranks=[0, 1, 2, 3]), 4).number == "0"
    # A second communicator of all ranks orders its collectives by itself.
    assert number_group(Group(pg="x", size=4, ranks=[0, 1, 2, 3]), 4).number != "0"
    addresses = ("94594108284448", "94428220485728")
    assert len({number_group(Group(pg=pg, size=2, ranks=[1, 3]), 4).number for pg in addresses}) == 1
    shown = merge([[ours], [theirs, other], [number_group(Group(pg="0", size=4, ranks=[0, 1, 2, 3]), 4)]])
    assert shown == {ours.number: [0, 2], other.number: [0, 2]}
    with pytest.raises(CrossrankError, match=r"groups '7' \[0, 2\] and 'x' \[1, 2\] have the same number"):
        merge([[ours], [NumberedGroup(number=ours.number, ranks=(1, 2), pg="x")]])
    with pytest.raises(CrossrankError, match="process group 'pp' has unknown members"):
        number_group(Group(pg="pp", size=2), 4)


def test_inspect_prints_the_nodes_of_a_damaged_file_as_valid_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(file_of(tmp_path / "a.0.et", node(1), node(2), node(3)))
    content, second = path.read_bytes(), [offset for offset, _ in read_trace(str(path))[1]][1]
    path.write_bytes(content[: second + 1] + b"\xff" + content[second + 2 :])
    assert main(["inspect", str(path), "--json"]) == 2
    said, err = capsys.readouterr()
    found = json.loads(said)
    assert [one["id"] for one in found["nodes"]] == [1, 3]
    (problem,) = found["problems"]
    assert problem == f"{path}: node 2 at byte {second} is not a Chakra node; the file is damaged"
    assert problem in err


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_inspect_prints_the_nodes_before_a_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = Path(file_of(tmp_path / "a.0.et", node(1), node(2)))
    path.write_bytes(path.read_bytes()[:-2])
    assert main(["inspect", str(path), *arguments]) == 2
    said, err = capsys.readouterr()
    assert "n1" in said
    assert "cut off in the message" in err
