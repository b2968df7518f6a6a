"""A plan for people."""

from __future__ import annotations

from crossrank.replay.plan.memory_plan import bytes_needed
from crossrank.replay.plan.plan import Plan
from crossrank.text import amount, percent, printable

_MOST_PROBLEMS = 5


def print_plan(plan: Plan) -> None:
    """Coverage, notes, and what the plan consists of."""
    coverage = plan.coverage()
    print(
        f"{printable(plan.source)}: {coverage.calls:,} of {coverage.recorded_calls:,} recorded calls "
        f"({percent(coverage.share_of_calls)}) and {amount(coverage.bytes)} of "
        f"{amount(coverage.recorded_bytes, coverage.unsized)} "
        f"({percent(coverage.share_of_bytes)}) are replayed, on {plan.world_size} rank(s) "
        f"and {len(plan.groups)} group(s)"
    )
    changed = [f"{plan.calls:,} calls"] * (plan.calls != coverage.calls)
    changed += [amount(plan.bytes)] * (plan.bytes != coverage.bytes)
    if changed:
        print(f"  changed to {' and '.join(changed)} per pass")
    needed = max(bytes_needed(rank.calls) for rank in plan.ranks)
    print(f"  memory for tensors: up to {amount(needed)} per rank")
    for reason, count in coverage.reasons.items():
        print(f"  left out: {count:,} call(s): {printable(reason)}")
    for problem in plan.damage[:_MOST_PROBLEMS]:
        print(f"  damaged: {printable(problem)}; calls may be missing that nobody counts")
    if len(plan.damage) > _MOST_PROBLEMS:
        print(f"  damaged: and {len(plan.damage) - _MOST_PROBLEMS} more")
    for note in plan.notes:
        print(f"  {printable(note)}")
