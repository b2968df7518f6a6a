"""A replay whose processes a launcher started: rank 0 plans and leads, the others do what it sends them."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from crossrank.replay.launcher import Place
from crossrank.replay.meeting import FINISHED, Meeting, host_store
from crossrank.replay.plan import Plan
from crossrank.replay.results import RankResult
from crossrank.replay.settings import Settings
from crossrank.replay.states import Failed, State, print_states
from crossrank.replay.worker import run_rank

_ANSWER_S = 0.3
"""Within this time a rank that is alive has seen that all have to end, and said where it is. Open MPI kills
all a second after one has died."""


class Lead:
    """Rank 0."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._turn = 0

    def run(self, plan: Plan, settings: Settings) -> list[RankResult]:
        """Send `plan` out, do this rank's part, and gather the results. Raises `Failed` where a rank failed."""
        hold_term()
        if self._store is None:
            self._store = host_store(self.place, self._timeout_s)
        meeting = Meeting(self._store, plan.world_size, self._turn)
        meeting.send_plan(plan, settings)
        second = Meeting(connect(self.place, self._timeout_s), plan.world_size, self._turn)

        def last_words() -> None:
            states = gather_states(second)
            print(f"crossrank: the replay did not come to its end: {Failed(states).summary()}", file=sys.stderr)
            print_states(states, plan)
            sys.stdout.flush()

        code, result = run_rank(0, self.place.local_rank, meeting, second, last_words, under_launcher=True)
        if code or result is None:
            time.sleep(_ANSWER_S)
            raise Failed(gather_states(second))
        results = meeting.results()
        self._turn += 1
        meeting.store.set(FINISHED, "1")
        return results

    def end(self) -> None:
        """Let the other ranks go."""
        if self._store is not None:
            Meeting(self._store, self.place.world_size, self._turn).send_end()
            deadline = time.monotonic() + 5
            gone = PrefixStore("crossrank", self._store)
            while time.monotonic() < deadline and gone.add("left", 0) < self.place.world_size - 1:
                time.sleep(0.01)  # the store goes with this process


def serve(place: Place, timeout_s: float) -> int:
    """Any other rank: replays what rank 0 sends until that has no more; returns the exit code."""
    hold_term()
    store = host_store(place, timeout_s)
    turn = 0
    while True:
        meeting = Meeting(store, place.world_size, turn)
        second = Meeting(connect(place, timeout_s), place.world_size, turn)
        code, result = run_rank(place.rank, place.local_rank, meeting, second, under_launcher=True)
        if result is None:
            if not code:
                PrefixStore("crossrank", store).add("left", 1)
            return code
        turn += 1


def connect(place: Place, timeout_s: float) -> TCPStore:
    """A further connection to the store."""
    return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def hold_term() -> None:
    """Leave SIGTERM, by which launchers end the ranks beside one that died, to the watch: it tells where all are."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def gather_states(meeting: Meeting) -> dict[int, State]:
    """Where every rank is, some time after all were told to end. One that has not answered has died."""
    try:
        states = meeting.states()
    except RuntimeError:  # the store is gone with its host
        states = {}
    for rank in range(meeting.world_size):
        state = states.setdefault(rank, State(phase="never seen", error="did not come to the meeting"))
        if not state.error and not state.told_to_end:
            state.error = "is not heard of any more: it died, or stands still"
    return states
