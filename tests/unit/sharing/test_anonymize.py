"""A recording without names says what the recording says, and nothing of who made it."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import polars as pl
import pytest
import torch.distributed._functional_collectives
import torch.distributed.nn.functional
import zstandard

from crossrank.comm import CommRecord, Group, Locality
from crossrank.privacy import Privacy
from crossrank.recording import Header, ReadIssues, file_name, read_chunks
from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.mesh import name_in
from crossrank.tools.parallel import Fleet
from crossrank.tools.sharing import kinds
from crossrank.tools.sharing.anonymize import Anonymous, anonymize, verify
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.rules import Scrubber, fields
from crossrank.tools.sharing.vocabulary import is_public, passes
from crossrank.tools.tables import TABLES
from crossrank.tools.traces.kernels import FAMILIES, KernelFamily, communication_kernel
from tests.golden.answers import COMMANDS, SEEDS, answer
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.sharing.test_minimize import lines_in
from tests.unit.traces.nsight.exports import changed, write_exports

ALONE = Fleet(jobs=1)
_FILE = re.compile(
    r"(?:TRACES|OUT|NEW)/\S*|\b(?:rank[-_]\d+|nsight-x+(?:-rank-\d+)?|event_sync|\w+)\.?(?:json|kineto|et|sqlite|flight)[\w.]*|rank_\d+"
)
_SIZES = ("size", "inputs", "output", "path", "files", "sha256")


def masked(answer: Any, names: dict[str, str], shift_ns: int) -> Any:
    """An answer with names in the place of texts, times of the day moved, and without files and their sizes."""
    if isinstance(answer, dict):
        found = {
            masked(key, names, 0): masked(one, names, shift_ns) for key, one in answer.items() if key not in _SIZES
        }
        # Of a timeline the bytes are those of its file.
        return {key: one for key, one in found.items() if not (key == "bytes" and "arrows" in answer)}
    if isinstance(answer, list):
        return sorted((masked(one, names, shift_ns) for one in answer), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(answer, str):
        for text in sorted(names, key=len, reverse=True):
            if len(text) > 3 and text in answer:
                answer = re.sub(rf"(?<![\w/]){re.escape(text)}(?!\w)", names[text].replace("\\", r"\\"), answer)
        return _FILE.sub("FILE", answer)
    return answer - shift_ns if isinstance(answer, int) and 10**17 < answer < 4 * 10**18 else answer


def compare(source: Path, folder: Path) -> None:
    result = anonymize([str(source)], str(folder / "anonymous"), ALONE)
    assert verify(result) == {}
    for name, words in COMMANDS.items():
        if words[0] == "check":
            continue
        answers = []
        for place in (source, folder / "anonymous"):
            shutil.rmtree(folder / "out", ignore_errors=True)
            (folder / "out").mkdir()
            answers.append(answer(words, {"TRACES": str(place), "OUT": str(folder / "out")}))
        assert masked(answers[1], {}, 0) == masked(answers[0], result.replaced, result.shift_ns), name


@pytest.mark.parametrize("name", ["recording", "flight", "gpu", "exports"])
def test_anonymizing_changes_only_names_in_command_output(tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    if name == "exports":
        write_exports(tmp_path / "source", 3, world=4)
    else:
        shutil.copytree(SEEDS / name, tmp_path / "source", dirs_exist_ok=True)
    compare(tmp_path / "source", tmp_path)


@pytest.mark.touches("crossrank", "tools", "replay", traced=False)
@needs_traces
@pytest.mark.parametrize(
    "name",
    [
        "dlrm_8gpu",
        "nsight_h100",
        "flight/missing_one",
        "flight/gloo_missing",
    ],
)
def test_anonymizing_keeps_command_output_of_public_traces(tmp_path: Path, name: str) -> None:
    others = "rank-[2-7].*.gz"  # two of dlrm's eight ranks have names in common, and take a quarter of the time
    shutil.copytree(public(name), tmp_path / "source", ignore=shutil.ignore_patterns("expected.json", others))
    compare(tmp_path / "source", tmp_path)


HOST, NODE, ADDRESS, UUID = "gpu-acme-0017", "rack42-acme", "10.20.30.40", "GPU-aaaa-bbbb-secret"
DIRECTORY, SCRIPT, FUNCTION = "/mnt/acme/secret-project/run1", "/home/alice/secret_model.py", "train_secret_gpt"
GROUP, THREAD, RANGE = "acme_special_group", "acme-data-loader", "acme forward of tower 3"
MESSAGE, TOKEN = "could not load /mnt/acme/weights.bin for customer Zeta", "ACME_TOKEN=hunter2"
KERNEL, OPERATION, MODULE = "void acme::secret_kernel<float>(float*)", "acme::fused_secret", "acme_tower.layers.17"
FUNCTOR = "void at::native::elementwise_kernel<4, acme::SecretFunctor>(int)"
PIECES = ("acme", "alice", "secret", "Secret", "Zeta", "hunter2", "aaaa-bbbb", "rack42", "10.20.30.40", "tower")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A recording of two ranks that has something of its user's in every place for a text."""
    folder = tmp_path / "job"
    folder.mkdir()
    frames = [{"name": FUNCTION, "filename": SCRIPT, "line": 12}]
    raised = {"thread": THREAD, "error": f"ValueError: {MESSAGE}", "causes": [MESSAGE], "frames": frames}
    for rank in (0, 1):
        header: dict[str, Any] = {"schema": "crossrank-comms 1", "rank": rank, "world_size": 2}
        header |= {"host": HOST, "node": NODE, "boot_id": "b-secret", "vm_id": UUID, "gpu_serial": "secret-serial"}
        header |= {"clock": {"t": 0, "wall": 1_780_000_000_000_000_000}, "environ": TOKEN, "blind_spots": [MESSAGE]}
        header |= {"config": {"emit": "ALL", "directory": DIRECTORY, "token": TOKEN}}
        header |= {"gpu": {"name": "NVIDIA H100", "uuid": UUID, "pci": "0000:acme"}}
        header |= {"versions": {"torch": "2.13.0+acme", "acme": "1", "python": "3.11.7"}}
        group = {"pg": "0", "size": 2, "ranks": [0, 1], "desc": GROUP, "backend": "gloo"}
        call: dict[str, Any] = {"id": 0, "seq": 1, "t": 5, "op": "all_reduce", "c10d": "allreduce_", "pg": "0"}
        call |= {"bytes": 24, "dtype": "float32", "in": [[3, 2]], "out": [[3, 2]]}
        call |= {"source": f"{SCRIPT}:40", "note": MESSAGE}
        end = {"reason": "exit", "exceptions": [raised]}
        lines = [{"header": header}, {"group": group}, call, {"acme_line": {"x": MESSAGE}}, {"end": end}]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / f"rank-{rank}.comms.jsonl").write_text(text)
        names = (RANGE, KERNEL, FUNCTOR, OPERATION, f"nn.Module: {MODULE}", f"{SCRIPT}(7): {FUNCTION}")
        args = {"External id": 7, "acme": MESSAGE, "Concrete Inputs": [MESSAGE]}
        event = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 2, "ts": 5.125, "dur": 2, "args": args}
        head: dict[str, Any] = {"traceName": DIRECTORY, "host_name": HOST}
        head |= {"baseTimeNanoseconds": 1_700_000_000_000_000_000}
        head |= {"distributedInfo": {"backend": "gloo", "rank": rank, "hostname": HOST}}
        kineto = head | {"traceEvents": [event | {"name": name} for name in names]}
        (folder / f"rank-{rank}.kineto.json").write_text(json.dumps(kineto))
        attributes = [
            {"name": "rf_id", "type": "uint64", "value": 3},
            {"name": "kernel_file", "type": "string", "value": SCRIPT},
            {"name": "op_schema", "type": "string", "value": f"{OPERATION}(Tensor acme) -> Tensor"},
            {"name": "acme", "type": "string", "value": MESSAGE},
        ]
        given = {"values": [MESSAGE, ADDRESS, 3], "shapes": [[], [], []], "types": ["String", "acme.Type", "Int"]}
        node = {"id": 2, "name": OPERATION, "ctrl_deps": 1, "inputs": given, "outputs": given, "attrs": attributes}
        trace = {"schema": "1.1.1-chakra.0.0.4", "pid": 7, "time": "2026-05-04 03:02:01", "nodes": [node]}
        (folder / f"rank-{rank}.et.json").write_text(json.dumps(trace | {"cwd": DIRECTORY}))
        entry = {"record_id": 0, "pg_id": 0, "process_group": ["0", GROUP], "collective_seq_id": 1, "host": HOST}
        entry |= {"profiling_name": "nccl:all_reduce", "frames": frames, "thread_name": THREAD}
        config = {"0": {"name": "0", "desc": GROUP, "ranks": "[0, 1]"}}
        dump = {"version": "2.10", "pg_config": config, "entries": [entry], "env": TOKEN}
        content = pickle.dumps(dump) if rank else json.dumps(dump).encode()
        (folder / f"rank-{rank}.flight.json").write_bytes(content)
    (folder / "notes.txt").write_text(MESSAGE)
    return folder


def content_of(path: Path) -> str:
    return b"".join(read_chunks(str(path), ReadIssues(str(path)))).decode("utf-8", "replace")


def written(folder: Path) -> dict[str, str]:
    """Every file in a folder, as text."""
    return {path.name: content_of(path) for path in sorted(folder.rglob("*.*"))}


def made(job: Path, *, coarse: bool = False) -> tuple[Anonymous, dict[str, str]]:
    output = job.parent / "anonymous"
    return anonymize([str(job)], str(output), ALONE, coarse=coarse), written(output)


OF_JOB = {file_name(kind, rank) for kind in ("comms", "et", "flight", "kineto") for rank in (0, 1)}


def test_anonymized_files_have_no_user_text(job: Path) -> None:
    result, files = made(job)
    assert set(files) == OF_JOB
    assert [(name, piece) for name, text in files.items() for piece in PIECES if piece in text] == []
    assert verify(result) == {}


def test_a_field_or_file_of_an_unknown_kind_is_counted(job: Path) -> None:
    result, _ = made(job)
    left_out = {(file.kind, what) for file in result.files for what in file.left_out}
    assert left_out >= {
        ("comms", "header.…"),  # what a field is called may be the user's word too
        ("comms", "config.token"),
        ("comms", "call.…"),
        ("comms", "line …"),
        ("kineto", "host_name"),
        ("kineto", "args.…"),
        ("et", "…"),
        ("et", "attribute"),
        ("flight", "entry.host"),
        ("flight", "dump.env"),
    }
    (notes,) = [file for file in result.files if not file.kind]
    assert (notes.output, notes.is_loss) == (None, False)
    assert notes.why is not None
    assert "notes.txt: is a file of unknown type" in notes.why


def test_every_field_of_a_file_struct_has_a_privacy_class() -> None:
    assert kinds.WITHOUT_CLASS == []


def test_table_columns_have_the_privacy_class_of_their_fields() -> None:
    given = [one for struct in (Header, Group, CommRecord) for one in msgspec.structs.fields(struct)]
    declared = {one.encode_name: privacy for one in given for privacy in Privacy if repr(privacy) in repr(one.type)}
    columns = [(name, one) for table in TABLES.values() for name, one in table.columns.items()]
    assert [name for name, one in columns if one.privacy is not declared.get(name, one.privacy)] == []
    texts = {name for name, one in columns if one.dtype == pl.String() and one.privacy is Privacy.NUMBER}
    assert texts == {"members"}  # ranks: 0-3,8


class Later(msgspec.Struct):
    """A struct to which somebody added a field."""

    host: Annotated[str, Privacy.HOST]
    owner: str
    accounts: dict[str, int]
    locality: Locality = "unknown"


def test_a_field_without_a_class_is_listed_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "WITHOUT_CLASS", [])
    rule, scrubber = fields("later", kinds.declared(Later)), Scrubber(Pseudonyms(b"key"), coarse=False)
    assert kinds.WITHOUT_CLASS == ["Later.owner", "Later.accounts"]
    made = rule({"host": "h", "owner": "alice", "accounts": {"alice": 1}, "locality": "cross_node"}, scrubber)
    assert made == {"host": scrubber.names.name("host", "h"), "locality": "cross_node"}
    assert scrubber.left_out == {"later.owner": 1, "later.…": 1}  # no word of torch's: it may be the user's
    assert rule({"locality": "alice"}, scrubber) == {}


def test_a_dump_keeps_the_waits_of_threads(tmp_path: Path) -> None:
    moment = {"rank": 0, "world_size": 2, "time_ns": 5, "waits": [{"id": 7, "thread": THREAD}], "waited": [3, 4]}
    moment["activity"] = {"seconds": 1.5, "calls": 2, "threads": [{"id": 17, "name": THREAD, "cpu_ns": 6}]}
    moment["stacks"] = [{"thread": THREAD, "frames": [], "handles": {"error": "Zeta"}}]
    dump = {"version": "2.10", "pg_config": {}, "entries": [], "crossrank": moment}
    (tmp_path / "rank-0.flight.json").write_text(json.dumps(dump))
    anonymize([str(tmp_path)], str(tmp_path / "out"), ALONE)
    kept = json.loads(content_of(tmp_path / "out" / file_name("flight", 0)))["crossrank"]
    (stack,) = kept["stacks"]
    assert re.fullmatch(r"thread-\w{12}", stack["thread"])
    assert kept["waits"] == [{"id": 7, "thread": stack["thread"]}]
    assert kept["waited"] == [3, 4]
    assert kept["activity"] == {
        "seconds": 1.5,
        "calls": 2,
        "threads": [{"id": 17, "name": stack["thread"], "cpu_ns": 6}],
    }
    assert re.fullmatch(r"x \(text-\w{12}\)", stack["handles"]["error"])


def test_a_text_has_one_name_per_run_on_all_ranks(job: Path) -> None:
    _, files = made(job)
    headers = [json.loads(files[file_name("comms", rank)].partition("\n")[0])["header"] for rank in (0, 1)]
    assert headers[0]["host"] == headers[1]["host"] != HOST
    assert headers[0]["versions"]["python"] == "3.11.7"
    shutil.rmtree(job.parent / "anonymous")
    _, again = made(job)
    assert json.loads(again[file_name("comms", 0)].partition("\n")[0])["header"]["host"] != headers[0]["host"]


def test_all_wall_clock_times_shift_equally_and_others_stay(job: Path) -> None:
    result, files = made(job)
    header = json.loads(files[file_name("comms", 0)].partition("\n")[0])["header"]
    assert header["clock"] == {"t": 0, "wall": 1_780_000_000_000_000_000 - result.shift_ns}
    kineto = json.loads(files[file_name("kineto", 0)])
    # Kineto counts from a multiple of about three months, which would tell what was taken away.
    base = kineto["baseTimeNanoseconds"]
    assert base % (86_400 * 10**9) == 0
    moved = 1_700_000_000_000_000_000 - result.shift_ns
    assert [round(1000 * event["ts"]) + base for event in kineto["traceEvents"]] == [moved + 5125] * 6
    assert result.shift_ns % 1_000_000_000 == 0
    assert 1 <= result.shift_ns / (365 * 86_400 * 10**9) <= 16


def test_words_of_libraries_stay(job: Path) -> None:
    _, files = made(job)
    names = [event["name"] for event in json.loads(files[file_name("kineto", 0)])["traceEvents"]]
    assert names[2].startswith("void at::native::elementwise_kernel<kernel-")
    assert names[4].startswith("nn.Module: module-")
    assert re.fullmatch(r"file-\w{12}\.py\(7\): function-\w{12}", names[5])
    end = lines_in(job.parent / "anonymous" / file_name("comms", 0))[-1]["end"]
    assert end["exceptions"][0]["error"].startswith("ValueError: could not x /x/x/x.x for x x (text-")


@pytest.mark.parametrize(
    ("module", "prefix", "least"),
    [
        (torch.distributed.distributed_c10d, "", 25),
        (torch.distributed._functional_collectives, "functional.", 20),
        (torch.distributed.nn.functional, "nn.functional.", 10),
        (torch.distributed.ProcessGroup, "ProcessGroup.", 15),
    ],
)
def test_torch_call_names_stay(module: object, prefix: str, least: int) -> None:
    calls = r"all_?(reduce|gather|to)|reduce(?!_op)|i?send|i?recv|broadcast|scatter|gather|barrier|batch_i|permute"
    communicates = re.compile(rf"_?({calls}).*")
    inner = re.compile(r".*_(meta|setup_context|timeouts|time_estimate)")
    names = [
        name
        for name in vars(module)
        if communicates.fullmatch(name) and not inner.fullmatch(name) and callable(getattr(module, name))
    ]
    assert len(names) >= least
    assert [name for name in names if not passes("api", prefix + name)] == []


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (
            "/home/alice/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py",
            "/site-packages/torch/distributed/c10d_logger.py",
        ),
        ("/opt/torch/distributed/distributed_c10d.py", "/torch/distributed/distributed_c10d.py"),
        ("/usr/lib/python3.11/threading.py", "/lib/python3.11/threading.py"),
        ("/data/alice/crossrank/instrument/api.py", "/crossrank/instrument/api.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("train.py", "file-NAME.py"),
        ("/home/alice/train.py", "folder-NAME/file-NAME.py"),
        ("/x/lib/python3.11/site-packages/acme_ops/moe.py", "/site-packages/folder-NAME/file-NAME.py"),
        ("<string from alice>", "file-NAME"),
    ],
)
def test_library_paths_lose_their_prefix_and_other_paths_get_names(path: str, kept: str) -> None:
    assert re.sub(r"(?<=(?:file|lder)-)\w{12}", "NAME", Pseudonyms(b"key").path(path)) == kept


def test_messages_keep_torch_words_and_stay_distinct() -> None:
    names = Pseudonyms(b"key")
    gloo = (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:21507"
    )
    assert names.message(gloo).startswith(
        "RuntimeError: [../x/gloo/gloo/transport/tcp/pair.cc:0] Connection closed by peer [0.0.0.0]:0 (text-"
    )
    assert names.message("Connection refused") == "Connection refused"
    assert names.message("lost alice") != names.message("lost bob")


def test_verify_finds_a_remaining_name(job: Path) -> None:
    result, _ = made(job)
    path = job.parent / "anonymous" / file_name("comms", 1)
    path.write_bytes(
        b"".join(read_chunks(str(path), ReadIssues(str(path)))) + b'{"note":"seen on gpu-acme-0017 today"}\n'
    )
    assert verify(result)[HOST] == str(path)


def test_coarse_sizes_are_powers_of_two(job: Path) -> None:
    result, files = made(job, coarse=True)
    call = json.loads(files[file_name("comms", 0)].splitlines()[2])
    assert (call["in"], call["bytes"]) == ([[4, 2]], 32)
    assert verify(result) == {}


def test_anonymize_reports_the_result_for_its_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = job.parent / "anonymous"
    assert main(["anonymize", str(job), "-o", str(output), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"comms file +0-1 +2 +0\n", out)
    assert re.search(r"verified   0 of \d+ replaced texts with at least 4 characters found in the result", out)
    assert "notes.txt: is a file of unknown type; skipped" in err
    assert not any(piece in out + err for piece in PIECES)
    assert main(["anonymize", str(job), "-o", str(output)]) == 2
    assert f"{output}: is not empty; choose a new folder with -o" in capsys.readouterr().err


def cut_off(job: Path) -> None:
    whole = zstandard.ZstdCompressor().compress((job / "rank-0.comms.jsonl").read_bytes() * 50)
    (job / "rank-0.comms.jsonl").write_bytes(whole[: len(whole) // 2])


def keep_notes_alone(job: Path) -> None:
    for path in job.glob("rank-*"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "code", "said", "lacks"),
    [
        pytest.param(
            lambda job: (job / "rank-0.et.json").write_text('{"schema": "1.1.1", "nodes": [{"id": 1'),
            *(1, "rank-0.et.json: is not an execution trace as a whole", {file_name("et", 0)}),
            id="a file that cannot be read is left out",
        ),
        pytest.param(cut_off, 1, "rank-0.comms.jsonl: the last zstd frame is cut off", set(), id="a torn comms file"),
        pytest.param(
            keep_notes_alone,
            *(2, "has no file to anonymize, only a file of unknown type", None),
            id="where nothing is known nothing is written",
        ),
        pytest.param(
            lambda job: (job / "rank-0.kineto.json").rename(job / "alice_job-482131.pt.trace.json"),
            *(0, "notes.txt: is a file of unknown type", set()),
            id="a large number in a name is no rank",
        ),
    ],
)
def test_unusable_files_are_reported_and_the_rest_is_written(
    job: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], object], code: int, said: str, lacks: Any
) -> None:
    change(job)
    assert main(["anonymize", str(job), "-o", str(job.parent / "out")]) == code
    assert said in capsys.readouterr().err
    names = {path.name for path in (job.parent / "out").rglob("*.*")}
    assert names == (set() if lacks is None else OF_JOB - lacks)


def test_two_files_of_a_rank_are_refused_before_anything_is_written(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(job, tmp_path / "other")
    assert main(["anonymize", str(job), str(tmp_path / "other"), "-o", str(tmp_path / "out")]) == 2
    assert "are both of rank 0; give one of them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch::autograd::CppNode<zetacorp::SecretAttention>",
        "autograd::engine::evaluate_function: torch::autograd::CppNode<zetacorp::SecretAttention>",
        "CopyWeights of Alice, zetacorp",
        "Memcpy of zetacorp embedding table (alice)",
        "cutlass_zetacorp_moe_gemm",
        "sm90_zetacorp_flash_mla",
        "two_shot_zetacorp",
        "void at::zetacorp_kernel",
        "aten::zetacorp_op",
        "nccl:zetacorp_sync",
        "cudaZetacorpKernel",
        "ncclZetacorpPlugin",
        "triton_poi_fused_zetacorp_0",
        "enumerate(DataLoader)#_ZetacorpLoaderIter.__next__",
        "torch/zetacorp_models/tower.py(12): train_zetacorp_gpt",
        "<built-in zetacorp secret>",
        "FSDP::pre_forward (zetacorp.layers.1)",
        "/home/alice/zetacorp/torch/utils/tower.py",
        "/srv/lib/python3.11/zetacorp_internal/secret.py",
        "/x/site-packages/megatron/zetacorp_fork/model.py",
        "/x/site-packages/torch/_dynamo/../../../home/alice/secret.py",
    ],
)
def test_user_words_in_library_like_names_are_replaced(name: str) -> None:
    names = Pseudonyms(b"key")
    made = names.path(name) if name.startswith("/") else names.range(name)
    assert not any(word in made.lower() for word in ("zetacorp", "alice", "secret", "tower"))


@pytest.mark.parametrize(
    "name",
    [
        "aten::_foreach_addcdiv_",
        "c10d::_allgather_base_",
        "AddmmBackward0",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        "Memcpy HtoD (Pageable -> Device)",
        "cudaLaunchKernel",
        "hipExtModuleLaunchKernel",
        "Optimizer.step#AdamW.step",
        "ProfilerStep#12",
        "gloo:all_reduce",
        "nccl:send 0->1",
        "record_param_comms",
    ],
)
def test_names_of_torch_and_cuda_stay(name: str) -> None:
    assert Pseudonyms(b"key").range(name) == name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.library)
def test_communication_kernels_stay_recognizable(family: KernelFamily) -> None:
    kernels = [name for name in KERNELS if family.pattern.search(name)]
    assert kernels
    for name in kernels:
        assert communication_kernel(Pseudonyms(b"key").range(name)) == communication_kernel(name)


KERNELS = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "void rcclGenericKernel<1, false>(ncclDevComm*)",
    "void c10d::symmetric_memory::(anonymous namespace)::two_shot_all_reduce_kernel<float, 16>(float**)",
    "multimem_all_reduce_kernel",
    "tensorrt_llm::kernels::oneShotAllReduceKernel<half>(int)",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<float>(int)",
    "void deep_ep::internode::dispatch<false, 3>(void*)",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, int*)",
    "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)",
    "hcom_allReduce__428_0_1",
    "hcclAllReduce_kernel",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
    "allreduce_one_shot_push_kernel_bf16",
    "void aiter::reduce_scatter_cross_device_store<__half>(int)",
    "userbuffers_fp16_sum_inplace_gpu_rr(int)",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs(int)",
    "userbuffers_fp16_sum_inplace_gpu_rr_ag(int)",
    "kuserbuffers_pushrecv(int)",
    "void allreduce7<__half>(mscclpp::MemoryChannelDeviceHandle*, __half*)",
)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("label", "thread 4711 (zetacorp_ldr)"),
        ("group", "ZETACORP_PARALLEL_GROUP"),
        ("group", "10-20-30-40"),
        ("group", "20260504-030201"),
        ("dtype", "c10::zetacorp"),
        ("value", "2026-05-04 03:02:01"),
        ("literal", "\n10.20.30.40"),
        ("device name", "NVIDIA zetacorp H100"),
        ("reason", "SIGALICE2026"),
        ("version", "10.20.30.40"),
        ("version", "2.13.0+zetacorp"),
        ("function", "__zetacorp__"),
        ("category", "privateuse1_zetacorp"),
        ("type", "_zetacorp"),
        ("type", "GenericList[" + "Tensor(long int)," * 40 + "Zetacorp]"),
    ],
)
def test_a_text_of_a_known_kind_with_user_words_is_replaced(kind: str, text: str) -> None:
    assert Pseudonyms(b"key").text(kind, text) != text


def test_text_in_other_scripts_is_replaced() -> None:
    names = Pseudonyms(b"key")
    assert names.message("RuntimeError: 无法加载 /数据/客户/模型.pt").isascii()
    assert names.message("нет файла на узле Алиса").isascii()


def test_the_ranks_of_a_very_large_group_stay(tmp_path: Path) -> None:
    ranks = json.dumps(list(range(5000)))
    dump = {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}, "entries": []}
    (tmp_path / "rank-0.flight.json").write_text(json.dumps(dump))
    anonymize([str(tmp_path)], str(tmp_path / "out"), ALONE)
    made = json.loads(content_of(tmp_path / "out" / file_name("flight", 0)))
    assert json.loads(made["pg_config"]["0"]["ranks"]) == list(range(5000))


def test_the_dimension_of_a_group_stays_in_its_name() -> None:
    names = Pseudonyms(b"key")
    assert re.fullmatch(r"tp-group-\w{12}", names.text("group", "zetacorp_tensor_group"))
    assert name_in(names.text("group", "zetacorp_ep_mod")) == "ep"
    assert names.text("group", "mesh_dp_shard") == "mesh_dp_shard"


def test_a_file_with_invalid_json_numbers_is_kept(job: Path) -> None:
    path = job / "rank-0.kineto.json"
    path.write_text(path.read_text().replace('"dur": 2', '"dur": NaN', 1))
    result, files = made(job)
    events = json.loads(files[file_name("kineto", 0)])["traceEvents"]
    assert ([event["dur"] for event in events], result.lost) == ([None, 2, 2, 2, 2, 2], [])


def test_a_linked_trace_is_kept_only_if_a_source_file_is_damaged(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SEEDS / "recording", source)
    assert main(["link", str(source), "--jobs", "1"]) == 0
    assert not any(
        file.kind == "linked" and file.output for file in anonymize([str(source)], str(tmp_path / "a"), ALONE).files
    )
    kineto = source / file_name("kineto", 0)
    kineto.write_bytes(kineto.read_bytes()[:400])
    anonymize([str(source)], str(tmp_path / "b"), ALONE)
    assert (tmp_path / "b" / file_name("linked", 0)).exists()
    assert not (tmp_path / "b" / file_name("linked", 1)).exists()


@pytest.mark.parametrize("moment", ["1e308", "9e999"])  # the second is infinite
def test_an_impossible_time_is_removed_from_an_export(tmp_path: Path, moment: str) -> None:
    (tmp_path / "source").mkdir()
    write_exports(tmp_path / "source", 1)
    (export,) = (tmp_path / "source").glob("*.sqlite")
    changed(export, f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = {moment} WHERE rowid = 1")
    assert main(["anonymize", str(tmp_path / "source"), "-o", str(tmp_path / "out")]) == 0
    (made,) = (tmp_path / "out").glob("*.sqlite")
    with closing(sqlite3.connect(made)) as connection:
        times = [row[0] for row in connection.execute("SELECT start FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY rowid")]
    assert times[0] is None or abs(times[0]) < 1 << 63
    assert None not in times[1:]


@pytest.mark.parametrize("text", ["m16n8k16", "tilesize128x128x64_stage3", "f2f_stages_32x1"])
def test_single_letters_between_digits_are_public_if_they_are_few(text: str) -> None:
    assert is_public(text)


@pytest.mark.parametrize("text", ["nccl:s3c4r5e6t7", "/torch/a1b2c3d4/e5f6.py"])
def test_single_letters_between_digits_may_be_a_word(text: str) -> None:
    assert not is_public(text)


def test_a_group_is_named_by_digits_only_if_they_may_be_an_address() -> None:
    assert [passes("group", digits) for digits in ("0", "140022334455123", "4111111111111111")] == [True, True, False]
