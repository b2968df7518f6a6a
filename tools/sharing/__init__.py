"""Recordings made fit to be handed on: a part of one, or one without names."""
