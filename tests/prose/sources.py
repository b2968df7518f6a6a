"""Finds the English text of the project: Markdown pages, strings, docstrings and comments of the product."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
CODE = ("crossrank/*.py", "instrument/**/*.py", "tools/**/*.py", "replay/**/*.py")
TEMPLATES = ("tools/**/*.html.j2", "tools/**/*.html")
TESTS = ("tests/**/test_*.py",)
_FEWEST_WORDS = 4
"""A string with fewer words is a name, a unit or a format, not a sentence."""
_TAG = re.compile(r"<(script|style)\b.*?</\1>|\{[%#].*?[%#]\}|<[^>]*>", re.DOTALL)
_INSERTED = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_TEST = re.compile(r"\s*(?:async )?def test_(\w+)")
_BULLET = re.compile(r"^\s*(?:[*-]|\d+\.|\w+:) ", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """A block of text: a paragraph, a list item, a table cell, a heading, a string or a comment."""

    file: str
    line: int
    text: str
    kind: str
    """`heading`, `page`, `string`, `docstring`, `comment` or `test`."""


def all_texts(part: str = "", root: Path = ROOT) -> Iterator[Text]:
    """Yield every text of the files whose path contains `part`."""
    for patterns, read in (
        (PAGES, page_texts),
        (CODE, code_texts),
        (TEMPLATES, template_texts),
        (TESTS, names_of_tests),
    ):
        for pattern in patterns:
            for path in sorted(root.glob(pattern)):
                file = path.relative_to(root).as_posix()
                if part in file and not file.endswith("_pb2.py"):
                    yield from read(file, path.read_text())


def names_of_tests(file: str, source: str) -> Iterator[Text]:
    """The names of tests, as sentences."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := _TEST.match(line):
            yield Text(file, number, match[1].replace("_", " ").strip(), "test")


def page_texts(file: str, source: str) -> Iterator[Text]:
    """Headings, paragraphs, list items and table cells of a Markdown page. Inline code counts as one word."""
    kind = "page"
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.type == "heading_open":
            kind = "heading"
        elif token.type == "heading_close":
            kind = "page"
        elif token.type == "inline":
            yield Text(file, token.map[0] + 1 if token.map else 0, _words_of(token), kind)


def _words_of(token: Token) -> str:
    parts = []
    for child in token.children or ():
        if child.type == "text":
            parts.append(child.content)
        elif child.type == "code_inline":
            parts.append("Code")
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
    return "".join(parts)


def code_texts(file: str, source: str) -> Iterator[Text]:
    """Docstrings, comments, and string literals of at least four words. An inserted value counts as one word."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if id(node) in docs:
            for block in _blocks(text):
                yield Text(file, node.lineno, block, "docstring")
        elif len(re.findall(r"[A-Za-z]{2,}", text)) >= _FEWEST_WORDS and " " in text:
            yield Text(file, node.lineno, text, "string")
    yield from _comments(file, source)


def _comments(file: str, source: str) -> Iterator[Text]:
    """Comments; lines of comments that follow each other are one text."""
    lines: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# noqa", "# type:")):
            continue
        if lines and token.start[0] != last + 1:
            yield Text(file, start, " ".join(lines), "comment")
            lines = []
        if not lines:
            start = token.start[0]
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    if lines:
        yield Text(file, start, " ".join(lines), "comment")


def template_texts(file: str, source: str) -> Iterator[Text]:
    """Text between the tags of a page's template."""
    kept = _TAG.sub(lambda match: "\0" + "\n" * match[0].count("\n"), _INSERTED.sub("X", source))
    line = 1
    for part in kept.split("\0"):
        if len(part.split()) >= _FEWEST_WORDS:
            yield Text(file, line, " ".join(part.split()), "string")
        line += part.count("\n")


def _blocks(text: str) -> Iterator[str]:
    """The paragraphs, list items and arguments of a docstring, without indented blocks of code."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if not paragraph.startswith("    "):
            for item in _BULLET.split(paragraph):
                if item.strip():
                    yield re.sub(r"``?[^`]*``?", "code", " ".join(item.split()))
