"""Plans in which operations are replaced by others of torch, with arguments of their types, and files among them.

`python -m tests.attack.operations --seeds 100` runs as many as one likes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.integration import jobs
from tests.integration.fork_server import start_server

RECORDING = Path(__file__).parents[1] / "fixtures" / "gloo" / "recording"
_CONTENT = "alias ll='ls -l'\n"
_SCHEMAS = 60
"""Other operations that a plan has."""
_SHARE = 0.4
"""Of the operations that a rank runs, those that are replaced."""
_NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 1 << 20, 1 << 40, (1 << 62) - 1)
_WORDS = ("", "mean", "cpu", "sum", "torch", "os", "rb")


@dataclass(frozen=True)
class Outcome:
    """What came of a replay."""

    code: int
    said: str
    outside: dict[str, str]
    """Files outside its folder, and what is in them: what was there before."""

    @property
    def problem(self) -> str:
        """What should not be, empty where all is well."""
        if self.outside != {"profile": _CONTENT}:
            return f"wrote outside its folder: {self.outside}"
        if self.code not in (0, 1, 2) or "Traceback" in self.said or "unexpected error" in self.said:
            return f"ended with {self.code}: {self.said[-2000:]}"
        return ""


def save_plan(folder: Path) -> dict[str, Any]:
    """The plan of a recorded job with its computation."""
    path = folder / "plan.json"
    ended = jobs.fork(
        ["-m", "crossrank", "replay", RECORDING, "--compute", "--dry-run", "--save-plan", path], folder, 60
    )
    assert ended.returncode == 0, ended.stderr
    plan: dict[str, Any] = json.loads(path.read_text())
    return plan


def attack(plan: dict[str, Any], seed: int, folder: Path) -> Outcome:
    """Replay the plan with other operations, in a folder of its own; what they may name lies beside it."""
    outside, inside = folder / "outside", folder / "inside"
    outside.mkdir()
    inside.mkdir()
    victim = outside / "profile"
    victim.write_text(_CONTENT)
    path = inside / "plan.json"
    path.write_text(json.dumps(_with_other_operations(plan, Random(seed), victim)))
    command: list[str | Path] = [
        "-m",
        "crossrank",
        "replay",
        path,
        "--compute",
        "--repeat",
        "1",
        "--warmup",
        "0",
        "--timeout",
        "20",
    ]
    ended = jobs.fork(command, inside, 120, HOME=str(outside))
    left = {str(one.relative_to(outside)): one.read_text() for one in outside.rglob("*") if one.is_file()}
    return Outcome(ended.returncode, ended.stdout + ended.stderr, left)


def _with_other_operations(plan: dict[str, Any], rng: Random, victim: Path) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(plan))
    for rank in changed["ranks"]:
        compute = rank["compute"]
        first = len(compute["schemas"])
        others = rng.sample(_schemas(), _SCHEMAS)
        compute["schemas"] += [str(one) for one in others]
        slots = range(len(compute["slots"]))
        for operation in compute["operations"]:
            if operation.get("schema", -1) < 0 or rng.random() > _SHARE:
                continue
            place = rng.randrange(_SCHEMAS)
            arguments = [_value(str(one.type), rng, slots, victim) for one in others[place].arguments]
            operation.update(name=others[place].name, schema=first + place, arguments=arguments)
    return changed


@functools.cache
def _schemas() -> list[Any]:
    return sorted(torch._C._jit_get_all_schemas(), key=str)


def _value(kind: str, rng: Random, slots: range, victim: Path) -> Any:
    """A value of an argument's type, now and then of another."""
    if rng.random() < 0.05:
        kind = rng.choice(("Tensor", "int", "float", "str", "bool", "Device", "List[int]"))
    if kind.startswith("Optional[") and rng.random() < 0.5:
        return None
    if "List[" in kind:
        inner = kind[kind.index("List[") + 5 :].rstrip("]")
        return [_value(inner, rng, slots, victim) for _ in range(rng.randrange(4))]
    if "Tensor" in kind or kind == "t":
        return {"slot": rng.choice(slots)}
    if "str" in kind:
        return rng.choice((str(victim), str(victim.with_name("new")), *_WORDS))
    if "Device" in kind:
        return {"device": "cpu"}
    if "bool" in kind:
        return rng.random() < 0.5
    if "float" in kind:
        return rng.choice((0.0, 1.0, -1.5, 1e300, {"number": "inf"}, {"number": "nan"}))
    return rng.choice(_NUMBERS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.operations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many plans (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    arguments = parser.parse_args()
    start_server()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = save_plan(Path(folder))
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            own = Path(folder, str(seed))
            own.mkdir()
            outcome = attack(plan, seed, own)
            counts[f"exit code {outcome.code}"] += 1
            if outcome.problem:
                counts["problems"] += 1
                print(f"seed {seed}: {outcome.problem}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return int(bool(counts["problems"]))


if __name__ == "__main__":
    sys.exit(main())
