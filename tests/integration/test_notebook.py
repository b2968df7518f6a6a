"""The notebook of the examples runs from top to bottom, on a recording that it was not made for."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECORDING", str(ROOT / "tests" / "fuzz" / "seeds" / "recording"))
    notebook = nbformat.read(  # type: ignore[no-untyped-call]
        ROOT / "examples" / "notebook.ipynb", as_version=4
    )
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code" and cell["source"] != ""]
    assert all(len(shown) == 1 and shown[0]["output_type"] != "error" for shown in outputs)
    kinds = [kind for shown in outputs for kind in shown[0]["data"]]
    assert kinds.count("application/vnd.plotly.v1+json") == 2
    assert outputs[-2][0]["data"]["text/plain"] == "'ok'"
