"""Lines as torch and launchers print them, for tests."""

from __future__ import annotations


def watchdog(rank: int, seq: int, *, enqueued: int = 0, op: str = "ALLREDUCE", size: int = 8, member: int | None = None,
             group: str = "0", desc: str = "default_pg") -> list[str]:  # fmt: skip
    """The lines of torch 2.9 on a rank whose call does not end."""
    member = rank if member is None else member
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    head = f"[rank{rank}]:[E1126 10:00:00.000000000 ProcessGroupNCCL.cpp"
    prefix = f"[PG ID 0 PG GUID {group}({desc}) Rank {member}]"
    return [
        f"{head}:683] [Rank {member}] Watchdog caught collective operation timeout: {work} ran for 600000 milliseconds "
        "before timing out.",
        f"{head}:2241] {prefix}  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued "
        f"work: {enqueued or seq}, last completed work: {seq - 1}",
    ]


def monitor(rank: int, enqueued: int, completed: int) -> str:
    """The line of torch 2.9 on a rank that another one told to write its dump."""
    head = f"[rank{rank}]:[E1126 10:00:01.000000000 ProcessGroupNCCL.cpp:1832]"
    why = "due to a collective timeout from  rank 0 and we will try our best to dump the debug info"
    last = f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by"
    return f"{head} [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal {why}. {last}"


def traceback(error: str, prefix: str = "") -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "/job/train.py", line 12, in <module>', "    main()"]
    lines += ['  File "/job/train.py", line 7, in main', "    step(batch)", error]
    return [f"{prefix}{line}" for line in lines]
