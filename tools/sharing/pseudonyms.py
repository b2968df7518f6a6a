"""Names in the place of names: the same one for the same text, in all files and ranks of a run of the command.

A name is made with a key that is drawn for the run and written nowhere, so that nobody can try what it was made from.
Times of the day are moved by one duration, which the key gives as well.
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
"""Of a name: 48 bits, so that a million texts have names of their own but for once in 500 runs."""
_TOKEN = re.compile(r"\w+|[^\x00-\x7f]")
_LINE = re.compile(r"(?P<file>.*):(?P<line>\d{1,9})", re.DOTALL)


class Pseudonyms:
    """The names of one run. `replaced` has the texts that got one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.shift_ns = _SECOND * (
            int.from_bytes(self._digest("wall time", ""), "big") % (15 * _YEAR // _SECOND) + _YEAR // _SECOND
        )
        """What is taken from every time since 1970: whole seconds, of 1 to 16 years."""
        self.replaced: dict[str, str] = {}
        self.passed: set[str] = set()
        """Texts that stay, because anyone's traces have them."""
        self.name = lru_cache(maxsize=1 << 16)(self._name)

    def _digest(self, kind: str, text: str) -> bytes:
        return hmac.digest(self._key, f"{kind}\0{text}".encode("utf-8", "surrogatepass"), hashlib.sha256)

    def _name(self, kind: str, text: str) -> str:
        if not text:
            return text
        made = f"{kind}-{self._digest(kind, text).hex()[:_DIGITS]}"
        self.replaced[text] = made
        return made

    def text(self, kind: str, text: str) -> str:
        """A text that passes, or a name for it."""
        if self.passes(kind, text):
            return text
        # What a group is for stays: the dimensions of a job are told by it.
        dimension = name_in(text) if kind == "group" else None
        return self.name(f"{dimension}-group" if dimension else kind.replace(" ", "-"), text)

    def passes(self, kind: str, text: str) -> bool:
        if not passes(kind, text):
            return False
        self.passed.add(text)
        return True

    def path(self, path: str) -> str:
        """A path: of a library the part from there on, of any other file names of its folder and of the file, which is
        the same wherever a path begins, with its extension."""
        if path.startswith("<") or not path:
            return path if self._is_public(path) else self.name("file", path)
        made = library_path(path) or ""
        if made:
            self.passed.add(made)
        else:
            # Of another library it stays that it is one.
            packages = "/site-packages/" if PACKAGES.search(path) else ""
            folder, file = ntpath.split(path)
            made = packages + (self.name("folder", folder) + "/" if folder else "")
            made += self.name("file", file) + (".py" if file.endswith(".py") else "")
        if made != path:
            self.replaced[path] = made
        return made

    def _is_public(self, file: str) -> bool:
        public = passes("function", file) or (PUBLIC_FRAME.fullmatch(file) is not None and is_public(file))
        if public:
            self.passed.add(file)
        return public

    def place(self, place: str) -> str:
        """`file.py:line`, the line of which stays."""
        match = _LINE.fullmatch(place)
        return f"{self.path(match['file'])}:{match['line']}" if match else self.path(place)

    def function(self, name: str, path: str) -> str:
        """The function of a frame; of a library's it stays, where its words are public."""
        if library_path(path) is not None and is_public(name):
            self.passed.add(name)
            return name
        return self.text("function", name)

    def range(self, name: str) -> str:
        """The name of an event: an operation, a kernel, a range, a frame of Python."""
        if self.passes("op", name):
            return name
        if (frame := PYTHON_FRAME.fullmatch(name)) is not None:
            if PUBLIC_FRAME.fullmatch(frame["file"]) and is_public(name):
                self.passed.add(name)
                return name
            return f"{self.name('file', frame['file'])}.py({frame['line']}): {self.text('function', frame['function'])}"
        if (kernel := KERNEL.fullmatch(name)) is not None and is_public(kernel["head"]):
            return self._kernel(kernel["head"], kernel["rest"])
        if communication_kernel(name) is not None:
            for family in FAMILIES:
                if (found := family.pattern.search(name)) and is_public(found[0]):
                    return self._kernel(found[0], name.replace(found[0], "", 1))
        if (inner := RANGE_OF_MODULE.fullmatch(name)) is not None:
            return inner["before"] + self.name("module", inner["module"]) + inner["after"]
        return self.name("name", name)

    def _kernel(self, head: str, rest: str) -> str:
        made = head + (f"<{self.name('kernel', rest)}>" if rest else "")
        self.passed.add(made)
        return made

    def message(self, text: str) -> str:
        """What an exception says: the words that torch.distributed and its backends use stay, numbers become 0, and a
        name for the whole follows, so that equal messages stay equal and others do not become so."""
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
        """A time since 1970; 0 and what cannot be one stay."""
        return ns - self.shift_ns if ns > 20 * _YEAR else ns
