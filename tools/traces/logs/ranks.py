"""Makes from what the logs of a job say one `RankTrace` for each rank: its groups, its progress, its end.

It is as the dump of a rank that has its unfinished calls only. These rules hold for torch's lines:

* `[Rank 1]` and `Rank 1]` count within a process group. Its members are the global ranks that print lines of the group.
  Where the known members are equally spaced, so are those between them.
* Lines of the heartbeat monitor have the numbers of the default group, also if another group failed. So they count only
  for a rank that has no line of a failed call. If no rank has one, they show the call that did not end.
* torchrun lists ranks that it ended itself as failures too: their processes are those to which it sent a signal.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec

from crossrank.comm import DEFAULT_GROUP, CommRecord, Group, is_p2p, operation_of
from crossrank.dtypes import dtype_of
from crossrank.errors import CrossrankError
from crossrank.recording import OF_A_BACKEND
from crossrank.tools.traces.ending import MAIN_THREAD, may_be_of_communication
from crossrank.tools.traces.flight.dump import MOST_FRAMES, Frame, Progress, Raised
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.prefixes import Origin
from crossrank.tools.traces.logs.read import Attempt, Fact
from crossrank.tools.traces.logs.tracebacks import Quote, Traceback
from crossrank.tools.traces.rank_trace import SCHEDULED, RankTrace, TraceBuilder

_KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Signals that end a process because of something in it. SIGABRT is also how torch ends after a timeout."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that no launcher sends."""
_DEADLY = (
    *(f"signal {number} " for number in (4, 7, 8, 9, 11)),
    *("Out Of Memory", "OOMKilled", "Segmentation fault", "Killed", "Bus error", "SIGKILL", "SIGSEGV", "SIGBUS"),
    *("died unexpectedly", "called MPI_ABORT"),
    *(f"code -{number}" for number in (4, 7, 8, 9, 11)),
)
"""First words of what schedulers say of a process that was killed."""
_ABORTED = "code -6"
_OF_THIS_HOST = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
"""An error of a connection that no other rank causes."""
_BY_SIGNAL = re.compile("KeyboardInterrupt|SIGTERM|killed by signal")
"""Exceptions of a process that somebody else ends."""
_RAY_DEATHS = ("NODE_OUT_OF_MEMORY", "SYSTEM_ERROR")
"""Why Ray says that a process ended which was not asked to end."""
_OF_FAILURES = (*formats.OF_LAUNCHER, formats.TASK_KILLED, formats.TIMEOUT, formats.STATUS, formats.ASYNC_ERROR)
"""Kinds of facts that show that a job failed."""
_OF_RANKS = (
    formats.TIMEOUT,
    formats.STATUS,
    formats.MONITOR,
    formats.CALL_STACK,
    formats.ASYNC_ERROR,
    formats.OWN_FAILURE,
    formats.STUCK,
    formats.MISMATCH,
)
"""Kinds of facts about the rank that prints them."""

_IN_DEFAULT_GROUP = Fact(formats.STATUS, {"group": "0", "desc": DEFAULT_GROUP}, Quote("", 0, ""), Origin())
_NODE = re.compile(r"'(?P<host>[^']+)': \[(?P<first>\d+)")
"""A node, and the rank of its process 0."""
_CHECKPOINT = re.compile(formats.CHECKPOINT)

_ANY_COLLECTIVE = "collective"
"""Operation of a call, if the log has only its number."""
Key = tuple[str, str]
"""Name and description of a group."""


@dataclass
class RankLog:
    """What the lines of one rank say."""

    rank: int
    facts: list[Fact] = field(default_factory=list)
    raised: Traceback | None = None
    killed: tuple[str, Fact] | None = None
    """How its process was killed, and the line that says so."""
    host: str = ""

    def lines(self) -> list[str]:
        """Return the lines that say something, as `file:line: text`."""
        quotes = [one.quote for one in self.facts]
        if self.raised is not None:
            quotes.append(self.raised.quote)
        if self.killed is not None:
            quotes.append(self.killed[1].quote)
        return [str(one) for one in dict.fromkeys(sorted(quotes, key=lambda one: (one.path, one.number)))]


def ranks_of(attempt: Attempt) -> dict[int, RankLog]:
    """Return what the lines of each rank say. A rank may have no line of its own."""
    local_to_rank = _ranks_of_locals(attempt)
    workers = _rank_of_process(attempt, local_to_rank)

    def global_of(own_rank: int | None, local: int | None) -> int | None:
        return own_rank if own_rank is not None else local_to_rank(local) if local is not None else None

    found: dict[int, RankLog] = {}

    def of(rank: int) -> RankLog:
        return found.setdefault(rank, RankLog(rank))

    for rank in attempt.lines_of:
        of(rank)
    for fact in attempt.facts:
        if fact.kind == formats.PRINTED_RANK:
            of(fact.number("rank"))
        printed_by = global_of(fact.origin.rank, fact.origin.local)
        if printed_by is not None and fact.kind in _OF_RANKS:
            if fact.kind == formats.STUCK:
                if any(one.kind == formats.TIMEOUT for one in of(printed_by).facts):
                    continue
                fact = replace(fact, kind=formats.OWN_FAILURE)
            of(printed_by).facts.append(fact)
            of(printed_by).host = of(printed_by).host or fact.origin.host
    for one in attempt.tracebacks:
        raised_by = workers.get(one.process or one.origin.process, global_of(one.origin.rank, one.origin.local))
        if raised_by is None or not one.ended_process or _names_others(one.error, raised_by):
            continue
        if any(map(one.repeats, attempt.tracebacks)):
            continue
        if not _was_handled(one, attempt):
            of(raised_by).raised = one
    if (only := _raised_by_the_only_failure(attempt, local_to_rank)) is not None:
        of(only[0]).raised = of(only[0]).raised or only[1]
    for rank, how, fact in _kills(attempt, workers, local_to_rank):
        of(rank).killed = how, fact
        of(rank).host = of(rank).host or fact.values.get("host", "")
    for fact in attempt.facts:
        if fact.kind == formats.MISMATCH:
            for name in ("rank", "other"):
                of(fact.number(name))
    if not found:
        found = {rank: RankLog(rank) for rank, *_ in summary_of(attempt.facts)}
    return found


def summary_of(facts: Iterable[Fact]) -> list[tuple[int, str, int, Fact]]:
    """Return (rank, time, exit code, line) of the failures in torchrun's summary, the first one first."""
    kinds = (formats.SUMMARY_TIME, formats.SUMMARY_RANK, formats.SUMMARY_EXIT)
    lines = [one for one in facts if one.kind in kinds]
    found = [
        (rank.number("rank"), time.values["time"], end.number("code"), end)
        for time, rank, end in zip(lines, lines[1:], lines[2:], strict=False)
        if (time.kind, rank.kind, end.kind) == kinds
    ]
    return sorted(found, key=lambda one: one[1])


def _raised_by_the_only_failure(attempt: Attempt, local_to_rank: LocalRanks) -> tuple[int, Traceback] | None:
    """Return (rank, exception) if only one process failed that the launcher had not ended: of an exception whose rank
    is unknown, if it is an error of its own."""
    ended = {_process(one) for one in attempt.facts if one.kind == formats.ENDED_BY_LAUNCHER}
    failed = [one for one in attempt.facts if one.kind == formats.FAILED and _process(one) not in ended]
    raised = [one for one in attempt.tracebacks if one.origin == Origin() and one.ended_process]
    if len(failed) != 1 or failed[0].number("code") <= 0 or not raised:
        return None
    rank = local_to_rank(failed[0].number("local"))
    if rank is None or any(may_be_of_communication(one.error) or _BY_SIGNAL.search(one.error) for one in raised):
        return None
    return rank, raised[-1]


def _names_others(error: str, rank: int) -> bool:
    """Return whether an exception says that other ranks failed, or that two ranks differ."""
    found = _CHECKPOINT.search(error)
    return any(text in error for text in formats.OF_TWO_RANKS) or (
        found is not None and str(rank) not in found["ranks"].split(", ")
    )


def _was_handled(raised: Traceback, attempt: Attempt) -> bool:
    """Return whether the job continued after an exception: something later ended it, or nothing did."""
    if not raised.is_outlived:
        return False
    others = [one for one in attempt.tracebacks if one is not raised]
    if any(
        raised.was_survived(one) and not may_be_of_communication(one.error) and not _BY_SIGNAL.search(one.error)
        for one in others
    ):
        return True
    if any(one.kind == formats.FAILED and -one.number("code") in _KILLED for one in attempt.facts):
        return True
    return not others and not any(one.kind in _OF_FAILURES for one in attempt.facts)


def own_failure(one: RankLog) -> str | None:
    """Return why a rank ended, if neither another rank nor somebody outside can be the reason."""
    if one.raised is not None:
        text, _ = _first_error(one.raised)
        of_others = may_be_of_communication(text) or OF_A_BACKEND.search(text) is not None
        is_own = not of_others or _OF_THIS_HOST.search(text) is not None
        return text if is_own and not _BY_SIGNAL.search(text) else None
    if one.killed is not None:
        return one.killed[0]
    return next((fact.values["why"] for fact in one.facts if fact.kind == formats.OWN_FAILURE), None)


def _first_error(raised: Traceback) -> tuple[str, list[str]]:
    """Return (text of the exception, its causes). If a connection failed while another exception was handled, this one
    came first."""
    text, causes = raised.error, list(raised.causes)
    if causes and may_be_of_communication(text):
        text, *causes = *causes, text
    return text, causes


@dataclass
class LocalRanks:
    """The rank of the process with a number within its node."""

    firsts: dict[str, int]
    """Host -> rank of its process 0."""
    first: int | None
    """The same for a job of one node; None if the lines are of several nodes."""

    def __call__(self, local: int, host: str = "") -> int | None:
        first = self.firsts.get(host, self.first)
        return None if first is None else first + local


def _ranks_of_locals(attempt: Attempt) -> LocalRanks:
    """Return the ranks by lines that have both, and by the mapping that DeepSpeed prints. If no line shows it, the job
    has one node."""
    origins = [one.origin for one in attempt.facts] + [one.origin for one in attempt.tracebacks]
    pairs = {(one.host, one.rank - one.local) for one in origins if one.local is not None and one.rank is not None}
    of_summary = [one for one in attempt.facts if one.kind == formats.SUMMARY_RANK]
    pairs |= {(one.origin.host, one.number("rank") - one.number("local")) for one in of_summary}
    of_nodes = [one.values["nodes"] for one in attempt.facts if one.kind == formats.NODE_RANKS]
    pairs |= {(one["host"], int(one["first"])) for text in of_nodes for one in _NODE.finditer(text)}
    started = {one.origin.host for one in attempt.facts if one.kind == formats.STARTED}
    firsts = {first for _, first in pairs} or {0}
    one_node = len(firsts) == 1 and len(started) < 2
    return LocalRanks({host: first for host, first in pairs if host}, min(firsts) if one_node else None)


def _ranks_in_communicators(attempt: Attempt) -> Iterator[tuple[Fact, int | None]]:
    """Yield each line with the rank that it has in NCCL's largest communicators: this is that of the job."""
    sizes = [one.number("size") for one in attempt.facts if one.kind == formats.COMMUNICATOR]
    largest = max(sizes, default=0)
    for one in attempt.facts:
        is_largest = one.kind == formats.COMMUNICATOR and one.number("size") == largest
        yield one, one.number("member") if is_largest else None


def ranks_of_hosts(attempt: Attempt) -> dict[str, set[int]]:
    """Return host -> its ranks, by lines that have both."""
    found = {host: set(ranks) for host, ranks in attempt.hosts.items()}
    for one, member in _ranks_in_communicators(attempt):
        rank = one.number("rank") if one.kind == formats.PRINTED_RANK else member
        if rank is not None and one.origin.host:
            found.setdefault(one.origin.host, set()).add(rank)
    return found


def _process(fact: Fact) -> tuple[str, str, str]:
    """Return what names the process of a line: containers of several nodes may have the same numbers."""
    return fact.quote.path, fact.origin.host, fact.values["process"]


def _kills(attempt: Attempt, workers: Mapping[str, int], local_to_rank: LocalRanks) -> Iterator[tuple[int, str, Fact]]:
    """Yield (rank, how its process was killed, the line that says so), without those that the launcher ended."""
    ended = {_process(one) for one in attempt.facts if one.kind == formats.ENDED_BY_LAUNCHER}
    has_agents = any(one.kind in formats.OF_LAUNCHER or one.origin.local is not None for one in attempt.facts)
    of_nccl = (formats.TIMEOUT, formats.ASYNC_ERROR, formats.STATUS)
    is_aborted = attempt.nccl_failed or any(one.kind in of_nccl for one in attempt.facts)
    of_summary = [one for one in attempt.facts if one.kind in (formats.SUMMARY_RANK, formats.SUMMARY_EXIT)]
    rank_of = {
        _process(end): one.number("rank")
        for one, end in pairwise(of_summary)
        if (one.kind, end.kind) == (formats.SUMMARY_RANK, formats.SUMMARY_EXIT)
    }
    hosts = ranks_of_hosts(attempt)
    for fact in attempt.facts:
        is_of_launcher = fact.kind == formats.FAILED and _process(fact) not in ended
        if is_of_launcher and fact.number("code") < 0:
            with suppress(ValueError):
                number = signal.Signals(-fact.number("code"))
                if number in _KILLED and not (is_aborted and number == signal.SIGABRT):
                    rank = rank_of.get(_process(fact), local_to_rank(fact.number("local"), fact.origin.host))
                    if rank is not None:
                        yield rank, f"killed by {number.name}", fact
        # Under torchrun a task of Slurm is a launcher.
        is_of_node = fact.quote.text.startswith("srun") and (has_agents or attempt.labels_are_nodes)
        if fact.kind == formats.TASK_KILLED and not is_of_node:
            why = fact.values["why"]
            if why.startswith(_DEADLY) or (why == _ABORTED and not is_aborted):
                yield _rank_of_task(fact, hosts), why, fact
    yield from _kills_in_several_lines(attempt.facts, workers, local_to_rank)
    for rank, _, code, line in summary_of(attempt.facts):
        if -code in _CRASHES:
            yield rank, f"killed by {signal.Signals(-code).name}", line
    if not any(one.kind == formats.FAILED for one in attempt.facts):
        yield from _first_of_summary(attempt.facts)


def _rank_of_task(fact: Fact, hosts: Mapping[str, set[int]]) -> int:
    """Return the rank of a task that was killed. The number in the name of a pod may be another: a job may have a
    master and workers, which are numbered apart."""
    number, host = fact.number("rank"), fact.values.get("host", "")
    if len(own := hosts.get(host, set())) == 1:
        return min(own)
    stem = host.removesuffix(str(number))
    if stem == host:
        return number
    pairs = {
        (rank, int(other[len(stem) :]))
        for other, ranks in hosts.items()
        if other.startswith(stem) and other[len(stem) :].isdecimal() and len(ranks) == 1
        for rank in ranks
    }
    offsets = {rank - other for rank, other in pairs}
    return number + offsets.pop() if len(offsets) == 1 else number


def _first_of_summary(facts: Sequence[Fact]) -> Iterator[tuple[int, str, Fact]]:
    """Yield the rank that torchrun's summary has as killed before it ended all others. It sends SIGKILL itself only to
    processes that SIGTERM has not ended, later than that."""
    ends = summary_of(facts)
    if len(ends) < 2:
        return
    (rank, time, code, line), (_, next_time, *_), *_ = ends
    deadly = -code in _KILLED and -code != signal.SIGABRT
    if deadly and time < next_time and all(one == -signal.SIGTERM for _, _, one, _ in ends[1:]):
        yield rank, f"killed by {signal.Signals(-code).name}", line


def _rank_of_process(attempt: Attempt, local_to_rank: LocalRanks) -> dict[str, int]:
    """Return the rank of each process whose number the launcher, NCCL or Ray says."""
    found: dict[str, int] = {}
    for one, member in _ranks_in_communicators(attempt):
        if member is not None and one.origin.process:
            found.setdefault(one.origin.process, member)
        elif one.kind == formats.RAY_WORKER:
            found[one.values["process"]] = one.number("rank")
        elif one.kind == formats.PROCESS_RANK and one.origin.process:
            found.setdefault(one.origin.process, one.number("rank"))
        elif one.kind == formats.STARTED and (rank := local_to_rank(one.number("local"), one.origin.host)) is not None:
            found.setdefault(one.values["process"], rank)
    return attempt.processes | found


def _kills_in_several_lines(
    facts: Sequence[Fact], workers: Mapping[str, int], local_to_rank: LocalRanks
) -> Iterator[tuple[int, str, Fact]]:
    """Yield what `_kills` does from lines of Kubernetes, Ray and the kernel: one has the rank, or the process, and
    another one how it was killed."""
    of_pods = [one for one in facts if one.kind in (formats.POD_KILLED, formats.POD_RANK)]
    for killed, rank in pairwise(of_pods):
        if (killed.kind, rank.kind) == (formats.POD_KILLED, formats.POD_RANK) and killed.quote.path == rank.quote.path:
            yield rank.number("rank"), killed.values["why"], killed
    for killed in (one for one in facts if one.kind in (formats.PROCESS_KILLED, formats.XID)):
        named = int(killed.values["rank"]) if "rank" in killed.values else None
        if "local" in killed.values:
            named = local_to_rank(killed.number("local"))
        if (rank_of := workers.get(killed.values["process"], named)) is not None:
            yield rank_of, killed.values["why"], killed
    rank_of = None
    for one in facts:
        if one.kind == formats.RAY_PROCESS:
            rank_of = workers.get(one.values["process"])
        elif one.kind == formats.RAY_NAME and rank_of is None:
            rank_of = local_to_rank(one.number("local"))
        elif one.kind == formats.RAY_DIED:
            if rank_of is not None and one.values["why"] in _RAY_DEATHS:
                yield rank_of, one.values["why"], one
            rank_of = None


def traces_of(attempt: Attempt) -> list[RankTrace]:
    """Return the ranks that the logs of one attempt say something about. Raises CrossrankError for several jobs."""
    _refuse_several_jobs(attempt)
    members, ranks = members_of(attempt), ranks_of(attempt)
    timeouts = [fact.values for fact in attempt.facts if fact.kind == formats.TIMEOUT]
    batches = {values["seq"] for values in timeouts if values["op"] == "COALESCED"}
    of_pairs = len(batches) > 1 or any(values["op"] in ("SEND", "RECV") for values in timeouts)
    peers = _peers(ranks, members, of_pairs=of_pairs)
    by_monitors = not any(fact.kind in (formats.TIMEOUT, formats.STATUS) for fact in attempt.facts)
    found = []
    for rank, one in sorted(ranks.items()):
        trace = RankTrace(rank=rank, path="", source="flight", backend="nccl", host=one.host, log_lines=one.lines())
        trace.dump.active_only = trace.dump.of_log = True
        facts = [*one.facts, *_status_of_group(one, attempt.facts)]
        _add_calls(trace, facts, members, peers, of_pairs=of_pairs, by_monitors=by_monitors)
        _add_end(trace, one)
        found.append(trace)
    _add_fingerprints(found, attempt)
    return found


def _refuse_several_jobs(attempt: Attempt) -> None:
    """Raise if one rank timed out in different calls of a group by two files. A process ends with its first one."""
    first: dict[tuple[int, Key], Fact] = {}
    for fact in attempt.facts:
        if fact.kind == formats.STATUS and fact.origin.rank is not None:
            other = first.setdefault((fact.origin.rank, _key(fact)), fact)
            if other.values["seq"] != fact.values["seq"] and other.quote.path != fact.quote.path:
                calls = " and ".join(f"{one.values['seq']} ({one.quote.path})" for one in (other, fact))
                raise CrossrankError(
                    f"rank {fact.origin.rank} timed out in call {calls} of group {fact.values['group']}: these are "
                    "probably logs of several jobs; name those of one job"
                )


def members_of(attempt: Attempt) -> dict[Key, dict[int, int]]:
    """Return, for each group in an attempt's lines, the members: rank in the group -> global rank."""
    found: dict[Key, dict[int, int]] = defaultdict(dict)
    for fact in attempt.facts:
        if "group" in fact.values and fact.origin.rank is not None:
            found[_key(fact)][fact.number("member")] = fact.origin.rank
    if not found:
        found[_key(_IN_DEFAULT_GROUP)] = {}
    sizes = _sizes_of(attempt)
    for key, known in found.items():
        _fill(known, sizes.get(key, 0))
        if key[1] == DEFAULT_GROUP or key[0] == "0":
            known.update({rank: rank for rank in range(max(attempt.lines_of, default=0) + 1)})
    return dict(found)


def _sizes_of(attempt: Attempt) -> dict[Key, int]:
    """Return the number of members of each group that timed out in a gather or a scatter: one side has as many times
    the elements of the other."""
    keys = {
        (one.origin.rank, one.values["member"], one.values["seq"]): _key(one)
        for one in attempt.facts
        if one.kind == formats.STATUS
    }
    found: dict[Key, int] = {}
    for one in attempt.facts:
        is_base = one.kind == formats.TIMEOUT and one.values["op"] in ("_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")
        if is_base and "numel_in" in one.values:
            few, many = sorted((one.number("numel_in"), one.number("numel_out")))
            key = keys.get((one.origin.rank, one.values["member"], one.values["seq"]))
            if key is not None and few and not many % few:
                found[key] = many // few
    return found


def _fill(known: dict[int, int], size: int) -> None:
    """Add the members between known ones that are equally spaced, those before them, and those after them up to the
    size of the group, if it is known."""
    if (spacing := spacing_of(known)) is not None:
        first, step = spacing
        for place in range(max(max(known) + 1, size)):
            if (member := first + step * place) >= 0:
                known.setdefault(place, member)


def spacing_of(known: Mapping[int, int]) -> tuple[int, int] | None:
    """Return (global rank of the first member of a group, how far apart the next ones are); None if the known members,
    rank in the group -> global rank, are fewer than two or not equally spaced."""
    pairs = sorted(known.items())
    steps = {(rank - other) / (place - before) for (before, other), (place, rank) in pairwise(pairs)}
    if len(steps) != 1 or not (step := steps.pop()).is_integer() or step <= 0:
        return None
    place, rank = pairs[0]
    return rank - int(step) * place, int(step)


def _key(fact: Fact) -> Key:
    return fact.values["group"], fact.values.get("desc", "")


def _peers(ranks: Mapping[int, RankLog], members: Mapping[Key, dict[int, int]], *, of_pairs: bool) -> dict[Key, int]:
    """Return the only member of each group that waits in no send or receive of it, while all others do.

    The lines have no peers. But each of the others waits for this one, directly or through its neighbors."""
    waiting: dict[Key, set[int]] = defaultdict(set)
    for rank, one in ranks.items():
        works = {fact.values["seq"]: fact.values["op"] for fact in one.facts if fact.kind == formats.TIMEOUT}
        for fact in (fact for fact in one.facts if fact.kind == formats.STATUS):
            op = works.get(fact.values["seq"], "")
            if op in ("SEND", "RECV") or (op == "COALESCED" and of_pairs):
                waiting[_key(fact)].add(rank)
    lacking = {key: set(members[key].values()) - those for key, those in waiting.items()}
    return {key: min(those) for key, those in lacking.items() if len(those) == 1}


def _add_calls(
    trace: RankTrace,
    facts: list[Fact],
    members: Mapping[Key, dict[int, int]],
    peers: Mapping[Key, int],
    *,
    of_pairs: bool,
    by_monitors: bool,
) -> None:
    """Add a rank's progress on its groups, and the call of each that did not end.

    `of_pairs`: batches are of sends and receives, as their numbers differ between ranks. `by_monitors`: no rank has a
    line of a call that timed out.
    """
    builder = TraceBuilder(trace)
    stack = next((tuple(Frame(*one) for one in fact.frames[:MOST_FRAMES]) for fact in facts if fact.frames), ())
    works = [fact for fact in facts if fact.kind == formats.TIMEOUT]
    status = {_key(fact): fact for fact in facts if fact.kind == formats.STATUS}
    for fact in facts:
        if fact.kind == formats.MONITOR and not status:
            status[_key(fact)] = fact
    for key, fact in status.items():
        name, desc = key
        ranks = [rank for _, rank in sorted(members[key].items())]
        index = builder.define(Group(pg=name, desc=desc, size=len(ranks), ranks=ranks, backend="nccl"))
        enqueued, completed = fact.number("enqueued"), fact.number("completed")
        trace.dump.progress[index] = Progress(last_enqueued_collective=enqueued, last_completed_collective=completed)
        trace.dump.has_status = True
        if fact.kind == formats.MONITOR:
            if by_monitors and enqueued > completed:
                record = _record(_ANY_COLLECTIVE, name, completed + 1, [[]])
                builder.add(record, called=0, state=SCHEDULED, group=index)
            continue
        seq = fact.number("seq")
        same = (one for one in works if one.number("seq") == seq and one.values["member"] == fact.values["member"])
        if (work := next(same, None)) is not None:
            sizes = [[work.number(name)] if name in work.values else [] for name in ("numel_in", "numel_out")]
            record = _record(work.values["op"], name, seq, sizes)
            if is_p2p(record) or (record.op == "coalesced" and of_pairs):
                peer = _neighbor(ranks, trace.rank or 0, peers.get(key))
                if peer is None:  # the line has none
                    trace.dump.waits_for_unknown = True
                    continue
                op = record.op if is_p2p(record) else "recv"
                record = msgspec.structs.replace(record, op=op, seq=None, p2p_seq=seq, peer=peer)
            builder.add(record, called=0, state=SCHEDULED, group=index, stack=stack)


def _neighbor(ranks: Sequence[int], rank: int, awaited: int | None) -> int | None:
    """Return the member of a group next to a rank, in the direction of the one that all wait for; of two, the other."""
    if len(ranks) == 2:
        return sum(ranks) - rank
    if awaited is None or rank not in ranks or awaited == rank:
        return None
    return ranks[ranks.index(rank) + (1 if ranks.index(awaited) > ranks.index(rank) else -1)]


def _status_of_group(one: RankLog, all_facts: list[Fact]) -> Iterator[Fact]:
    """Yield the progress on the group of a call that timed out, if the log lacks it for this rank.

    The log may be cut, or another thread has printed into the line. The rank has enqueued the call, and no later one is
    known. The group is that of the line, else the one in which others timed out in this call, else the only group. If
    no line has one, it is the default group for a rank that raised, and has the same number in it."""
    works = [fact for fact in one.facts if fact.kind == formats.TIMEOUT]
    if not works or any(fact.kind == formats.STATUS for fact in one.facts):
        return
    grouped = [fact for fact in all_facts if "group" in fact.values]
    for work in works:
        seq, member = work.values["seq"], work.values["member"]
        same = [fact for fact in grouped if fact.kind == formats.STATUS and fact.values["seq"] == seq]
        default = [_IN_DEFAULT_GROUP] if one.raised is not None and int(member) == one.rank else []
        for candidates in ([work] if "group" in work.values else [], same, grouped, default):
            if len(set(map(_key, candidates))) == 1:
                name, desc = _key(candidates[0])
                values = {"group": name, "desc": desc, "member": member, "seq": seq, "enqueued": seq}
                yield Fact(formats.STATUS, {**values, "completed": str(int(seq) - 1)}, work.quote, work.origin)
                break


def _record(op: str, pg: str, seq: int, sizes: list[list[int]], dtype: str | None = None) -> CommRecord:
    operation = operation_of(op)
    name = operation.name if operation is not None else op.lower()
    inputs, outputs = [sizes[0]], [sizes[-1]]
    if len(sizes) == 1 and name in ("all_gather", "reduce_scatter"):  # the other side has another size
        inputs, outputs = ([], outputs) if operation is not None and operation.agrees == "output" else (inputs, [])
    known = dtype_of(dtype) if dtype is not None else None
    return CommRecord(
        id=seq,
        op=name,
        c10d="",
        pg=pg,
        bytes=-1,
        t=0,
        seq=seq,
        inputs=inputs,
        outputs=outputs,
        dtype=known.name if known is not None else dtype,
    )


def _add_end(trace: RankTrace, one: RankLog) -> None:
    """Add how a rank's process ended."""
    raised = one.raised
    if raised is not None:
        frames = [Frame(*frame) for frame in raised.frames[:MOST_FRAMES]]
        text, causes = _first_error(raised)
        error = Raised(thread=MAIN_THREAD, error=text, causes=causes, frames=frames)
    elif one.killed is not None:
        error = Raised(thread=MAIN_THREAD, error=one.killed[0])
    elif own := [fact for fact in one.facts if fact.kind == formats.OWN_FAILURE]:
        error = Raised(thread=MAIN_THREAD, error=own[0].values["why"])
    elif failed := [fact for fact in one.facts if fact.kind == formats.ASYNC_ERROR]:
        error = Raised(thread=MAIN_THREAD, error=f"DistBackendError: {failed[0].values['why']}")
    else:
        return
    trace.ending.reason = "exit"
    trace.ending.take_exceptions([error])


def _add_fingerprints(traces: list[RankTrace], attempt: Attempt) -> None:
    """Add the calls that `TORCH_DISTRIBUTED_DEBUG=DETAIL` compared: a line names two ranks that differ."""
    called: dict[int, tuple[str, int, list[int], str | None]] = {}
    for fact in attempt.facts:
        if fact.kind == formats.MISMATCH:
            for rank, prefix in (("rank", ""), ("other", "other_")):
                shape = [int(one) for one in fact.values.get(f"{prefix}shape", "").split(",") if one.strip()]
                seq = max(1, int(fact.values.get(f"{prefix}seq", 1)))  # the wrapper counts from 0, torch from 1
                op, dtype = fact.values.get(f"{prefix}op", fact.values["op"]), fact.values.get(f"{prefix}dtype")
                called[fact.number(rank)] = op, seq, shape, dtype
    everyone = sorted(called)  # all others have come too, and it is unknown to which call
    for trace in traces:
        if (call := called.get(trace.rank or 0)) is not None and not len(trace.calls):
            op, seq, shape, dtype = call
            builder = TraceBuilder(trace)
            index = builder.define(Group(pg="0", desc=DEFAULT_GROUP, size=len(everyone), ranks=everyone))
            builder.add(_record(op, "0", seq, [shape], dtype), called=0, state=SCHEDULED, group=index)
            trace.dump.has_status = True
