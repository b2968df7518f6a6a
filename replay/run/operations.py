"""The operations of this torch, by the schemas that a trace has of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.replay.plan.plan import Plan

MISSING = "this torch has no such operation; --import names a module that makes it"
_NEEDS = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "fsdp": "torch.distributed.fsdp",
}
"""Namespace of operations -> the module of torch that makes them."""


def find_operations(schemas: Iterable[str], imports: Iterable[str] = ()) -> list[Any]:
    """The operation of each schema, None where this torch has none; `imports` are imported first.

    Raises `CrossrankError` where a module cannot be imported.
    """
    for name in imports:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise CrossrankError(f"--import {name}: cannot be imported ({one_line(error)}); install it here") from error
    found = []
    for text in schemas:
        try:
            schema = torch._C.parse_schema(text)
            namespace, _, name = schema.name.partition("::")
            if namespace in _NEEDS:
                importlib.import_module(_NEEDS[namespace])
            packet = getattr(getattr(torch.ops, namespace), name)
            found.append(getattr(packet, schema.overload_name or "default"))
        except (RuntimeError, AttributeError):
            found.append(None)
    return found


def leave_out_missing(plan: Plan, imports: Iterable[str]) -> None:
    """Leave out, with a reason, the operations of `plan` that this torch does not have."""
    for rank in plan.ranks:
        if rank.compute is None:
            continue
        found = find_operations(rank.compute.schemas, imports)
        for one in rank.compute.operations:
            if one.runs and found[one.schema] is None:
                one.schema, one.reason = -1, MISSING
