"""A torch that lacks one of the private names that the recorder uses costs the part that needs it, and no more."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import crossrank
from crossrank.instrument import torch_private
from crossrank.instrument.torch_private import PARTS
from tests.integration.traces import records_of
from tests.integration.world import World

# torch itself cannot do without these: the recorder is made to believe that they are missing.
NEEDED_BY_TORCH = (
    "torch.distributed.distributed_c10d:",
    "torch.autograd:_enable_profiler",
    "torch.autograd:_disable_profiler",
    "torch.autograd:Variable.",
    "torch.autograd.profiler:_run_on_profiler_stop",
)
CASES = [(part, name) for part in PARTS for name in PARTS[part].names]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _without(name: str) -> Any:
    """A context in which torch has no `name`."""
    if name.startswith(NEEDED_BY_TORCH):
        exists = torch_private._exists
        return mock.patch.object(torch_private, "_exists", lambda asked: asked != name and exists(asked))
    module, _, path = name.partition(":")
    owner: Any = __import__(module, fromlist=["_"])
    *outer, last = path.split(".")
    for attribute in outer:
        owner = getattr(owner, attribute)
    patch = pytest.MonkeyPatch()
    context = patch.context()

    class Without:
        def __enter__(self) -> None:
            context.__enter__().delattr(owner, last)

        def __exit__(self, *_: object) -> None:
            context.__exit__(None, None, None)

    return Without()


def _train_without(rank: int, directory: str) -> dict[str, tuple[list[str], bool, float]]:
    """For every name: what was said, whether the window was entered, and what training came to."""
    logger, found = logging.getLogger("crossrank"), {}
    for number, (_, name) in enumerate(CASES):
        lines = _Lines()
        logger.addHandler(lines)
        torch_private.has.cache_clear()
        try:
            with _without(name):
                tensor, entered = torch.ones(4), False
                with crossrank.enable(tracing="ALL", directory=f"{directory}/{number}") as tracing:
                    with crossrank.window():
                        entered = True
                        dist.all_reduce(tensor)
                        dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
                    active = tracing.active
                assert entered
        finally:
            torch_private.has.cache_clear()
            logger.removeHandler(lines)
        found[name] = (lines.lines, active, tensor.sum().item())
    return found


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder that has a recording for each case, and what the ranks say."""
    folder = tmp_path_factory.mktemp("cases")
    return folder, world.run(_train_without, folder, str(folder), record=False)


@pytest.mark.timeout(240)
def test_a_missing_name_disables_one_part_with_one_line(trained: tuple[Path, list[Any]]) -> None:
    directory, ranks = trained
    for number, (part, name) in enumerate(CASES):
        path = name.replace(":", ".")
        said = [line for found in ranks for line in found[name][0]]
        active = [found[name][1] for found in ranks]
        assert [found[name][2] for found in ranks] == [8.0, 8.0], name
        if part == "interception":
            assert active == [False, False]
            assert all(line.startswith("crossrank: tracing is off: torch ") for line in said)
            assert [f"has no {path}, which recording needs" in line for line in said] == [True, True]
            continue
        assert active == [True, True], name
        assert len(records_of(directory / str(number), 0)) == 2, name
        # Some are asked for only where a tensor is a subclass, no recorder is there, calls are timed, or the kernel is
        # Python's.
        if said:
            line = f"crossrank: torch {torch.__version__} has no {path}: {PARTS[part].lost}"
            assert said == [line] * (2 if part == "store" else 1), name  # without a store no rank can be asked
        else:
            assert part in ("tensor subclasses", "flight recorder", "timing", "waits of backward passes"), name


def test_a_window_writes_no_file_of_a_missing_trace_part(trained: tuple[Path, list[Any]]) -> None:
    directory, _ = trained
    kinds = {"execution trace": "et", "Kineto": "kineto"}
    for number, (part, name) in enumerate(CASES):
        if part != "interception":
            names = {path.name for path in (directory / str(number)).iterdir()}
            for lost, kind in kinds.items():
                assert (f"rank-0.{kind}.json.zst" in names) == (lost != part), name


def _private_chains(tree: ast.Module) -> set[str]:
    """Attributes with a leading underscore that are taken of something of torch's, as `owner._name`."""
    owners = ("torch", "dist", "distributed_c10d", "autograd_profiler", "group_class", "Variable")
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            if text.split(".")[0] in owners:
                found.add(text)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")}
    return found


def test_the_table_has_every_private_name_in_use() -> None:
    known = {word for part in PARTS.values() for name in part.names for word in name.rpartition(":")[2].split(".")}
    folder = Path(torch_private.__file__).resolve().parent
    used = {
        (path.name, chain) for path in folder.rglob("*.py") for chain in _private_chains(ast.parse(path.read_text()))
    }
    modules = {"_C", "_distributed_c10d", "_profiler"}
    assert len(used) > 20
    assert [one for one in sorted(used) if one[1].split(".")[-1] not in known | modules] == []


def test_the_recorder_import_uses_no_private_torch_names() -> None:
    folder = Path(torch_private.__file__).resolve().parent
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert _private_chains(ast.Module(outside, [])) == set(), path.name
