"""Runs a plan on every rank: in processes that are started here, or in those of a launcher.

Without a launcher the processes are forked from one that has imported torch already, so that a rank costs milliseconds
to start, and all are ended when one fails. Under one, rank 0 plans and leads, and the others do what it sends them.
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
from crossrank.replay.run.messages import RankResult, State
from crossrank.replay.run.rendezvous import FINISHED, NoPlanError, Rendezvous, connect, host_store, listen
from crossrank.replay.run.worker import leave, run_rank
from crossrank.tools.traces.replayed import Settings

_REPORT_S = 10.0
_GRACE_S = 3.0
"""How long the other ranks have to report where they are, after one has failed."""
_LAST_TO_COME_S = 60.0
"""How long rank 0 of a launcher waits for ranks that have yet to hear that there is no plan."""
_LAST_TO_LEAVE_S = 5.0
_REFUSAL_S = 2.0
"""How long another rank stays when rank 0 has nothing to replay: rank 0 reports why, and goes first."""
_ANSWER_S = 0.3
"""Within this time a rank that is alive has seen that all have to end, and reported where it is. Open MPI kills
all a second after one has died."""


def run_local(plan: Plan, settings: Settings, environment: Mapping[str, str] | None = None) -> list[RankResult]:
    """Run `plan` with one process per rank. `environment` is added to theirs.

    Raises `Failed` with the state of every rank where one of them died, failed or hung.
    """
    store = listen("127.0.0.1", 0, settings.timeout_s)
    key = secrets.token_bytes(32)
    rendezvous = Rendezvous(store, plan.world_size, key=key)
    rendezvous.send_plan(plan, settings)
    # Variables that torch reads when it is imported need processes that import it anew.
    context: Any = multiprocessing.get_context("spawn" if environment else "forkserver")
    if not environment:
        context.set_forkserver_preload(["crossrank.replay.run.processes"])
        _start_fork_server()
    processes: list[BaseProcess] = []
    for rank in range(plan.world_size):
        arguments = (rank, plan.world_size, store.port, key, settings.timeout_s)
        processes.append(context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True))
    try:
        with _variables(environment or {}):
            for process in processes:
                process.start()
        return _results(rendezvous, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join(_GRACE_S)  # the fork server, which tells of its end, may be gone itself


def _start_fork_server() -> None:
    """Start it with SIGINT ignored: Ctrl-C while it imports torch would print a traceback. This process ends all."""
    if threading.current_thread() is not threading.main_thread():
        return  # where signals cannot be set; it starts with the first process
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment for processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _results(rendezvous: Rendezvous, processes: list[BaseProcess]) -> list[RankResult]:
    """Wait for all; where a process ends before it has its result, collect where every rank is, and raise."""
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
            raise Failed(_last_states(rendezvous, [process.exitcode for process in processes]))


def _rank(rank: int, world_size: int, port: int, key: bytes, timeout_s: float) -> None:
    """Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends all
    threading.Thread(target=_end_with_parent, name="crossrank-parent", daemon=True).start()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    timeout = timedelta(seconds=timeout_s)
    stores = (TCPStore("127.0.0.1", port, is_master=False, timeout=timeout) for _ in range(2))
    first, second = (Rendezvous(store, world_size, key=key) for store in stores)
    code, _ = run_rank(rank, rank, first, second)
    leave(code)


def _end_with_parent() -> None:
    parent = cast("BaseProcess", multiprocessing.parent_process())
    wait([parent.sentinel])
    os._exit(1)


def _rendezvous(place: RankInfo, store: Store, turn: int) -> Rendezvous:
    return Rendezvous(store, place.world_size, turn, key=place.key)


class Lead:
    """Rank 0."""

    def __init__(self, place: RankInfo, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._turn = 0

    def run(self, plan: Plan, settings: Settings) -> list[RankResult]:
        """Send `plan` out, do this rank's part, and gather the results. Raises `Failed` where a rank failed."""
        rendezvous = self._meet()
        rendezvous.send_plan(plan, settings)
        second = _rendezvous(self.place, connect(self.place, self._timeout_s), self._turn)

        def final_report() -> None:
            states = _last_states(second)
            print(f"crossrank: the replay did not come to its end: {Failed(states).summary()}", file=sys.stderr)
            print_states(states, plan)
            sys.stdout.flush()

        with term_to_pipe() as term:
            code, result = run_rank(0, self.place.local_rank, rendezvous, second, final_report, term=term, leads=True)
            if code or result is None:
                time.sleep(_ANSWER_S)
                raise Failed(_last_states(second))
        results = rendezvous.results()
        self._turn += 1
        rendezvous.store.set(FINISHED, "1")
        return results

    def machines(self) -> list[Machine]:
        """Where each rank runs; waits for all. Raises `CrossrankError` where one does not come."""
        rendezvous = self._meet()
        rendezvous.tell_machine(self.place.rank)
        return rendezvous.machines(self._timeout_s)

    def refuse(self) -> None:
        """Let the other ranks go, which wait for a plan that does not come."""
        try:
            self._meet(_REFUSAL_S).abort()
            self._wait_for_others(_LAST_TO_COME_S)
        except (CrossrankError, RuntimeError):
            return  # nobody can be waiting

    def end(self) -> None:
        """Let the other ranks go: all is done."""
        if self._store is not None:
            self._meet().send_end()
            self._wait_for_others(_LAST_TO_LEAVE_S)

    def _meet(self, patience_s: float | None = None) -> Rendezvous:
        """The store, which this process begins to host where it does not yet, at the turn that it has come to."""
        self._store = self._store or host_store(self.place, patience_s or self._timeout_s)
        return _rendezvous(self.place, self._store, self._turn)

    def _wait_for_others(self, most_s: float) -> None:
        """The store goes with this process: leave when the others need it no more."""
        deadline = time.monotonic() + most_s
        while self._store and time.monotonic() < deadline and self._store.add("left", 0) < self.place.world_size - 1:
            time.sleep(0.01)
        if self.place.file:
            Path(self.place.file).unlink(missing_ok=True)


def serve(place: RankInfo, timeout_s: float) -> int:
    """Any other rank: replays what rank 0 sends until that has no more; returns the exit code."""
    store = host_store(place, timeout_s)
    _rendezvous(place, store, 0).tell_machine(place.rank)
    turn = 0
    while True:
        rendezvous = _rendezvous(place, store, turn)
        second = _rendezvous(place, connect(place, timeout_s), turn)
        try:
            with term_to_pipe() as term:
                code, result = run_rank(place.rank, place.local_rank, rendezvous, second, term=term)
        except NoPlanError:
            store.add("left", 1)
            time.sleep(_REFUSAL_S)  # rank 0 reports why, and goes first
            return 2
        if code:
            leave(code)
        if result is None:
            store.add("left", 1)
            return 0
        turn += 1


@contextmanager
def term_to_pipe() -> Iterator[int]:
    """SIGTERM, by which launchers end the ranks beside one that died, as bytes in a pipe: the watch reads them and
    tells where the rank is, while the main thread may stand in a collective."""
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


def _last_states(rendezvous: Rendezvous, exit_codes: Sequence[int | None] = ()) -> dict[int, State]:
    """Where every rank is, some time after all were asked to end. One that has not answered has died; of processes that
    were started here the exit code says how."""
    try:
        states = rendezvous.states()
    except RuntimeError:  # the store is gone with its host
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
