"""The machine that a process runs on."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """The kernel's id of this boot of this machine; None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None
