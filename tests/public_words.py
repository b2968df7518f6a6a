"""Writes tools/sharing/public_words.txt: the words of the names that PyTorch and CUDA give things.

    python -m tests.public_words

They are the parts of the names of torch's operators, of its files, of its modules and of their functions in the
packages that stand in stacks of distributed jobs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from crossrank.tools.sharing.vocabulary import PUBLIC_WORDS, parts_of

_STACKS = ("distributed", "autograd", "nn", "optim", "utils/data", "multiprocessing", "profiler")


def main() -> None:
    found: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        found.update(parts_of(name))
    for schema in torch._C._jit_get_all_schemas():
        found.update(part for argument in schema.arguments for part in parts_of(f"{argument.name} {argument.type}"))
    root = Path(torch.__file__).parent
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        if "testing" in place.parts or "test" in place.parts:
            continue
        found.update(part for one in place.parts for part in parts_of(one))
        if str(place).startswith(_STACKS):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found.update(parts_of(node.name))
    words = sorted(word for word in found if word.isascii() and word.isalpha() and 2 <= len(word) <= 24)
    PUBLIC_WORDS.write_text("\n".join(words) + "\n")
    print(len(words))


if __name__ == "__main__":
    main()
