"""Generated examples have no time limit: how long one takes says how busy the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("without clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without clocks")
