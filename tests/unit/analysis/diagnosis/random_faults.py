"""Jobs with faults drawn at random, and what is found in them: `python -m tests.unit.analysis.diagnosis.random_faults`.

Run as a program it writes `random_faults.json` anew; a change of an answer is then seen in the difference of the file.
What is true of each job stands there beside what is found: what it runs, its faults, where its ranks are stuck, and
what they left behind.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from crossrank.comm import operation_of
from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import (
    Batch,
    Call,
    Collective,
    CpuStall,
    GpuStall,
    Groups,
    Programs,
    Recv,
    Send,
    SimulatedJob,
    StaleWatchdog,
)
from tests.unit.analysis.diagnosis.simulated_programs import pipeline, training
from tests.unit.analysis.diagnosis.test_comms_beside import write_comms
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of

ANSWERS = Path(__file__).with_name("random_faults.json")
SEEDS = range(400)
_GROUP = (("MainThread", (("new_group", "/opt/torch/distributed/distributed_c10d.py", 5), ("main", "train.py", 7))),)
_HOOK = (("MainThread", (("hook", "/opt/torch/distributed/distributed_c10d.py", 9),)),)
_ENDS = (
    Moment(after=20),
    Moment(reason="SIGTERM", after=9, stacks=_GROUP),
    Moment(reason="SIGTERM", after=0.2),
    Moment(reason="exit", after=0, error="ValueError: x", traceback=(("f", "train.py", 3),)),
    Moment(reason="exit", after=0.3, error=CLOSED, timed_out=True),
    Moment(reason="SIGUSR1", after=0.01, source="train.py:7"),
    Moment(reason="SIGABRT"),
    Moment(reason="SIGTERM", after=3, stacks=_HOOK, source="train.py:9"),
)


def _mixed(rng: random.Random) -> tuple[Programs, Groups]:
    """Steps of collectives on two groups, and sends from even ranks to odd ones."""
    groups: Groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("a", [0, 1, 2])}
    step = [rng.choice(("0", "1", "p2p", "broadcast", "all_to_all")) for _ in range(5)]
    programs: Programs = [[] for _ in range(4)]
    for rank, what in ((rank, what) for what in step * rng.choice((1, 2, 5)) for rank in range(4)):
        if what == "p2p":
            programs[rank].append(Recv("0", rank - 1) if rank % 2 else Send("0", rank + 1))
        elif what not in groups or rank in groups[what][1]:
            programs[rank].append(Collective(what) if what in groups else Collective("0", what, ((8,),)))
    return programs, groups


def _put_fault(rng: random.Random, programs: Programs) -> str:
    """Change one call of one rank. Returns what was done."""
    rank = rng.randrange(len(programs))
    program = programs[rank]
    at = rng.randrange(len(program))
    call, fault = program[at], rng.choice(("stall", "del", "swap", "twice", "change", "change"))
    where = f"rank {rank}, call {at} ({_name(call)})"
    if fault == "stall":
        stall = rng.choice((CpuStall(), CpuStall(), GpuStall(), StaleWatchdog()))
        program.insert(at, stall)
        return f"{where}: {_name(stall)} before it"
    if fault == "del":
        del program[at]
        return f"{where}: left out"
    if fault == "swap":
        program[at - 1], program[at] = call, program[at - 1]
        return f"{where}: swapped with the one before, {_name(program[at])}"
    if fault == "twice":
        program.insert(at, call)
        return f"{where}: made twice"
    change: dict[str, Any] = {}
    if isinstance(call, Collective):
        change = rng.choice(({"dtype": "Half"}, {"inputs": ((7,),)}, {"op": "broadcast"}))
        program[at] = replace(call, **change)
    elif isinstance(call, Send | Recv):
        change = {"size": (3,)}
        program[at] = replace(call, **change)
    return f"{where}: {change or 'as it is'}"


def _name(call: Call) -> str:
    if isinstance(call, Batch):
        return "+".join(map(_name, call.ops))
    if isinstance(call, Collective):
        return f"{call.op} on {call.group}"
    if isinstance(call, Send | Recv):
        return f"{type(call).__name__.lower()} {'to' if isinstance(call, Send) else 'from'} {call.peer}"
    return type(call).__name__


def _records(program: Sequence[Call]) -> list[dict[str, Any]]:
    """The calls of a rank as its comms file has them."""
    counts: Counter[object] = Counter()
    records: list[dict[str, Any]] = []
    for call in takewhile(lambda call: not isinstance(call, CpuStall), program):
        for one in call.ops if isinstance(call, Batch) else (call,):
            if isinstance(one, Collective):
                counts[one.group] += 1
                operation = operation_of(one.op)
                op = one.op if operation is None else operation.name
                root = 0 if op == "broadcast" else None
                records.append({"op": op, "pg": one.group, "root": root, "seq": counts[one.group]})
            elif isinstance(one, Send | Recv):
                counts[type(one), one.peer] += 1
                number = counts[type(one), one.peer]
                records.append({"op": type(one).__name__.lower(), "pg": one.group, "p2p_seq": number, "peer": one.peer})
    return records


def write_files(seed: int, folder: Path) -> dict[str, Any]:
    """Run a job with up to three faults, and write what its ranks leave behind: dumps, comms files, or both. Returns
    what is true of it."""
    rng = random.Random(seed)
    backend = rng.choice(("nccl", "nccl", "gloo"))
    name = rng.choice(("training", "pipeline", "mixed"))
    made = {"training": training(4, 3, backend=backend), "pipeline": pipeline(4, 2)}.get(name) or _mixed(rng)
    programs, groups = [list(program) for program in made[0]], made[1]
    faults = [_put_fault(rng, programs) for _ in range(rng.randrange(4))]
    timing, blocking = rng.random() < 0.6, rng.random() < 0.4
    job = SimulatedJob(programs, groups, backend=backend, timing=timing, blocking=blocking, seed=seed)
    ranks = range(4) if rng.random() < 0.8 else rng.sample(range(4), 3)
    kind = rng.choice(("dumps", "dumps", "moments", "moments", "comms"))
    files = [f"dumps of {sorted(ranks)}"] if kind != "comms" else []
    whole = kind == "dumps" and len(ranks) == 4
    if kind == "moments":
        usual = rng.choice(_ENDS)
        moments = {rank: rng.choice(_ENDS) if rng.random() < 0.3 else usual for rank in ranks}
        files += [f"rank {rank}: {one.reason} after {one.after} s" for rank, one in moments.items()]
        write_moments(job, folder, moments)
    elif kind == "dumps":
        job.run()
        ring, active_only = rng.choice((2000, 2000, 5, 8)), rng.random() < 0.3
        files += [f"the last {ring} calls"] * (ring < 2000) + ["open calls alone"] * active_only
        whole = whole and ring == 2000 and not active_only
        job.write(folder, ranks=ranks, ring=ring, active_only=active_only)
    if kind == "comms" or (backend == "gloo" and rng.random() < 0.7):
        until, ended = rng.choice((None, 1.5, 60.0)), rng.random() < 0.3
        for rank in range(4) if rng.random() < 0.5 else rng.sample(range(4), 2):
            records = _records(programs[rank][: rng.choice((None, None, 3, -1))])
            files.append(f"records of {rank}: {len(records)} calls{', ended' if ended else ''}")
            write_comms(folder, rank, records, ended=ended, groups=groups, until=until)
            whole = False
    # Where there are records alone the job was not run: they say what each rank would have done.
    places = {rank: job.stuck_in(rank) for rank in range(4)} if kind != "comms" else {}
    stuck = [f"rank {rank}: {place}" for rank, place in places.items() if place]
    return {
        "job": f"{name} with {backend}{', blocking' if blocking else ''}{', timed' if timing else ''}",
        "faults": faults,
        "stuck": stuck,
        "files": files,
        "whole": whole,
    }


def answer(seed: int) -> dict[str, Any]:
    """What is true of a job, and what is found: the verdict, a line for each finding, and the notes."""
    with tempfile.TemporaryDirectory() as folder:
        truth = write_files(seed, Path(folder))
        found = diagnosis_of(Path(folder))
        lines = []
        for role in ("findings", "consequences", "advisory"):
            for one in getattr(found, role):
                number = one.collective_seq_id if one.collective_seq_id is not None else one.p2p_seq_id
                awaited = f"{one.awaited_ranks} may wait, " if one.awaited_ranks else ""
                who = f"{awaited}{one.culprit_ranks} <- {one.waiting_ranks} because of {one.because_of}"
                lines.append(f"{role}: {one.kind} {one.pg[1]} {one.op} {number} {who}: {one.text}")
                lines += [f"    {place.rank} {place.role}: {place.what}: {place.frames[0]}" for place in one.places]
        lines = [line.replace(folder, "") for line in lines + found.notes]
        return truth | {"verdict": found.verdict, "found": lines}


if __name__ == "__main__":
    # A line for each fact and each finding.
    facts = {str(seed): {key: json.dumps(fact) for key, fact in answer(seed).items()} for seed in SEEDS}
    lines = [",\n  ".join(f'"{key}": {fact}' for key, fact in one.items()) for one in facts.values()]
    jobs = [f' "{seed}": {{\n  {line}}}' for seed, line in zip(facts, lines, strict=True)]
    ANSWERS.write_text("{\n" + ",\n".join(jobs).replace('", "', '",\n   "') + "\n}\n")
