"""Where a module can be mutated, and how: a comparison turned, and for or, plus for minus, a small number, a `not`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


@dataclass(frozen=True, order=True)
class Site:
    """One mutation of one place: `old` becomes `new` in a line of a file."""

    path: str
    line: int
    start: int
    """Offset into the line, in bytes, from which `old` is looked for."""
    old: str
    new: str
    statement: int
    """Line on which the statement begins that it is in."""

    def apply(self, source: str) -> str:
        """The source with the mutation in it."""
        lines = source.splitlines(keepends=True)
        encoded = lines[self.line - 1].encode()
        at = encoded.index(self.old.encode(), self.start)
        changed = encoded[:at] + self.new.encode() + encoded[at + len(self.old.encode()) :]
        lines[self.line - 1] = changed.decode()
        return "".join(lines)


def sites(path: str, source: str) -> Iterator[Site]:
    """Every mutation of a module, but of its annotations, decorators and imports."""
    lines = source.splitlines()
    for node, statement in _walk(ast.parse(source), 1):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, (old, new) = node.left, _COMPARISONS[type(node.ops[0])]
        elif isinstance(node, ast.BoolOp):
            left, (old, new) = node.values[0], ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left, (old, new) = node.left, ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
        else:
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield Site(path, node.lineno, node.col_offset, "not ", "", statement)
            elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
                yield Site(path, node.lineno, node.col_offset, str(node.value), str(node.value + 1), statement)
            continue
        line, start = left.end_lineno or 0, left.end_col_offset or 0
        # An operator on a line of its own is left alone.
        if lines[line - 1].encode()[start:].decode().lstrip(" )").startswith(old):
            yield Site(path, line, start, old, new, statement)


def _walk(node: ast.AST, statement: int) -> Iterator[tuple[ast.AST, int]]:
    """All nodes below, with the line that their statement begins on."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Import | ast.ImportFrom):
                of = child.lineno if isinstance(child, ast.stmt) else statement
                yield child, of
                yield from _walk(child, of)
