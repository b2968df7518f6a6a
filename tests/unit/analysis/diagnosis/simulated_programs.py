"""Healthy programs for simulated jobs, into which tests put faults."""

from __future__ import annotations

from tests.unit.analysis.diagnosis.simulated_jobs import Batch, Call, Collective, Groups, Programs, Recv, Send


def training(world: int = 4, steps: int = 3, *, backend: str = "nccl") -> tuple[Programs, Groups]:
    """Tensor parallelism in pairs of neighbours, data parallelism across the pairs, as each backend records it."""
    shard, full, gradients = (524_288,), (1_048_576,), (4_194_304,)
    pairs = [[rank, rank + 1] for rank in range(0, world, 2)]
    meshes = [("mesh_tp", pair) for pair in pairs]
    meshes += [("mesh_dp", [pair[place] for pair in pairs]) for place in (0, 1)]
    groups: Groups = {"0": ("default_pg", list(range(world)))}
    groups.update({str(number): mesh for number, mesh in enumerate(meshes, start=1)})
    programs: Programs = []
    for rank in range(world):
        tp, dp = str(1 + rank // 2), str(1 + len(pairs) + rank % 2)
        if backend == "gloo":  # a reduce-scatter is an all-reduce there, an all-gather has one row per member
            gather = Collective(tp, "all_gather", (shard,), ((2, *shard),), "BFloat16", line=110)
            scatter = Collective(tp, "all_reduce", (full,), None, "BFloat16", line=120)
        else:
            gather = Collective(tp, "_all_gather_base", (shard,), (full,), "BFloat16", line=110)
            scatter = Collective(tp, "_reduce_scatter_base", (full,), (shard,), "BFloat16", line=120)
        step = [
            gather,
            scatter,
            Collective(dp, inputs=(gradients,), line=130),
            Collective("0", inputs=((1,),), line=140),
        ]
        programs.append([call for _ in range(steps) for call in step])
    return programs, groups


def pipeline(stages: int = 4, steps: int = 3) -> tuple[Programs, Groups]:
    """A pipeline in which the stages in between exchange with both neighbours in one batch, the outer ones with one.

    Each step: one micro-batch forward to fill, two exchanges in both directions, one micro-batch back to drain.
    """
    groups: Groups = {"0": ("default_pg", list(range(stages))), "1": ("mesh_pp", list(range(stages)))}
    size, dtype = (4, 512, 1024), "BFloat16"
    programs: Programs = []
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        from_previous = () if first else (Recv("1", stage - 1, size, dtype, line=210),)
        to_next = () if last else (Send("1", stage + 1, size, dtype, line=211),)
        from_next = () if last else (Recv("1", stage + 1, size, dtype, line=220),)
        to_previous = () if first else (Send("1", stage - 1, size, dtype, line=221),)
        both = (*from_previous, *to_next, *from_next, *to_previous)
        batches = [Batch(ops) for ops in (from_previous, to_next, both, both, from_next, to_previous) if ops]
        step: list[Call] = [*batches, Collective("0", inputs=((1,),), line=240)]
        programs.append(step * steps)
    return programs, groups
