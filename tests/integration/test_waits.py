"""Waits: which call the host waited for, when, on which thread, and in what; on real gloo."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from crossrank.instrument import api
from crossrank.recording import Wait
from tests.integration import callers
from tests.integration.jobs import Scripts
from tests.integration.traces import Recorded
from tests.integration.world import TwoRanks

MS = 1_000_000
LATE = 0.2  # s by which rank 1 comes later
PASSES = 3  # On a busy machine the other rank may be late in some of them.


def waited_in(comms: Recorded, where: str) -> list[Wait]:
    return [wait for wait in comms.waits if wait.waited_in == where]


def _twice(rank: int, wait: Callable[[int], None]) -> None:
    """What is imported at the first call makes its rank late; at the second one rank 1 alone is."""
    store = _get_default_store()
    for turn in ("first", "second"):
        if rank == 0:
            store.set(turn, "")
        else:
            store.wait([turn])
            time.sleep(LATE)
        wait(rank)


def _functional(rank: int) -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", [0, 1]))


def _functional_of_several(rank: int) -> None:
    for part in functional.all_reduce_coalesced([torch.ones(4), torch.ones(2)], "sum", [0, 1]):
        functional.wait_tensor(part)


def _monitored(rank: int) -> None:
    dist.monitored_barrier()


def _coalesced(rank: int) -> None:
    with dist._coalescing_manager(async_ops=True) as batch:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(2))
    batch.wait()


def _point_to_point(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(2), 1)
    else:
        dist.send(torch.ones(2), 0)


def _batched(rank: int) -> None:
    operation = dist.irecv if rank == 0 else dist.isend
    for work in dist.batch_isend_irecv([dist.P2POp(operation, torch.ones(2), 1 - rank)]):
        work.wait()


@pytest.mark.parametrize(
    ("wait", "where"),
    [
        (callers.all_reduce, "wait"),
        (callers.asynchronous, "wait"),
        (_functional, "wait_tensor"),
        (_functional_of_several, "wait_tensor"),
        (_coalesced, "wait"),
        (_monitored, "launch"),
        (_point_to_point, "wait"),
        (_batched, "wait"),
    ],
)
def test_an_early_rank_waits_as_long_as_the_other_rank_is_late(
    wait: Callable[[int], None], where: str, two_ranks: TwoRanks
) -> None:
    two_ranks.run(_twice, wait)
    early, late = two_ranks.recorded(0), two_ranks.recorded(1)
    (_, record), (_, other) = early.calls, late.calls
    first = next(one for one in waited_in(early, where) if one.id == record.id)
    assert not first.raised
    assert record.t <= first.t
    assert LATE * 0.5e9 < first.took < 60e9
    assert {one.thread for one in early.waits} == {record.thread}
    assert {one.id for one in late.waits} == {0, other.id}


def _limited(rank: int) -> None:
    """Rank 1 looks at the current waits of rank 0, which has no timeout in its first wait and one in its second."""
    store, session = _get_default_store(), api._current
    assert session is not None
    for turn, limits in (("none", ()), ("some", (timedelta(seconds=100),)), ("zero", (timedelta(0),))):
        if rank == 1:
            store.wait([turn])
            dist.all_reduce(torch.ones(4))
            continue
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        waiter = threading.Thread(target=work.wait, args=limits)
        waiter.start()
        while not (waits := session.recorder.waits_under_way()):
            time.sleep(0.01)
        store.set(turn, "")
        waiter.join()
        assert [(wait.thread, wait.limited) for wait in waits] == [(waiter.native_id, turn == "some")]


def test_a_current_wait_says_whether_the_script_gave_it_a_timeout(two_ranks: TwoRanks) -> None:
    two_ranks.run(_limited)


def _backward(rank: int) -> None:
    """Rank 0 waits in DDP's reducer, in C++, at the end of its backward pass."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    model(torch.ones(2, 64)).sum().backward()  # the first pass makes the buckets anew
    loss = model(torch.ones(2, 64)).sum()
    if rank == 1:
        time.sleep(LATE)
    loss.backward()


def test_the_end_of_a_backward_pass_waits_for_its_calls_from_cpp(two_ranks: TwoRanks) -> None:
    two_ranks.run(_backward)
    early, late = two_ranks.recorded(0), two_ranks.recorded(1)
    in_backward, theirs = waited_in(early, "backward"), waited_in(late, "backward")
    of_second_pass = [one for one in early.calls if one.api is None][-3:]
    assert [one.id for one in in_backward][-1] == of_second_pass[-1].id
    assert LATE * 0.5e9 < in_backward[-1].took < 60e9
    assert in_backward[-1].t >= of_second_pass[-1].t
    assert len(theirs) == len(in_backward) == 2
    assert theirs[-1].took < LATE * 0.5e9


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: object, given: torch.Tensor) -> torch.Tensor:
        return given * 1

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE)
        return gradient


def _assert_short_waits(two_ranks: TwoRanks) -> None:
    """Each backward pass waits once on each rank, without the time in which `_Slow` computed."""
    for rank in (0, 1):
        waits = waited_in(two_ranks.recorded(rank), "backward")
        assert len(waits) == PASSES
        assert min(wait.took for wait in waits) < LATE * 0.75e9


def _computes_after_the_last_bucket(rank: int) -> None:
    """DDP is around a part of the model alone; the rest computes its gradients afterwards."""
    body, head = nn.Linear(8, 8), DistributedDataParallel(nn.Linear(8, 8))
    slow: Callable[[torch.Tensor], torch.Tensor] = _Slow.apply
    for _ in range(PASSES):
        head(slow(body(torch.ones(2, 8)))).sum().backward()


def test_computation_after_the_last_backward_call_is_not_a_wait(two_ranks: TwoRanks) -> None:
    two_ranks.run(_computes_after_the_last_bucket)
    _assert_short_waits(two_ranks)


def _checkpointed(rank: int) -> None:
    """A reentrant checkpoint runs a backward pass of its own within the one that the script starts."""
    slow: Callable[[torch.Tensor], torch.Tensor] = _Slow.apply
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                part = functools.partial(lambda layer, one: slow(layer(one)), layer)
                given = checkpoint(part, given, use_reentrant=True)
            return given

    given = torch.ones(2, 8, requires_grad=True)
    model = DistributedDataParallel(Model())
    for _ in range(PASSES):
        model(given).sum().backward()


def test_nested_backward_passes_exclude_computation_from_waits(two_ranks: TwoRanks) -> None:
    two_ranks.run(_checkpointed)
    _assert_short_waits(two_ranks)


def _compiled_steps(rank: int) -> None:
    model = nn.Linear(4, 4)

    def step(given: torch.Tensor) -> None:
        model(given).sum().backward()

    compiled = torch.compile(step, backend="eager")
    compiled(torch.ones(2, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            compiled(torch.ones(2, 4))


def test_a_compiled_step_with_backward_is_not_recompiled(two_ranks: TwoRanks) -> None:
    two_ranks.run(_compiled_steps)


def _tensor_parallel_backward(rank: int) -> None:
    """A call that Python makes early in a backward pass, and computation after it."""

    given = torch.ones(4, requires_grad=True)
    middle = given * 2
    middle.register_hook(lambda gradient: functional.wait_tensor(functional.all_reduce(gradient, "sum", [0, 1])))
    middle.sum().backward()


def test_a_backward_end_does_not_wait_for_calls_from_python(two_ranks: TwoRanks) -> None:
    two_ranks.run(_tensor_parallel_backward)
    assert {one.waited_in for one in two_ranks.recorded().waits} - {"launch"} == {"wait_tensor"}


def _on_threads(rank: int) -> tuple[int, int]:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    waiter: list[int] = []

    def wait() -> None:
        waiter.append(threading.get_native_id())
        assert work.wait(timeout=timedelta(seconds=60))
        assert work.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    return threading.get_native_id(), waiter[0]


def test_a_call_and_its_waits_have_their_thread_ids(two_ranks: TwoRanks) -> None:
    threads = two_ranks.run(_on_threads)
    for rank in (0, 1):
        comms = two_ranks.recorded(rank)
        (record,) = comms.calls
        assert record.thread == threads[rank][0]
        of_work = [(one.id, one.thread) for one in waited_in(comms, "wait")]
        assert of_work == [(record.id, threads[rank][1])] * 2


def _many(rank: int) -> None:
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(300)]
    for work in reversed(works):
        work.wait()


def test_waits_match_many_concurrent_works(two_ranks: TwoRanks) -> None:
    two_ranks.run(_many)
    comms = two_ranks.recorded()
    # On a busy machine a launch takes over 1 ms.
    assert [one.id for one in comms.waits if one.waited_in != "launch"] == comms.ids[::-1]


def test_a_failed_wait_is_recorded_and_raises_its_error(scripts: Scripts) -> None:
    result = scripts.ranks("""
        from datetime import timedelta
        import torch, torch.distributed as dist
        import crossrank
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        crossrank.enable()
        if dist.get_rank() == 0:
            try:
                dist.irecv(torch.ones(1), 1).wait(timeout=timedelta(milliseconds=100))
            except RuntimeError as error:
                print(error)
            store.set("it has timed out", "")
        else:
            store.wait(["it has timed out"])
        crossrank.disable()
        """)
    assert "Timed out waiting 100ms" in result.stdout, result.stderr
    comms = scripts.recorded()
    (wait,) = waited_in(comms, "wait")
    assert ([wait.id], wait.raised) == (comms.ids, True)
    assert 80 * MS < wait.took < 20_000 * MS


def test_a_wait_for_an_unrecorded_work_has_no_call(scripts: Scripts) -> None:
    scripts.python("""
        early = dist.all_reduce(torch.ones(1), async_op=True)
        wait = dist.Work.wait
        crossrank.enable()
        early.wait()
        assert dist.Work.wait is not wait
        crossrank.disable()
        assert vars(dist.Work)["wait"].__class__.__name__ == "instancemethod", vars(dist.Work)["wait"]
        early.wait()
        """)
    comms = scripts.recorded()
    assert comms.calls == []
    assert [(wait.id, wait.waited_in) for wait in comms.waits] == [(None, "wait")]
    assert (comms.end["spans"], comms.end["spans_dropped"]) == (1, 0)


def test_a_wait_that_another_library_has_replaced_stays_replaced(scripts: Scripts) -> None:
    result = scripts.python("""
        crossrank.enable()
        ours = dist.Work.wait
        counted = []
        def theirs(work, *args, **kwargs):
            counted.append(work)
            return ours(work, *args, **kwargs)
        dist.Work.wait = theirs
        dist.all_reduce(torch.ones(1))
        crossrank.disable()
        assert dist.Work.wait is theirs
        dist.all_reduce(torch.ones(1))
        crossrank.enable()
        dist.all_reduce(torch.ones(1))
        print(len(counted))
        """)
    assert result.stdout == "3\n"
    assert "waits are not recorded: <function theirs" in result.stderr


def _ring_of_two(rank: int) -> None:
    for _ in range(200):
        dist.all_reduce(torch.ones(1))


def test_waits_dropped_by_a_full_ring_are_counted(two_ranks: TwoRanks) -> None:
    two_ranks.run(_ring_of_two, ring=2)
    file = two_ranks.recorded()
    assert file.end["spans_dropped"] > 0
    assert file.end["spans"] == len(file.waits)
    assert file.end["spans"] + file.end["spans_dropped"] >= 200
