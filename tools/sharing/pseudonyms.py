"""Pseudonyms for names: the same one for the same text, in all files and ranks of one run of the command.

A key for the run makes the pseudonyms. It is random and never written, so that no one can test guesses of the original.
The key also gives the time by which all wall times are moved.
"""

from __future__ import annotations

import hashlib
import hmac
import ntpath
import re
from functools import lru_cache

from crossrank.tools.graph.chakra.mesh import name_in
from crossrank.tools.sharing.vocabulary import (
    KERNEL,
    PACKAGES,
    PUBLIC_FRAME,
    PYTHON_FRAME,
    RANGE_OF_MODULE,
    WORDS,
    is_public,
    library_path,
    passes,
)
from crossrank.tools.traces.kernels import FAMILIES, communication_kernel

_SECOND = 1_000_000_000
_YEAR = 365 * 86_400 * _SECOND
_DIGITS = 12
"""Digits of a pseudonym: 48 bits. With a million texts, two share one in about one of 500 runs."""
_TOKEN = re.compile(r"\w+|[^\x00-\x7f]")
_LINE = re.compile(r"(?P<file>.*):(?P<line>\d{1,9})", re.DOTALL)


class Pseudonyms:
    """The pseudonyms of one run. `replaced` has the texts that got one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.shift_ns = _SECOND * (
            int.from_bytes(self._digest("wall time", ""), "big") % (15 * _YEAR // _SECOND) + _YEAR // _SECOND
        )
        """Subtracted from every time since 1970: whole seconds, 1 to 16 years."""
        self.replaced: dict[str, str] = {}
        self.passed: set[str] = set()
        """Texts that stay, because they are in anyone's traces."""
        self.name = lru_cache(maxsize=1 << 16)(self._make_name)

    def _digest(self, kind: str, text: str) -> bytes:
        return hmac.digest(self._key, f"{kind}\0{text}".encode("utf-8", "surrogatepass"), hashlib.sha256)

    def _make_name(self, kind: str, text: str) -> str:
        if not text:
            return text
        made = f"{kind}-{self._digest(kind, text).hex()[:_DIGITS]}"
        self.replaced[text] = made
        return made

    def text(self, kind: str, text: str) -> str:
        """Return a text that passes, or a pseudonym for it."""
        if self.passes(kind, text):
            return text
        # The purpose of a group stays: readers derive the job's dimensions from it.
        dimension = name_in(text) if kind == "group" else None
        return self.name(f"{dimension}-group" if dimension else kind.replace(" ", "-"), text)

    def passes(self, kind: str, text: str) -> bool:
        if not passes(kind, text):
            return False
        self.passed.add(text)
        return True

    def path(self, path: str) -> str:
        """Replace a path. For a library, the part from its folder on stays. Any other file gets names for its folder
        and for itself, with its extension. The file's name is the same for every folder."""
        if path.startswith("<") or not path:
            return path if self._passes_as_frame(path) else self.name("file", path)
        made = library_path(path) or ""
        if made:
            self.passed.add(made)
        else:
            # The path of another library keeps only the fact that it is one.
            packages = "/site-packages/" if PACKAGES.search(path) else ""
            folder, file = ntpath.split(path)
            made = packages + (self.name("folder", folder) + "/" if folder else "")
            made += self.name("file", file) + (".py" if file.endswith(".py") else "")
        if made != path:
            self.replaced[path] = made
        return made

    def _passes_as_frame(self, file: str) -> bool:
        public = passes("function", file) or (PUBLIC_FRAME.fullmatch(file) is not None and is_public(file))
        if public:
            self.passed.add(file)
        return public

    def place(self, place: str) -> str:
        """Replace `file.py:line`. The line stays."""
        match = _LINE.fullmatch(place)
        return f"{self.path(match['file'])}:{match['line']}" if match else self.path(place)

    def function(self, name: str, path: str) -> str:
        """Replace the function of a frame. That of a library stays if its words are public."""
        if library_path(path) is not None and is_public(name):
            self.passed.add(name)
            return name
        return self.text("function", name)

    def range(self, name: str) -> str:
        """Replace the name of an event: an operation, a kernel, a range or a Python frame."""
        if self.passes("op", name):
            return name
        if (frame := PYTHON_FRAME.fullmatch(name)) is not None:
            if PUBLIC_FRAME.fullmatch(frame["file"]) and is_public(name):
                self.passed.add(name)
                return name
            return f"{self.name('file', frame['file'])}.py({frame['line']}): {self.text('function', frame['function'])}"
        if (kernel := KERNEL.fullmatch(name)) is not None and is_public(kernel["head"]):
            return self._replace_kernel(kernel["head"], kernel["rest"])
        if communication_kernel(name) is not None:
            for family in FAMILIES:
                if (found := family.pattern.search(name)) and is_public(found[0]):
                    return self._replace_kernel(found[0], name.replace(found[0], "", 1))
        if (inner := RANGE_OF_MODULE.fullmatch(name)) is not None:
            return inner["before"] + self.name("module", inner["module"]) + inner["after"]
        return self.name("name", name)

    def _replace_kernel(self, head: str, rest: str) -> str:
        made = head + (f"<{self.name('kernel', rest)}>" if rest else "")
        self.passed.add(made)
        return made

    def message(self, text: str) -> str:
        """Replace the text of an exception. Words of torch.distributed and its backends stay; numbers become 0. A
        pseudonym of the whole text follows, so that only equal messages stay equal."""
        changed = False

        def word(match: re.Match[str]) -> str:
            nonlocal changed
            found = match[0]
            if found in WORDS:
                return found
            changed = True
            return "0" if found.isascii() and found.isdecimal() else "x"

        kept = _TOKEN.sub(word, text)
        if not changed:
            return text
        return f"{kept[:400]} ({self.name('text', text)})"

    def wall(self, ns: int) -> int:
        """Move a time since 1970. 0 and values that cannot be such a time stay."""
        return ns - self.shift_ns if ns > 20 * _YEAR else ns
