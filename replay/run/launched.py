"""A replay whose processes a launcher started: rank 0 plans and leads, the others do what it sends them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import Plan
from crossrank.replay.results.measure import RankResult
from crossrank.replay.run.failure_report import Failed, State, print_states
from crossrank.replay.run.launcher import RankInfo
from crossrank.replay.run.rendezvous import FINISHED, RefusedError, Rendezvous, connect, host_store
from crossrank.replay.run.worker import leave, run_rank
from crossrank.tools.traces.replayed import Settings

_REFUSAL_S = 2.0
"""How long rank 0 stays reachable when it has nothing to replay."""
_ANSWER_S = 0.3
"""Within this time a rank that is alive has seen that all have to end, and said where it is. Open MPI kills
all a second after one has died."""


class Lead:
    """Rank 0."""

    def __init__(self, place: RankInfo, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._turn = 0

    def run(self, plan: Plan, settings: Settings) -> list[RankResult]:
        """Send `plan` out, do this rank's part, and gather the results. Raises `Failed` where a rank failed."""
        if self._store is None:
            self._store = host_store(self.place, self._timeout_s)
        rendezvous = Rendezvous(self._store, plan.world_size, self._turn)
        rendezvous.send_plan(plan, settings)
        second = Rendezvous(connect(self.place, self._timeout_s), plan.world_size, self._turn)

        def final_report() -> None:
            states = gather_states(second)
            print(f"crossrank: the replay did not come to its end: {Failed(states).summary()}", file=sys.stderr)
            print_states(states, plan)
            sys.stdout.flush()

        with term_to_pipe() as term:
            code, result = run_rank(0, self.place.local_rank, rendezvous, second, final_report, term=term, leads=True)
            if code or result is None:
                time.sleep(_ANSWER_S)
                raise Failed(gather_states(second))
        results = rendezvous.results()
        self._turn += 1
        rendezvous.store.set(FINISHED, "1")
        return results

    def refuse(self) -> None:
        """Let the other ranks go, which wait for a plan that does not come."""
        try:
            store = self._store or host_store(self.place, _REFUSAL_S)
            Rendezvous(store, self.place.world_size, self._turn).abort()
        except (CrossrankError, RuntimeError):
            return  # nobody can be waiting
        time.sleep(_REFUSAL_S / 2)

    def end(self) -> None:
        """Let the other ranks go: all is done."""
        if self._store is not None:
            Rendezvous(self._store, self.place.world_size, self._turn).send_end()
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and self._store.add("left", 0) < self.place.world_size - 1:
                time.sleep(0.01)  # the store goes with this process


def serve(place: RankInfo, timeout_s: float) -> int:
    """Any other rank: replays what rank 0 sends until that has no more; returns the exit code."""
    store = host_store(place, timeout_s)
    turn = 0
    while True:
        rendezvous = Rendezvous(store, place.world_size, turn)
        second = Rendezvous(connect(place, timeout_s), place.world_size, turn)
        try:
            with term_to_pipe() as term:
                code, result = run_rank(place.rank, place.local_rank, rendezvous, second, term=term)
        except RefusedError:
            time.sleep(_REFUSAL_S)  # rank 0 tells why, and goes first
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


def gather_states(rendezvous: Rendezvous) -> dict[int, State]:
    """Where every rank is, some time after all were told to end. One that has not answered has died."""
    try:
        states = rendezvous.states()
    except RuntimeError:  # the store is gone with its host
        states = {}
    for rank in range(rendezvous.world_size):
        state = states.setdefault(rank, State(phase="never seen", error="did not come to the rendezvous"))
        if not state.error and not state.asked_to_end:
            state.error = "lost contact: it died, or makes no progress"
    return states
