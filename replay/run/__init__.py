"""Runs a `Plan` with its settings on all ranks, and measures the start and end of every call.

* Processes: `processes` starts them or uses a launcher's (`launcher`). They meet in `rendezvous` and send `messages`.
* One rank: `worker` binds its calls (`program`) and makes them (`executor`) at a pace (`pacing`).
* Computation: `compute_program` runs it, with `place_launches` (calls between operations), `operations` (what may run)
  and `host_time` (the host's own time).
* Failures: `watch` ends a rank that hangs. `failure_report` reports where each rank was.
"""
