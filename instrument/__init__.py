"""The recorder: what runs inside every training process.

`session` owns one recording from `enable()` to `disable()` and wires the parts below it; `interception` is
the only module that touches torch's dispatcher. Nothing here raises into the training loop.
"""
