"""A process records with one kernel for its life. One that runs a test with each takes them away in between."""

from __future__ import annotations

from crossrank.instrument.hooks import dispatcher


def remove_kernels() -> None:
    """Take the kernels out of torch's dispatcher. No other thread may communicate meanwhile."""
    kernels, dispatcher._kernels = dispatcher._kernels, None
    if kernels is not None:
        kernels.remove()
