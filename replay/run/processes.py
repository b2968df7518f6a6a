"""Runs a plan on every rank: in processes that it starts, or in those of a launcher.

Without a launcher, it forks the processes from one that has already imported torch, so a rank starts in milliseconds.
All end when one fails. Under a launcher, rank 0 plans and leads; the others do what it sends them.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from torch.distributed import Store, TCPStore

from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import Plan
from crossrank.replay.plan.probe import Machine
from crossrank.replay.run.failure_report import Failed, print_states
from crossrank.replay.run.launcher import RankInfo
from crossrank.replay.run.messages import OwnOptions, RankResult, State
from crossrank.replay.run.rendezvous import FINISHED, NoPlanError, Rendezvous, connect, host_store, listen
from crossrank.replay.run.worker import leave, run_rank
from crossrank.tools.traces.replayed import Settings

_REPORT_S = 10.0
_GRACE_S = 3.0
"""After a failure, how long the other ranks have to report their state."""
_NO_PLAN_WAIT_S = 60.0
"""How long rank 0 of a launcher waits for ranks that do not yet know that there is no plan."""
_END_WAIT_S = 5.0
_REFUSAL_S = 2.0
"""How long another rank stays if rank 0 has nothing to replay: rank 0 reports the reason and ends first."""
_STATE_WAIT_S = 0.3
"""Within this time, a rank that is alive notices the abort and reports its state. Open MPI kills all ranks one second
after one has died."""


def run_local(plan: Plan, settings: Settings, environment: Mapping[str, str] | None = None) -> list[RankResult]:
    """Run `plan` with one process per rank, with `environment` added to theirs.

    Raises `Failed` with the state of every rank if one of them died, failed or hung.
    """
    store = listen("127.0.0.1", 0, settings.timeout_s)
    key = secrets.token_bytes(32)
    rendezvous = Rendezvous(store, plan.world_size, key=key)
    rendezvous.send_plan(plan, settings)
    # torch reads some variables at its import, so these need processes that import it again.
    context: Any = multiprocessing.get_context("spawn" if environment else "forkserver")
    if not environment:
        context.set_forkserver_preload(["crossrank.replay.run.processes"])
        _start_fork_server()
    processes: list[BaseProcess] = []
    for rank in range(plan.world_size):
        arguments = (rank, plan.world_size, store.port, key, settings.timeout_s, OwnOptions.of(settings))
        processes.append(context.Process(target=_run_rank_process, args=arguments, name=f"rank {rank}", daemon=True))
    try:
        with _set_variables(environment or {}):
            for process in processes:
                process.start()
        return _collect_results(rendezvous, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join(_GRACE_S)  # the fork server reports the end, and may have ended itself


def _start_fork_server() -> None:
    """Start it with SIGINT ignored: Ctrl-C during its import of torch would print a traceback. This process ends it."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals cannot be set here; it starts with the first process
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect_results(rendezvous: Rendezvous, processes: list[BaseProcess]) -> list[RankResult]:
    """Wait for all results. If a process ends without its result, raise `Failed` with the state of every rank."""
    reported = time.monotonic()
    while True:
        ended = wait([process.sentinel for process in processes], timeout=0.05)
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            state = rendezvous.states().get(0)
            print(f"crossrank: rank 0 is {state.phase if state is not None else 'starting'}", file=sys.stderr)
        if rendezvous.has_all_results():
            results = rendezvous.results()
            rendezvous.store.set(FINISHED, "1")
            deadline = time.monotonic() + _GRACE_S
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return results
        if ended:
            rendezvous.abort()
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(process.is_alive() for process in processes):
                wait([process.sentinel for process in processes if process.is_alive()], timeout=0.1)
            raise Failed(_collect_states(rendezvous, [process.exitcode for process in processes]))


def _run_rank_process(rank: int, world_size: int, port: int, key: bytes, timeout_s: float, own: OwnOptions) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends all ranks
    threading.Thread(target=_end_with_parent, name="crossrank-parent", daemon=True).start()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    timeout = timedelta(seconds=timeout_s)
    stores = (TCPStore("127.0.0.1", port, is_master=False, timeout=timeout) for _ in range(2))
    first, second = (Rendezvous(store, world_size, key=key) for store in stores)
    code, _ = run_rank(rank, rank, first, second, own)
    leave(code)


def _end_with_parent() -> None:
    parent = cast("BaseProcess", multiprocessing.parent_process())
    wait([parent.sentinel])
    os._exit(1)


def _make_rendezvous(place: RankInfo, store: Store, turn: int) -> Rendezvous:
    return Rendezvous(store, place.world_size, turn, key=place.key)


class Lead:
    """Rank 0 under a launcher: plans, and leads the other ranks."""

    def __init__(self, place: RankInfo, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._turn = 0

    def run(self, plan: Plan, settings: Settings) -> list[RankResult]:
        """Send `plan`, do this rank's part, and gather the results. Raises `Failed` if a rank failed."""
        rendezvous = self._meet()
        rendezvous.send_plan(plan, settings)
        second = _make_rendezvous(self.place, connect(self.place, self._timeout_s), self._turn)

        def final_report() -> None:
            states = _collect_states(second)
            print(f"crossrank: the replay did not finish: {Failed(states).summary()}", file=sys.stderr)
            print_states(states, plan)
            sys.stdout.flush()

        with term_to_pipe() as term:
            own, at = OwnOptions.of(settings), self.place.local_rank
            code, result = run_rank(0, at, rendezvous, second, own, final_report, term=term, leads=True)
            if code or result is None:
                time.sleep(_STATE_WAIT_S)
                raise Failed(_collect_states(second))
        results = rendezvous.results()
        self._turn += 1
        rendezvous.store.set(FINISHED, "1")
        return results

    def machines(self) -> list[Machine]:
        """Wait for the host of each rank. Raises `CrossrankError` if one is missing."""
        rendezvous = self._meet()
        rendezvous.tell_machine(self.place.rank)
        return rendezvous.machines(self._timeout_s)

    def refuse(self) -> None:
        """End the other ranks, which wait for a plan that does not come."""
        try:
            self._meet(_REFUSAL_S).abort()
            self._wait_for_others(_NO_PLAN_WAIT_S)
        except (CrossrankError, RuntimeError):
            return  # no rank can be waiting

    def end(self) -> None:
        """End the other ranks: all work is done."""
        if self._store is not None:
            self._meet().send_end()
            self._wait_for_others(_END_WAIT_S)

    def _meet(self, patience_s: float | None = None) -> Rendezvous:
        """Return the rendezvous of the current turn; host the store if this process does not yet."""
        self._store = self._store or host_store(self.place, patience_s or self._timeout_s)
        return _make_rendezvous(self.place, self._store, self._turn)

    def _wait_for_others(self, most_s: float) -> None:
        """Wait for the others before this process ends, and its store with it."""
        deadline = time.monotonic() + most_s
        while self._store and time.monotonic() < deadline and self._store.add("left", 0) < self.place.world_size - 1:
            time.sleep(0.01)
        if self.place.file:
            Path(self.place.file).unlink(missing_ok=True)


def serve(place: RankInfo, timeout_s: float, own: OwnOptions) -> int:
    """Run any other rank: replay what rank 0 sends until there is no more. Its own options are those of its command
    line. Return the exit code."""
    store = host_store(place, timeout_s)
    _make_rendezvous(place, store, 0).tell_machine(place.rank)
    turn = 0
    while True:
        rendezvous = _make_rendezvous(place, store, turn)
        second = _make_rendezvous(place, connect(place, timeout_s), turn)
        try:
            with term_to_pipe() as term:
                code, result = run_rank(place.rank, place.local_rank, rendezvous, second, own, term=term)
        except NoPlanError:
            store.add("left", 1)
            time.sleep(_REFUSAL_S)  # rank 0 reports the reason and ends first
            return 2
        if code:
            leave(code)
        if result is None:
            store.add("left", 1)
            return 0
        turn += 1


@contextmanager
def term_to_pipe() -> Iterator[int]:
    """Turn SIGTERM into bytes in a pipe. Launchers send it to the other ranks when one died. The watch reads the pipe
    and reports the state, while the main thread may wait in a collective."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(earlier)
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)


def _collect_states(rendezvous: Rendezvous, exit_codes: Sequence[int | None] = ()) -> dict[int, State]:
    """Return the state of every rank, some time after all were asked to end. A rank without an answer has died; for
    processes started here, the exit code shows how."""
    try:
        states = rendezvous.states()
    except RuntimeError:  # the store ended with its host
        states = {}
    for rank, code in zip_longest(range(rendezvous.world_size), exit_codes):
        state = states.setdefault(rank, State(phase="starting" if exit_codes else "never seen"))
        if state.error:
            continue
        if code is not None and code < 0:
            state.error = f"killed by signal {-code}"
        elif not state.asked_to_end and exit_codes:
            state.error = f"exited with {code}" if code else "made no progress"
        elif not state.asked_to_end:
            never_seen = state.phase == "never seen"
            state.error = "never reached rank 0" if never_seen else "lost contact: it died, or makes no progress"
    return states
