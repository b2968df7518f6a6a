"""Replays recorded communication with torch.distributed, without the model, and compares it with the recording.

The modules, in the order of a replay:

* `replay_inputs` reads every rank's calls from any kind of file. `build_plan` makes a `plan.Plan`, in which groups,
  calls and waits of all ranks fit together, or reports why not.
* `transform` changes a plan: sizes, types, operations, ranks.
* `processes` starts the ranks, or uses those of a launcher. In each, `worker` joins the others over a `rendezvous`, and
  `executor` makes its calls.
* `measure` puts the times of all ranks on one clock and compares them. `replay_report` writes and prints them.

A plan needs no torch: it can be made on one machine, saved, changed and run on another.
"""
