"""Dependencies point down only, and the offline tools start without torch."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.touches("crossrank", "instrument", "tools", "replay", traced=False)

ROOT = Path(__file__).parents[2]
GROUND = "crossrank"
FORBIDDEN = {
    GROUND: ("crossrank.instrument", "crossrank.tools", "crossrank.replay", "torch"),
    "tools": ("crossrank.instrument", "crossrank.replay", "torch"),
    "instrument": ("crossrank.tools", "crossrank.replay"),
    "replay": ("crossrank.instrument",),
}
LAYERS = ("traces", "graph", "job", "analysis", "predict", "output", "sharing", "commands")
"""Folders of `tools`, the lowest first: each stands on those before it."""
# The package resolves enable() and the rest when they are first used, and `python -m crossrank` is the tools' command.
LAZY = {
    ("crossrank/__init__.py", "crossrank.instrument.api"),
    ("crossrank/__init__.py", "crossrank.tools.api"),
    ("crossrank/__main__.py", "crossrank.tools.cli"),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def sources(folder: str) -> list[Path]:
    pattern = "*.py" if folder == GROUND else "**/*.py"
    return sorted((ROOT / folder).glob(pattern))


def test_imports_point_down_only() -> None:
    wrong = []
    for folder, forbidden in FORBIDDEN.items():
        for path in sources(folder):
            name = str(path.relative_to(ROOT))
            for module in imports(path):
                if (name, module) in LAZY:
                    continue
                if any(module == bad or module.startswith(bad + ".") for bad in forbidden):
                    wrong.append(f"{name} imports {module}")
    assert wrong == []
    assert all(sources(folder) for folder in FORBIDDEN)


def test_each_tools_folder_imports_only_folders_below_it() -> None:
    wrong = []
    for place, folder in enumerate(LAYERS):
        above = tuple(f"crossrank.tools.{name}" for name in (*LAYERS[place + 1 :], "api", "cli"))
        for path in sources(f"tools/{folder}"):
            wrong += [f"{path.relative_to(ROOT)} imports {one}" for one in imports(path) if one.startswith(above)]
    assert wrong == []


def modules_that_import(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> those of `modules` that it imports, also for type checkers alone."""
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        wanted = set(imports(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = wanted & modules.keys() - {name}
    return found


def test_recorder_modules_have_no_import_cycles() -> None:
    modules = {
        ".".join(("crossrank", *path.relative_to(ROOT).with_suffix("").parts)): path for path in sources("instrument")
    }
    found = modules_that_import(modules)
    assert any(found.values())
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(found | {"crossrank.instrument.facts": {"crossrank.instrument.session"}}).prepare()
    graphlib.TopologicalSorter(found).prepare()  # raises, with the circle, where there is one


def test_only_the_api_module_imports_the_session() -> None:
    modules = {str(path.relative_to(ROOT)): path for path in sources("instrument")}
    users = {name for name, path in modules.items() if "crossrank.instrument.session" in imports(path)}
    assert users == {"instrument/api.py"}


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for folder in FORBIDDEN:
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_replay_is_planned_without_torch() -> None:
    program = "import sys, crossrank.replay.command, crossrank.replay.plan.build_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


CHANGES = re.compile(
    r"\bsetattr\(|signal\.signal\(|set_wakeup_fd\(|atexit\.register\(|register_at_fork\(|Finalize\(|excepthook = "
    r"|meta_path\.|set_terminate|torch\.library|_dispatch_|register_\w+_hook\("
)
"""How a program changes Python and torch."""


def test_only_hooks_change_torch_and_python() -> None:
    changing = {path.relative_to(ROOT).parts[1] for path in sources("instrument") if CHANGES.search(path.read_text())}
    assert changing == {"hooks", "torch_private.py"}  # which names what others use


def test_only_two_hooks_use_the_dispatcher() -> None:
    users = {path.name for path in sources("instrument/hooks") if "torch.library" in path.read_text()}
    assert users == {"compiled_kernel.py", "dispatcher.py"}


def test_the_tools_start_without_torch() -> None:
    modules = "crossrank.tools.commands.inspect, crossrank.tools.cli, crossrank.tools.api"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_package_links_to_the_real_folders() -> None:
    for folder in ("instrument", "tools", "replay"):
        link = ROOT / "crossrank" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
