"""Makes the pictures of the documentation: `python docs/screenshots.py RECORDING`, of what `make demo` recorded.

Needs Chromium, on the PATH or where CHROMIUM says.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from crossrank.tools.cli import main

IMAGES = Path(__file__).parent / "images"
SECTIONS = {"report": ("communicates", "traffic"), "waiting": ("waiting",), "overlap": ("overlap",)}
"""Picture -> sections of the report, from the top of the first to the end of the last."""
_WIDTH, _HEIGHT = 1280, 4000
_DRAWN = "document.querySelectorAll('.main-svg').length > 0"


def take(recording: str) -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = Path(folder, "report.html")
        main(["report", recording, "-o", str(page_file)])
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(page_file.as_uri())
        page.wait_for_function(_DRAWN)
        for name, sections in SECTIONS.items():
            boxes = [page.locator(f"#{section}").bounding_box() for section in sections]
            known = [box for box in boxes if box is not None]
            top, bottom = min(box["y"] for box in known), max(box["y"] + box["height"] for box in known)
            clip = {"x": 0.0, "y": top - 8, "width": float(_WIDTH), "height": bottom - top + 16}
            page.screenshot(path=IMAGES / f"{name}.png", clip=clip)  # type: ignore[arg-type]
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    take(sys.argv[1])
