"""Starts a replay's processes on this machine, and ends them all when one fails: no launcher is needed.

The processes are forked from one that has imported torch already, so that a rank costs milliseconds to start.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

from torch.distributed import TCPStore

from crossrank.replay.plan.plan import Plan
from crossrank.replay.results.measure import RankResult
from crossrank.replay.run.failure_report import Failed, State
from crossrank.replay.run.rendezvous import FINISHED, Rendezvous, listen
from crossrank.tools.traces.replayed import Settings

_REPORT_S = 10.0
_GRACE_S = 3.0
"""How long the other ranks have to report where they are, after one has failed."""


def run_local(plan: Plan, settings: Settings, environment: Mapping[str, str] | None = None) -> list[RankResult]:
    """Run `plan` with one process per rank. `environment` is added to theirs.

    Raises `Failed` with the state of every rank where one of them died, failed or hung.
    """
    store = listen("127.0.0.1", 0, settings.timeout_s)
    rendezvous = Rendezvous(store, plan.world_size)
    rendezvous.send_plan(plan, settings)
    # Variables that torch reads when it is imported need processes that import it anew.
    context: Any = multiprocessing.get_context("spawn" if environment else "forkserver")
    if not environment:
        context.set_forkserver_preload(["crossrank.replay.run.worker"])
        _start_fork_server()
    processes: list[BaseProcess] = []
    for rank in range(plan.world_size):
        arguments = (rank, plan.world_size, store.port, settings.timeout_s)
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
            _fail(rendezvous, processes)


def _fail(rendezvous: Rendezvous, processes: list[BaseProcess]) -> NoReturn:
    """Collect where every rank is, and raise."""
    rendezvous.abort()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        wait([process.sentinel for process in processes if process.is_alive()], timeout=0.1)
    states = rendezvous.states()
    for rank, process in enumerate(processes):
        state = states.setdefault(rank, State(phase="starting"))
        code = process.exitcode
        if state.error:
            continue
        if code is not None and code < 0:
            state.error = f"killed by signal {-code}"
        elif not state.asked_to_end:
            state.error = f"exited with {code}" if code else "made no progress"
    raise Failed(states)


def _rank(rank: int, world_size: int, port: int, timeout_s: float) -> None:
    """Runs in a process of its own."""
    from crossrank.replay.run.worker import leave, run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends all
    threading.Thread(target=_end_with_parent, name="crossrank-parent", daemon=True).start()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    timeout = timedelta(seconds=timeout_s)
    first, second = (TCPStore("127.0.0.1", port, is_master=False, timeout=timeout) for _ in range(2))
    code, _ = run_rank(rank, rank, Rendezvous(first, world_size), Rendezvous(second, world_size))
    leave(code)


def _end_with_parent() -> None:
    parent = cast("BaseProcess", multiprocessing.parent_process())
    wait([parent.sentinel])
    os._exit(1)
