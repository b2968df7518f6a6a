"""The rules for English text, each with what it forbids and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.prose.sources import Text

MOST_WORDS = 35
WORDS = {
    "stands|stood|standing": "is, are, applies",
    "told": "shown, known, passed",
    "nobody|whoever|whatever": "no rank, the user, any",
    "beside": "next to, in addition to, outside",
    "so many|so much": "the number itself",
    "lies|lay": "is, is stored in",
    "by right": "should",
    "in the middle": "median",
    "in order of": "ordered by",
    "unheard of|beyond reason": "no data, out of range",
    "nothing says|nothing said|nothing tells": "is unknown",
    "of which|of whom|of whose": "a second sentence",
    "thereof|whereof|wherein|whereby|therein|hereby": "two sentences",
    "anew": "again",
    "in that": "because",
    "mended": "fixed",
    "gives? back": "returns",
    "what is over|are over|is over|was over|were over": "finished",
    "goes? on|went on|going on": "continue",
    "may be named|be named again": "can be used again",
    "without (?:one|it|any) (?:that|which)": "two sentences",
}
"""Words that a reader has to think about -> what to write instead."""
_WORDS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): instead for words, instead in WORDS.items()}
_PASSIVE = re.compile(r"\b(?:is|are|was|were|be|been) (?:said|told|unheard)\b", re.IGNORECASE)
_INVERTED = re.compile(r"^(?:Of|Nor|Nothing of|Neither of) ")
_IN_NAMES = re.compile(r"^(?:of|nor|what|where|whose|which)\b|\b(?:is|are|was) (?:no (?!longer|more)|none\b)")
"""What a name of a test does not begin with, or have."""
_CLAUSE = re.compile(
    r"^(?:what|how|why|who|whose|where|when|which|of|that|whether)\b|\b(?:is|are|was|were|does|do|did|has|have)\b|\?$",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*`A-Z])|\n\s*\n|;\s|\n[-*] ")


def complaints(text: Text) -> Iterator[str]:
    """What breaks a rule in a text, as `RULE: words`."""
    if text.kind == "heading":
        if match := _CLAUSE.search(text.text):
            yield f"heading: '{match[0]}' makes a clause of '{text.text}'; write a noun phrase"
        return
    if text.kind == "test" and (match := _IN_NAMES.search(text.text)):
        yield f"name: '{match[0]}': begin with the subject, and write 'is not': '{text.text}'"
    for sentence in sentences(text.text):
        count = len(sentence.split())
        if count > MOST_WORDS:
            yield f"length: {count} words, at most {MOST_WORDS}: '{sentence[:60]}…'"
        if match := _INVERTED.search(sentence):
            yield f"order: a sentence does not begin with '{match[0].strip()}': '{sentence[:60]}'"
        if match := _PASSIVE.search(sentence):
            yield f"passive: '{match[0]}': name who says it: '{sentence[:60]}'"
    for pattern, instead in _WORDS.items():
        for match in pattern.finditer(text.text):
            yield f"word: '{match[0]}' (write: {instead})"


def sentences(text: str) -> list[str]:
    """The sentences of a text. A semicolon and a line that begins a list item end one as well."""
    return [" ".join(part.split()) for part in _END.split(text) if part.strip()]
