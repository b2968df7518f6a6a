"""Operations that run again compute what the program computed, on tensors that alias as its tensors did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.compute_plan import ComputeOperation, ComputePlan, Slot, coverage_of
from crossrank.replay.run.allowed_operations import MISSING, find_operations
from crossrank.replay.run.compute_program import ComputeProgram
from tests.unit.replay.compute.windows import CPU, compute_of, program_of, slot_of


def tried(plan: ComputePlan) -> ComputeProgram:
    program = program_of(plan)
    program.run_pass(trial=True)
    return program


def run_twice(plan: ComputePlan) -> None:
    """Nothing fails, neither in the trial nor after it."""
    program = program_of(plan)
    for trial in (True, False):
        program.run_pass(trial=trial)
        assert program.failed == {}


def test_a_training_step_from_the_same_values_ends_in_the_same_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedding, norm = nn.Embedding(50, 16), nn.LayerNorm(16)
    layer, head = nn.Linear(16, 24, bias=False), nn.Linear(24, 50)
    modules = nn.ModuleList([embedding, norm, layer, head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, foreach=False)
    words = torch.randint(0, 50, (3, 7))
    before = [one.detach().clone() for one in modules.parameters()]

    def step() -> None:
        # Three dimensions: matmul chooses another product where no gradient is wanted.
        hidden = torch.relu(layer(norm(embedding(words)).transpose(0, 1)))
        functional.cross_entropy(head(hidden).transpose(0, 1).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

    plan = compute_of(step, tmp_path)
    program = tried(plan)
    assert program.failed == {}
    assert "aten::layer_norm" not in {one.name for one in plan.operations}  # what is inside it gave is used later
    norm_op = next(one for one in plan.operations if one.name == "aten::native_layer_norm")
    slots = {
        "embedding": slot_of(plan, 50, 16),
        "scale": norm_op.arguments[2]["slot"],
        "shift": norm_op.arguments[3]["slot"],
        "layer": slot_of(plan, 24, 16),
        "head": slot_of(plan, 50, 24),
        "bias": slot_of(plan, 50),
    }
    for slot, value in zip(slots.values(), before, strict=True):
        program.slots[slot].copy_(value)
    program.slots[slot_of(plan, 3, 7)].copy_(words)
    program.run_pass()
    for slot, parameter in zip(slots.values(), modules.parameters(), strict=True):
        torch.testing.assert_close(program.slots[slot], parameter.detach())


def test_views_and_in_place_operations_change_their_base_tensor(tmp_path: Path) -> None:
    x = torch.zeros(4, 6)

    def function() -> None:
        x.view(-1)[6:12].add_(1.0)
        x.t()[0].add_(1.0)
        x.add_(x.sum())

    plan = compute_of(function, tmp_path)
    program = tried(plan)
    program.slots[slot_of(plan, 4, 6)].zero_()
    program.run_pass()
    assert torch.equal(program.slots[slot_of(plan, 4, 6)], x)
    assert x[:2, :2].tolist() == [[11.0, 10.0], [12.0, 11.0]]


def test_results_are_freed_after_their_last_use(tmp_path: Path) -> None:
    x = torch.ones(1000)

    def function() -> None:
        torch.add(torch.mul(x, 2.0), 1.0).sum()

    plan = compute_of(function, tmp_path)
    program = tried(plan)
    program.run_pass()
    alive = [number for number, slot in enumerate(plan.slots) if slot.block < 0 and program.slots[number] is not None]
    assert alive == []
    assert plan.bytes == 4000 + 2 * 8 + 2 * 4000  # what was there, and two results at a time


def test_a_result_with_data_dependent_shape_is_empty_with_the_recorded_shape(tmp_path: Path) -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 1.0])

    def function() -> None:
        torch.nonzero(x).float().mul_(2.0)

    plan = compute_of(function, tmp_path)
    program = program_of(plan)
    program.run_pass(trial=True)  # its own numbers are all above zero
    (failed,) = program.failed
    assert plan.operations[failed].name == "aten::nonzero"
    assert program.failed[failed] == "its result depends on its data and has another shape"
    program.run_pass()
    computed = program.result([0] * 2 * len(plan.operations))
    ((name, reason, _),) = computed.failed
    assert name == "aten::nonzero"
    coverage = coverage_of([plan], computed.failed)
    assert coverage.operations == coverage.recorded_operations - 1
    assert not coverage.complete
    assert [(row.name, row.reason, row.operations) for row in coverage.left_out] == [(name, reason, 1)]


def test_generated_indices_stay_within_the_table(tmp_path: Path) -> None:
    table, rows = torch.randn(5, 3), torch.tensor([[4, 0], [1, 2]])

    def function() -> None:
        functional.embedding(rows.clone().view(-1), table)
        table.index_select(0, rows.view(-1))

    plan = compute_of(function, tmp_path)
    for indices in ("uniform", "zipf"):
        program = ComputeProgram(plan, CPU, indices=indices, seed=3)
        made = program.slots[slot_of(plan, 2, 2)]
        assert 0 <= int(made.min()) <= int(made.max()) <= 4


def test_indices_computed_from_unknown_values_stay_within_the_table(tmp_path: Path) -> None:
    """Of a part of a vocabulary, as tensor-parallel embeddings look it up: `tokens - first` is recorded with a tensor
    of which nobody knows the value."""
    first, table = 64, torch.randn(8, 3, requires_grad=True)

    def function() -> None:
        tokens = torch.randint(0, 128, (100,))
        elsewhere = (tokens < first) | (tokens >= first + 8)
        own = tokens.clone() - first
        own[elsewhere] = 0
        functional.embedding(own, table).sum().backward()
        table.detach()[own, own % 3]

    plan = compute_of(function, tmp_path)
    program = program_of(plan)
    for trial in (True, False, False, False):
        program.run_pass(trial=trial)
    assert program.failed == {}
    beyond = {one.name: [rows for _, rows in one.beyond] for one in plan.operations if one.beyond}
    assert beyond == {"aten::embedding": [8], "aten::embedding_backward": [8], "aten::index": [8, 3]}


def test_indices_from_a_python_list_stay_within_the_table(tmp_path: Path) -> None:
    """A list becomes a tensor, as where data is loaded: the trace has an empty one, and not who fills it."""
    table, rows = torch.randn(500, 3), list(range(400, 500))

    def function() -> None:
        functional.embedding(torch.tensor(rows).clone(), table)

    plan = compute_of(function, tmp_path)
    ((slot, high),) = [filled for one in plan.operations for filled in one.filled]
    assert (plan.slots[slot].shape, high) == ([100], 499)
    run_twice(plan)


def test_integers_not_used_as_indices_are_1_and_unused_integers_are_not_filled(tmp_path: Path) -> None:
    ids = torch.arange(8)

    def function() -> None:
        torch.empty(5, dtype=torch.int64)
        torch.floor_divide(ids, torch.tensor([4] * 8))

    plan = compute_of(function, tmp_path)
    assert [filled for one in plan.operations for filled in one.filled if filled[1] != -1] == []
    run_twice(plan)


def test_an_operation_failing_after_the_trial_is_reported(tmp_path: Path) -> None:
    table, rows = torch.randn(5, 3), torch.tensor([4, 0])
    plan = compute_of(lambda: functional.embedding(rows, table), tmp_path)
    program = tried(plan)
    program.slots[slot_of(plan, 2)].fill_(9)
    (node,) = [one.node for one in plan.operations if one.name == "aten::embedding"]
    for clock in (None, [0]):
        with pytest.raises(CrossrankError, match=rf"^aten::embedding \(node {node}\): IndexError: index out of range"):
            program.run_pass(clock=clock)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinity_and_nan_are_replayed_unchanged(tmp_path: Path, value: float) -> None:
    x, mask = torch.zeros(3), torch.tensor([True, False, True])

    def function() -> None:
        x.masked_fill_(mask, value)

    plan = compute_of(function, tmp_path)
    program = tried(plan)
    program.slots[next(n for n, one in enumerate(plan.slots) if one.dtype == "bool")].copy_(mask)
    program.run_pass()
    given = program.slots[next(n for n, one in enumerate(plan.slots) if one.dtype == "float32")]
    torch.testing.assert_close(given[mask], torch.full((2,), value), equal_nan=True)


def test_operations_missing_in_torch_are_reported_before_the_replay() -> None:
    known, unknown = find_operations(["aten::relu(Tensor self) -> Tensor", "nobody::has(Tensor x) -> Tensor"])
    assert known.operation is torch.ops.aten.relu.default
    assert (unknown.operation, unknown.reason) == (None, MISSING)
    with pytest.raises(CrossrankError, match=r"--import no\.such\.module: cannot be imported"):
        find_operations([], ["no.such.module"])


def test_text_of_a_trace_never_becomes_code() -> None:
    text = "']; raise SystemExit(3); x = ['"
    operation = ComputeOperation(node=1, name=text, schema=0, arguments=[*[{"slot": 0}] * 2, text], results=[1])
    schemas = ["aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"]
    slots = [Slot(shape=[2], strides=[1], dtype="float32") for _ in range(2)]
    plan = ComputePlan(operations=[operation], schemas=schemas, slots=slots, blocks=[])
    program = program_of(plan)
    program.slots[0] = torch.ones(2)
    program.run_pass(trial=True)
    assert list(program.failed) == [0]
    assert "not run from a file" in program.failed[0]
