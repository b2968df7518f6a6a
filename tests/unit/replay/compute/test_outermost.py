"""Which nodes of a trace run again."""

from __future__ import annotations

import msgspec

from crossrank.comm import CommRecord
from crossrank.replay.plan.compute.outermost import _find_tensors, outermost
from crossrank.tools.graph.linking.linked_trace import Activity, Communication
from crossrank.tools.traces.execution_trace import IO, HostOp

ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"


def op(number: int, name: str, caller: int = 0, schema: str = "", tid: int = 1, took: int = 10) -> HostOp:
    attributes = msgspec.Raw(msgspec.json.encode([{"name": "op_schema", "type": "string", "value": schema}]))
    return HostOp(number, name, caller, number, tid, attributes=attributes, start_ns=100 * number, duration_ns=took)


def call(number: int, host: int) -> Communication:
    record = CommRecord(id=number, op="all_reduce", c10d="allreduce_", pg="0", bytes=4, t=0)
    return Communication(record=record, origin="comms file", host=host)


def kernel(host: int) -> Activity:
    return Activity(99, "triton_fused", "kernel", 0, 7, 0, 50, None, host, None, msgspec.Raw(b"{}"))


def found(host: list[HostOp], calls: list[Communication], kernels: list[Activity]) -> list[tuple[str, int]]:
    window = outermost(host, calls, kernels, lambda one: (IO(), IO()))
    return [(one.op.name, one.call) for one in window.found]


def test_operations_run_whole_and_calls_run_separately() -> None:
    host = [
        op(1, "Optimizer.step"),
        op(2, "aten::add_", 1, ADD),
        op(3, "aten::inner", 2, ADD),
        op(4, "functional::all_reduce", 1, ADD),
        op(5, "aten::clone", 4, ADD),
        op(6, "c10d::allreduce_", 4, ADD),
        op(7, "crossrank#8", 6),
    ]
    assert found(host, [call(8, 7)], []) == [("aten::add_", -1), ("aten::clone", -1), ("c10d::allreduce_", 8)]


def test_operations_in_a_user_range_that_launches_kernels_still_run() -> None:
    host = [op(1, "ProfilerStep#3"), op(2, "aten::add_", 1, ADD), op(3, "c10d::allreduce_", 1, ADD)]
    assert found(host, [call(8, 3)], [kernel(1)]) == [
        ("ProfilerStep#3", -1),
        ("aten::add_", -1),
        ("c10d::allreduce_", 8),
    ]


def test_operations_on_backend_threads_belong_to_the_call() -> None:
    work = op(2, "gloo:all_gather", tid=1, took=1000)
    work.is_work = True
    host = [op(1, "aten::add_", 0, ADD), work, op(3, "aten::copy_", 0, ADD, tid=2), op(4, "aten::mul_", 0, ADD)]
    assert found(host, [], []) == [("aten::add_", -1), ("aten::mul_", -1)]


def test_the_operation_inside_a_subclass_runs_instead_of_the_outer_one() -> None:
    host = [op(1, "aten::add_", 0, ADD), op(2, "PythonSubclass", 1), op(3, "aten::mul_", 2, ADD)]
    assert found(host, [], []) == [("aten::mul_", -1)]


def test_tensors_are_found_in_arguments_and_nested_lists() -> None:
    one, two, three = ([number, 10 * number, 0, 4, 4, "cpu"] for number in (1, 2, 3))
    values = [one, [two, [three]], [], 7]
    types = [
        "Tensor(float)",
        "GenericList[Tensor(float),GenericList[Tensor(float)]]",
        "GenericList[Tensor(float)]",
        "Int",
    ]
    assert list(_find_tensors(IO(values=values, types=types))) == [(1, 10), (2, 20), (3, 30)]
