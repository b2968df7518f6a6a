"""Replays recorded communication with torch.distributed, without the model, and measures it against the recording.

The way of a replay, a module each:

* `replay_inputs` reads what every rank communicated, from any kind of file; `build_plan` makes it one `plan.Plan`, in
  which groups, calls and waits of all ranks fit together, or says what does not.
* `transform` changes a plan: sizes, types, operations, ranks.
* `processes` starts one per rank, or takes those that a launcher started; in each of them `worker` joins the others
  over a `rendezvous`, and `executor` makes its calls.
* `measure` puts the times of all ranks on one clock and beside the recorded ones, `replay_report` writes and prints
  them.

A plan is data without torch: it can be made on one machine, saved, changed and run on another.
"""
