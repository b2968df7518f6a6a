"""Checks the English of the project: `python -m tests.prose [PART OF A PATH]`.

Prints each place in a page, help text, message, docstring or comment that breaks a rule of `rules.py`, and each page
that is hard to read. Exits with 1 if a place is found. `exceptions.txt` lists texts that are correct.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import textstat

from tests.prose.rules import complaints, sentences
from tests.prose.sources import Text, all_texts

EASIEST = 50.0
"""The least Flesch reading ease of a page (0 to 100, more is easier)."""
_EXCEPTIONS = Path(__file__).with_name("exceptions.txt")


def main() -> int:
    part = "".join(sys.argv[1:2])
    allowed = {line for line in _EXCEPTIONS.read_text().splitlines() if line and not line.startswith("#")}
    texts = list(all_texts(part))
    found = [
        f"{text.file}:{text.line}: {complaint}"
        for text in texts
        for complaint in complaints(text)
        if not any(words in text.text for words in allowed)
    ]
    found += [
        f"{page}: reading ease {ease:.0f}, at least {EASIEST:.0f}" for page, ease in _ease(texts) if ease < EASIEST
    ]
    print("\n".join(found))
    print(f"prose: {len(found)} places to rewrite in {len(texts)} texts", file=sys.stderr)
    return 1 if found else 0


def _ease(texts: list[Text]) -> list[tuple[str, float]]:
    """The Flesch reading ease of the sentences of each page, lists and tables included."""
    pages: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        if text.kind == "page":
            pages[text.file] += [sentence.rstrip(".:;,") + "." for sentence in sentences(text.text) if " " in sentence]
    return [(page, textstat.flesch_reading_ease(" ".join(lines))) for page, lines in pages.items() if len(lines) > 5]


if __name__ == "__main__":
    sys.exit(main())
