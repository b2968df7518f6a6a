"""Replays recorded communication with torch.distributed, without the model, and measures it against the recording.

The way of a replay, a module each:

* `sources` reads what every rank communicated, from any kind of file; `build` makes it one `plan.Plan`, in which
  groups, calls and waits of all ranks fit together, or says what does not.
* `transform` and `resize` change a plan: sizes, types, operations, ranks.
* `local` starts the processes, or `launched` takes those that a launcher started; in each of them `worker` joins the
  others over a `rendezvous`, and `executor` makes its calls.
* `results` puts the times of all ranks side by side, `compare` sets them against the recorded ones, `report` keeps
  both and `show` prints them.

A plan is data without torch: it can be made on one machine, saved, changed and run on another.
"""
