"""Which reduction a call makes: `sum`, `avg`, `max`, …

The dispatcher hands over an opaque ReduceOp object. Reading it goes through TorchScript and takes 1.5 us: a fifth of
the cost of recording a call. But torch's own functions (`all_reduce(tensor, op=...)`) have the same reduction in their
argument `op`, one look into their frame away. So the recorder takes that if such a function entered the kernel. It
compares it with the object when a call is seen for the first time; after one difference it always reads the object.
"""

from __future__ import annotations

from types import CodeType, FrameType, FunctionType
from typing import Any

from torch.distributed import ReduceOp, distributed_c10d

from crossrank.comm import REDUCTIONS
from crossrank.instrument.log import log

_ARGUMENT = "op"


def name_of(reduce_op: Any) -> str | None:
    """The reduction of the dispatcher's ReduceOp object; None where this torch does not say."""
    try:
        code: int = reduce_op._get_method("op")()
    except (AttributeError, RuntimeError):
        return None
    return name_of_code(code)


def name_of_code(code: int) -> str:
    """The reduction of one of c10d's RedOpType."""
    return REDUCTIONS[code] if 0 <= code < len(REDUCTIONS) else f"op_{code}"


class ReductionReader:
    """Reads reductions, the short way while that is right."""

    def __init__(self) -> None:
        self._codes = _functions_with_op()
        # premul_sum is a ReduceOp with a factor, not one of these constants.
        constants = (name for name in REDUCTIONS if name != "premul_sum" and hasattr(ReduceOp, name.upper()))
        self._constants = {getattr(ReduceOp, name.upper()): name for name in constants}

    def read(self, frame: FrameType | None, reduce_op: Any) -> str | None:
        """The reduction of a call that came to the dispatcher from `frame` with this object."""
        if frame is not None and id(frame.f_code) in self._codes:
            name = self._constants.get(frame.f_locals.get(_ARGUMENT))
            if name is not None:
                return name
        return name_of(reduce_op)

    def verify(self, name: str | None, reduce_op: Any) -> str | None:
        """What the object says; the short way ends if `name`, which it gave, is something else."""
        true_name = name_of(reduce_op)
        if true_name != name and true_name is not None:
            log.debug("crossrank: the frame has %s and the dispatcher %s, which is asked from now on", name, true_name)
            self._codes = {}
        return true_name or name


def _functions_with_op() -> dict[int, CodeType]:
    """Code objects of torch.distributed's functions that have an argument `op`, by their id."""
    found: dict[int, CodeType] = {}
    for function in vars(distributed_c10d).values():
        if type(function) is not FunctionType:  # isinstance would make the deprecated `reduce_op` warn
            continue
        code = getattr(function, "__wrapped__", function).__code__
        if _ARGUMENT in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            found[id(code)] = code
    return found
