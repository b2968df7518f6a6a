"""What lines of logs mean: one row per format, with the source that prints it and the versions that do.

Versions are those of torch if the source is a file of torch. Every pattern is searched in a line without its prefixes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NCCL = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_GLOO = "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
_WRAPPER = "torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp"
_OWN = "crossrank/instrument/hang/response.py"
_STORE = "torch/csrc/distributed/c10d/TCPStore.cpp"
_AGENT = "torch/distributed/elastic/agent/server/api.py"
_PROCESSES = "torch/distributed/elastic/multiprocessing/api.py"
_SUMMARY = "torch/distributed/elastic/multiprocessing/errors/__init__.py"

_GROUP = r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+) ?(?:\((?P<desc>[^)]*)\))? Rank "
_PREFIX = rf"{_GROUP}(?P<member>\d+)\]"
"""`[PG ID 1 PG GUID 2(desc) Rank 0]` of 2.4 and later, `[PG 1 Rank 0]` of 2.3; the rank is that within the group."""
_WORK = (
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+), (?:NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+), )?"
    r"Timeout\(ms\)=(?P<timeout_ms>\d+)\)"
)
CHECKPOINT = r"CheckpointException ranks:dict_keys\(\[(?P<ranks>\d+(?:, \d+)*)\]\)"
"""An exception that all ranks raise because some failed."""
OTHER_MODEL = "appears not to match sizes of the same param in process"
OF_TWO_RANKS = (OTHER_MODEL, "gradients are inconsistent between workers")
"""Parts of exceptions of DDP and fairseq that compare ranks: those that raise them need not be the ones that differ."""
_DONE = r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"


def _print_of(prefix: str) -> str:
    """Return the pattern of a fingerprint; the names of its groups begin with `prefix`."""
    return (
        rf"CollectiveFingerPrint\((?:SequenceNumber=(?P<{prefix}seq>\d+)(?:, ?)?)?OpType=(?P<{prefix}op>\w+)"
        rf"(?:, ?TensorShape=\[(?P<{prefix}shape>[\d, ]*)\](?:, ?TensorDtypes=(?P<{prefix}dtype>\w+))?)?"
    )


@dataclass(frozen=True)
class Format:
    """One format of a line."""

    kind: str
    pattern: re.Pattern[str]
    source: str
    since: str = ""
    until: str = ""
    why: str = ""
    """What such a line means, if it does not say it itself."""


def _row(kind: str, pattern: str, source: str, since: str = "", until: str = "", why: str = "") -> Format:
    return Format(kind, re.compile(pattern), source, since, until, why)


TIMEOUT, STATUS, ASYNC_ERROR, MISMATCH = "timeout", "status", "async_error", "mismatch"
MONITOR, CALL_STACK = "monitor", "call_stack"
CLIENTS, FAILED, SUMMARY_TIME, SUMMARY_RANK, SUMMARY_EXIT = "clients", "failed", "time", "summary_rank", "exit"
RESTART, ENDED_BY_LAUNCHER, TASK_KILLED, NETWORK = "restart", "ended_by_launcher", "task_killed", "network"
OF_LAUNCHER = (FAILED, SUMMARY_TIME, SUMMARY_RANK, SUMMARY_EXIT, ENDED_BY_LAUNCHER)
"""Kinds of lines of torchrun."""
TRACEBACK, SPAWNED, IGNORED = "traceback", "spawned", "ignored"
FAULTY, OWN_FAILURE, SAID = "faulty", "own_failure", "said"
"""A line that names the ranks at fault; an error, of its own or its GPU, of the rank that prints it; one that names no
rank."""
STUCK = "stuck"
"""The thread that watches a rank's calls is stuck. After a timeout, the end of its process may be the reason."""
STACK, PROCESS_SHOWN = "stack", "process_shown"
"""The stack of a thread, and the process whose stacks come next."""
AWAITED = "awaited"
"""A line of a rank that waits for something of another rank, `other`. The rank that waits is `member` in its group, or
that of the job."""
POD_KILLED, POD_RANK = "pod_killed", "pod_rank"
"""Lines of one pod: why it was killed, and its rank."""
PROCESS_RANK = "process_rank"
"""The rank of the process that prints it."""
PRINTED_RANK = "printed_rank"
"""A process prints its own rank before the group is made."""
NCCL_FAILED = "nccl_failed"
"""Any error of torch's NCCL backend."""
COMMUNICATOR = "communicator"
"""A rank begins to make a communicator of NCCL, or has made it. `member` is its rank in it."""
NODE_FAILED = "node_failed"
SECTION, NODE_RANKS = "section", "node_ranks"
"""An edge between the lines of two ranks; the ranks of each node."""
PASSED = "passed"
"""All tests passed: what failed was to fail."""
DIFFERS = "differs"
"""A rank has another model than `other`."""
VERSION = "version"
"""Two ranks have other versions of NCCL."""
RAY_WORKER, RAY_PROCESS, RAY_NAME, RAY_DIED = "ray_worker", "ray_process", "ray_name", "ray_died"
"""The rank of a process, the process that Ray speaks of, its number within the first node, and how it ended."""
XID = "xid"
"""An error of a GPU while a process used it, by the driver."""
STARTED, PROCESS_KILLED = "started", "process_killed"
"""A process that a launcher started, and one that was killed."""
OUTSIDE = "outside"
"""Somebody ended the job."""
VERDICT, VERDICT_CULPRIT, WITHDRAWN = "verdict", "verdict_culprit", "withdrawn"
"""Lines of crossrank in a job."""

FORMATS = (
    _row(
        TIMEOUT,
        rf"\A(?:.{{0,60}}?{_GROUP}\d+\].{{0,80}}?|.{{0,120}}?)\[Rank (?P<member>\d+)\] "
        rf"Watchdog caught collective operation timeout: {_WORK}",
        _NCCL,
        "2.0",
    ),
    _row(
        STATUS,
        rf"{_PREFIX}.{{0,120}}? at work sequence id: (?P<seq>\d+) PG status: last enqueued work: (?P<enqueued>-?\d+),"
        rf"(?: last started work: (?P<started>-?\d+) \((?P<name>[^)]*)\),)? {_DONE}",
        _NCCL,
        "2.7",
    ),
    _row(
        STATUS,
        rf"{_PREFIX} (?:Timeout at NCCL work|Exception \(either an error or timeout\) detected by watchdog at work): "
        rf"(?P<seq>\d+), last enqueued NCCL work: (?P<enqueued>-?\d+), {_DONE}",
        _NCCL,
        "2.3",
        "2.6",
    ),
    _row(
        MONITOR,
        rf"{_PREFIX} (?:Received a (?:dump|timeout) signal|Heartbeat monitor timed out).{{0,400}}?"
        rf"Last enqueued NCCL work: (?P<enqueued>-?\d+), {_DONE}",
        _NCCL,
        "2.3",
    ),
    _row(PROCESS_SHOWN, r"\AProcess (?P<process>\d+): (?:.*\bRANK=(?P<rank>\d{1,7})\b)?", "py-spy/src/main.rs"),
    _row(PROCESS_SHOWN, r"Pyspy dump for PID (?P<process>\d+)", "sglang/srt/utils/common.py"),
    _row(STACK, r"\AThread (?P<process>\d+) \([^)]*\): \"MainThread\"", "py-spy/src/main.rs"),
    _row(STACK, r"\A(?:Current thread|Thread) 0x\w+ (?:\[[^\]]*\] )?\(most recent call first\):", "Python/traceback.c"),
    _row(CALL_STACK, r"Stack trace of the failed collective: *\Z", _NCCL, "2.4"),
    _row(
        ASYNC_ERROR,
        rf"\[Rank (?P<member>\d+)\] Collective {_WORK} raised the following async exception: (?P<why>.*)",
        _NCCL,
        "2.0",
    ),
    _row(
        ASYNC_ERROR,
        r"\[Rank (?P<member>\d+)\] found async exception when checking for NCCL errors: (?P<why>.*)",
        _NCCL,
        "2.4",
    ),
    _row(ASYNC_ERROR, r"watchdog thread terminated with exception: (?P<why>NCCL error: .*)", _NCCL, "1.13"),
    _row(
        NETWORK,
        r"NCCL WARN NET/IB ?: (?:[\w:.]+ )?Got (?:async event|completion) (?:from peer )?(?P<host>[\w.:-]+?)<\d+> "
        r"(?:with (?:error|status=\w+\()|.*?)(?P<error>\d+)",
        "nccl/src/transport/net_ib.cc",
    ),
    _row(
        MISMATCH,
        rf"Detected mismatch between collectives on ranks\. Rank (?P<rank>\d+) is running collective: {_print_of('')}"
        rf".*?but Rank (?P<other>\d+) is running collective: {_print_of('other_')}",
        _WRAPPER,
        "1.9",
    ),
    _row(
        FAULTY,
        r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier in (?P<timeout_ms>\d+) ms",
        _GLOO,
        why="has not come to the monitored barrier",
    ),
    _row(
        FAULTY,
        r"\[(?P<ranks>\d+(?:, \d+)*)\] finished collective #\d+, but didn't join collective #(?P<seq>\d+)",
        "torch/csrc/distributed/c10d/TraceUtils.h",
        "1.13",
        "2.5",
        "has not joined this collective",
    ),
    _row(
        FAULTY,
        r"ranks \[(?P<ranks>\d+(?:, \d+)*)\] are the lagging ranks that caused this timeout",
        "torch/csrc/distributed/c10d/TraceUtils.h",
        "1.13",
        "2.5",
        "has joined no collective",
    ),
    _row(
        FAULTY,
        r"\Amissing ranks: \{(?P<ranks>\d+(?:, \d+)*)\}",
        "torch/distributed/flight_recorder/components/types.py",
        why="has not joined a collective, by torchfrtrace",
    ),
    _row(
        MISMATCH,
        r"(?P<op>DDP) expects same model across all ranks, but Rank (?P<rank>\d+) has (?P<shape>\d+) params, while "
        r"rank (?P<other>\d+) has inconsistent (?P<other_shape>\d+) params",
        "torch/csrc/distributed/c10d/reducer.cpp",
        "1.9",
    ),
    _row(
        DIFFERS,
        r"\[(?P<rank>\d+)\]: params\[\d+\] in this process with sizes \[[\d, ]*\] "
        rf"{OTHER_MODEL} (?P<other>\d+)",
        "torch/csrc/distributed/c10d/reducer.cpp",
    ),
    _row(
        AWAITED,
        r"\[(?P<member>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<other>\d+)\]",
        _NCCL,
        "1.9",
        why="has not made the id of a new communicator",
    ),
    _row(
        AWAITED,
        r"wait timeout after \d+ms, keys: /default_pg/\d+//(?:\d+//)?cpu//\d+/(?P<other>\d+)\b",
        _STORE,
        why="has not come to connect with gloo",
    ),
    _row(
        VERDICT,
        r"crossrank: (?P<why>.+): no \w+ on rank \d+ for [\d.]+ s\. Verdict \((?P<file>.+)\):",
        _OWN,
    ),
    _row(VERDICT, r"crossrank: (?P<why>the job hangs): .+ Verdict \((?P<file>.+)\):", _OWN),
    _row(VERDICT_CULPRIT, r"\Aculprit    ranks? (?P<ranks>[\d,-]+)", "crossrank/tools/output/diagnosis/verdict.py"),
    _row(WITHDRAWN, r"crossrank: .+ the verdict above no longer applies", _OWN),
    _row(
        OWN_FAILURE,
        r"watchdog thread terminated with exception: (?P<why>CUDA error: [^.\n]*)",
        _NCCL,
        "1.13",
    ),
    _row(
        OWN_FAILURE,
        r"(?P<why>Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating\W\w+ \w+))",
        "Python/faulthandler.c",
    ),
    _row(OWN_FAILURE, r"(?P<why>Caught signal (?:4|7|8|11) \([\w ]+)", "ucx/src/ucs/debug/debug.c"),
    _row(
        TASK_KILLED,
        r"(?:Rank|Global rank) (?P<rank>\d+) (?:\(PID \d+\) exited|crashed) with exit (?P<why>code -\d+)",
        "composer/cli/launcher.py",
    ),
    _row(STUCK, r"(?P<why>ProcessGroupNCCL's watchdog got stuck for \d+ seconds)", _NCCL, "2.4"),
    _row(
        TASK_KILLED, r"process (?P<rank>\d+) terminated with signal (?P<why>SIG\w+)", "torch/multiprocessing/spawn.py"
    ),
    _row(SPAWNED, r"-- Process (?P<rank>\d+) terminated with the following error", "torch/multiprocessing/spawn.py"),
    _row(TASK_KILLED, r"(?P<host>[\w.-]+-(?P<rank>\d+)) +(?:\d+/\d+|Warning) +(?P<why>OOMKilled)", "kubectl get pods"),
    _row(
        TASK_KILLED,
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on (?P<why>signal \d+ \([\w ]+\))",
        "openmpi/orte/tools/orterun",
    ),
    _row(
        PROCESS_KILLED,
        r"Memory on the node \(IP: (?P<host>[\w.:]+).*name=(?:[^,]*_0:(?P<local>\d+):[^,]*|[^,]*?(?P<rank>\d+)?), "
        r"pid=(?P<process>\d+)",
        "ray/src/ray/raylet/node_manager.cc",
        why="Out Of Memory: killed by Ray",
    ),
    _row(
        PROCESS_KILLED,
        r"Out of memory: Killed process (?P<process>\d+) \(",
        "linux/mm/oom_kill.c",
        why="Out Of Memory: killed by the kernel",
    ),
    _row(
        STARTED,
        r"process (?P<process>\d+) spawned with command: .*--local_rank=(?P<local>\d+)",
        "deepspeed/launcher/launch.py",
    ),
    _row(
        TASK_KILLED,
        r"\AMPI_ABORT was invoked on rank (?P<rank>\d+) in communicator",
        "openmpi/ompi/mpi/c/abort.c",
        why="called MPI_ABORT",
    ),
    _row(
        SECTION,
        r"\A-+(?:Begin global rank (?P<rank>\d+)|End global rank \d+) STD(?:OUT|ERR)-+\Z",
        "composer/cli/launcher.py",
    ),
    _row(SECTION, r"\A==> (?P<path>.+) <==\Z", "coreutils/src/tail.c"),
    _row(NODE_RANKS, r"global_rank_mapping=.*?\{(?P<nodes>'.+\])\}", "deepspeed/launcher/launch.py"),
    _row(POD_KILLED, r"\A\s+Reason: +(?P<why>OOMKilled)", "kubectl describe pod"),
    _row(POD_RANK, r"\A\s+RANK: +(?P<rank>\d+)\Z", "kubectl describe pod"),
    _row(RAY_WORKER, r"ip=(?P<host>[\w.:]+), pid=(?P<process>\d+)\) world_rank=(?P<rank>\d+)", "ray/train"),
    _row(
        PROCESS_RANK,
        r"Setting up process group for: \S+ \[rank=(?P<rank>\d+), world_size=",
        "ray/train/torch/config.py",
    ),
    _row(PROCESS_RANK, r"\A\[Rank (?P<rank>\d+)\] (?!Watchdog|Collective)", "verl"),
    _row(PROCESS_RANK, r"\brank (?P<rank>\d+) in world size \d+", "vllm/distributed/parallel_state.py"),
    _row(PROCESS_RANK, r"\bGLOBAL_RANK: (?P<rank>\d+), MEMBER: ", "lightning/fabric/utilities/distributed.py"),
    _row(
        PROCESS_RANK, r"\[Gloo\] Rank (?P<rank>\d+) is connected to \d+ peer ranks", "gloo/gloo/rendezvous/context.cc"
    ),
    _row(
        VERSION,
        r"Mismatched NCCL version detected : rank (?P<rank>\d+) version (?P<version>\d+) "
        r"rank (?P<other>\d+) version (?P<other_version>\d+)",
        "nccl/src/init.cc",
    ),
    _row(
        FAULTY,
        CHECKPOINT,
        "torch/distributed/checkpoint/api.py",
        why="failed in a checkpoint, and all ranks raised for it",
    ),
    _row(RAY_PROCESS, r"\A\s+pid: (?P<process>\d+)\Z", "ray/exceptions.py"),
    _row(RAY_NAME, r"\A\s+name: \w+_0:(?P<local>\d+)\Z", "verl/single_controller/ray/base.py"),
    _row(RAY_DIED, r"Worker exit type: (?P<why>\w+)", "ray/exceptions.py"),
    _row(
        OUTSIDE,
        r"(?P<why>(?:JOB|STEP) [\d.]+ (?:ON \S+ )?CANCELLED AT .*|Process \d+ got signal: \d+)",
        "slurmstepd, " + _PROCESSES,
    ),
    _row(NODE_FAILED, r"srun: error: Node failure on (?P<host>\S+)", "slurm/src/srun"),
    _row(NODE_FAILED, r"[Pp]reemption notice|instance/preempted = TRUE", "nodes of clouds"),
    _row(
        COMMUNICATOR,
        r"NCCL INFO (?:ncclComm\w+ )?comm 0x\w+ rank (?P<member>\d+) nranks (?P<size>\d+) .*?"
        r"(?:commId (?P<comm>0x\w+) )?- Init (?P<state>START|COMPLETE)",
        "nccl/src/init.cc",
    ),
    _row(PASSED, r"\A=+ \d+ passed\b(?!.*\bfailed\b).* in [\d.]+s", "pytest"),
    _row(SAID, r"NCCL WARN (?P<why>(?:Duplicate GPU detected|socketStartConnect: Connect to|Net : ).*)", "nccl"),
    _row(SAID, r"(?P<why>Rendezvous(?:Connection|Timeout|Closed)\w*Error.*)", "torch/distributed/elastic/rendezvous"),
    _row(SAID, r"(?P<why>exits with return code = -\d+)", "deepspeed/launcher/launch.py"),
    _row(XID, r"(?P<why>NVRM: Xid \(PCI:[\w:.]+\): (?!45,)\d+, pid=(?P<process>\d+),.*)", "drivers"),
    _row(SAID, r"(?P<why>NVRM: Xid .*|Memory access fault by GPU.*)", "drivers"),
    _row(CLIENTS, r"waiting for clients\. (?P<joined>\d+)/(?P<expected>\d+) clients joined", _STORE),
    _row(RESTART, r"Worker group FAILED\. \d+/\d+ attempts left; will restart worker group", _AGENT),
    _row(ENDED_BY_LAUNCHER, r"Sending process (?P<process>\d+) closing signal (?P<signal>\w+)", _PROCESSES),
    _row(
        FAILED,
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<process>\d+)\)",
        _PROCESSES,
    ),
    _row(SUMMARY_TIME, r"^\s*time\s*: (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)", _SUMMARY),
    _row(SUMMARY_RANK, r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)", _SUMMARY),
    _row(SUMMARY_EXIT, r"^\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<process>\d+)\)", _SUMMARY),
    _row(
        TASK_KILLED,
        r"\[rank: (?P<rank>\d+)\] Child process with PID \d+ terminated with (?P<why>code -\d+)",
        "lightning/fabric/strategies/launchers/subprocess_script.py",
    ),
    _row(
        TASK_KILLED,
        r"Worker proc \w+-(?P<rank>\d+) (?P<why>died unexpectedly)",
        "vllm/v1/executor/multiproc_executor.py",
    ),
    _row(TASK_KILLED, r"srun: error: (?P<host>[\w.-]+): task (?P<rank>\d+): (?P<why>.+)", "slurm/src/srun"),
    _row(NCCL_FAILED, r"\A\[?E(?: (?:\d.*)?|\d{3,4} .*)ProcessGroupNCCL\.cpp:\d+\]", _NCCL),
    _row(PRINTED_RANK, r"\bSLURM_PROCID=(?P<rank>\d{1,7})\b", "scripts"),
    _row(PRINTED_RANK, r"\brank=(?P<rank>\d{1,7}),? local_rank=\d", "scripts"),
    _row(PRINTED_RANK, r"(?:\b[Rr]ank=|\bRANK=|\[rank )(?P<rank>\d{1,7})\]?,? .{0,80}?(?i:world_size)=\d", "scripts"),
    _row(IGNORED, r"\AException ignored ", "Python"),
    _row(
        TRACEBACK,
        r"\A(?: +\+ Exception Group |[\w ]{1,40}: )?Traceback \(most recent call last\):(?: \(RANK (?P<rank>\d+)\))?",
        "Python",
    ),
    _row(TRACEBACK, r"\A╭─+ Traceback \(most recent call last\) ─", "rich/traceback.py"),
)

LITERALS = (
    "is connected to", "Mismatched NCCL version", "ranks:dict_keys", "Process ", "Pyspy dump",
    '"MainThread"', "most recent call first", "Stack trace of the failed", "Watchdog caught",
    " at work sequence id", "Timeout at NCCL work", "detected by watchdog at work", "Last enqueued NCCL work",
    "raised the following async", "NET/IB", "Detected mismatch between", "failed to pass monitoredBarrier",
    "clients joined", "will restart worker group", "closing signal", "failed (exitcode:", "local_rank: ", "exitcode ",
    "terminated with", "OOMKilled", "Memory on the node",
    "Killed process", "spawned with command", "Reason: ", "RANK: ", "world_rank=", "pid: ",
    "Worker exit type", "CANCELLED AT", "got signal: ", "Node failure", "NCCL WARN", "Rendezvous", "return code",
    " - Init ", " passed", "NVRM: Xid", "Memory access fault", "got stuck for", "params, while",
    "appears not to match", "lagging ranks",
    "ncclUniqueId", "exited on signal", "keys: ", "crossrank: ", "culprit    ", "finished collective", "srun: error:",
    "crashed with exit code", "Fatal Python error", "Caught signal ",
    "Child process with PID", "world_size=", "WORLD_SIZE=", "world size", "SLURM_PROCID=", "local_rank=",
    "MPI_ABORT", "global rank", "==> ", "global_rank_mapping",
    "reemption notice", "preempted = ",
    "GLOBAL_RANK", "name: ", "missing ranks: ", "found async exception", "died unexpectedly", "ProcessGroupNCCL.cpp",
    "Traceback (most recent", "Exception ignored ", "time      : 2", "Setting up process group", "[Rank ",
)  # fmt: skip
"""A line without one of these has none of the formats: most lines of a log are of the script."""
