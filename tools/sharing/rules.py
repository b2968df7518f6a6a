"""Rules that replace values: one for each privacy class, and combinations of these for the structs of files.

A rule takes a value of a decoded JSON document and returns its replacement, or `LEFT_OUT`. Only the rules for numbers
return a value that they do not know.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Any

import msgspec

from crossrank.errors import BROKEN
from crossrank.privacy import Privacy
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.vocabulary import PATTERNS, is_public

LEFT_OUT: Any = object()
"""Result for a value that is not written."""
MOST_DEPTH = 12
_OUR_WORDS = re.compile(r"[a-z]+(?:[_ ][a-z]+){0,8}|Kineto(?: [a-z]+){0,3}|")
_EPOCH_US = 6 * 10**14
_EPOCH_NS = 6 * 10**17
"""Larger times are since 1970 (from 1989 on). Smaller ones are since the start of the machine."""


class Scrubber:
    """The pseudonyms of a run, and what was skipped in one file."""

    def __init__(self, names: Pseudonyms, *, coarse: bool) -> None:
        self.names = names
        self.coarse = coarse
        self.left_out: Counter[str] = Counter()
        self.damage: list[str] = []


Rule = Callable[[Any, Scrubber], Any]


def number(value: Any, scrubber: Scrubber) -> Any:
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else LEFT_OUT  # crossrank's JSON has no larger ones
    return value if value is None or isinstance(value, float | Decimal) else LEFT_OUT


def _scrub_number(value: Any, scrubber: Scrubber) -> Any:
    """Keep a number, or the text of a number or of a list of numbers, as torch and other tools write it."""
    if not isinstance(value, str):
        return number(value, scrubber)
    return value if scrubber.names.passes("literal", value) else inner_json(_nested(number))(value, scrubber)


def power_of_two(count: int) -> int:
    """Return the nearest power of two; the larger one if two are equally near.

    >>> [power_of_two(count) for count in (0, 1, 3, 5, 6, 1000, -1)]
    [0, 1, 4, 4, 8, 1024, -1]
    """
    if count < 2:
        return count
    low = 1 << (count.bit_length() - 1)
    return low if count - low < 2 * low - count else 2 * low


def _scrub_size(value: Any, scrubber: Scrubber) -> Any:
    """Keep or round a count of elements or bytes."""
    if isinstance(value, str) and value:  # ROCm writes counts as text, and torch splits
        return inner_json(_nested(_scrub_size))(value, scrubber)
    known = isinstance(value, int) and not isinstance(value, bool)
    return power_of_two(value) if known and scrubber.coarse else number(value, scrubber)


def _scrub_wall(value: Any, scrubber: Scrubber) -> Any:
    """Move a time since 1970 in ns or us, as a number or its digits. A value that is too small for one stays."""
    if isinstance(value, str):
        moved = _scrub_wall(int(value), scrubber) if value.isdecimal() and len(value) < 20 else LEFT_OUT
        return LEFT_OUT if moved is LEFT_OUT else str(moved)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return number(value, scrubber)
    if not isfinite(value):
        return LEFT_OUT
    whole = int(value)
    if whole > _EPOCH_NS:
        return scrubber.names.wall(whole)
    return value if whole < _EPOCH_US else Decimal(value) - scrubber.names.shift_ns // 1000


def _scrub_day(value: Any, scrubber: Scrubber) -> Any:
    """Move a local time such as `2023-09-07 16:09:59`."""
    try:
        moment = datetime.datetime.strptime(value, "%Y-%m-%d %H:%M:%S")
        moved = moment - datetime.timedelta(seconds=scrubber.names.shift_ns // 1_000_000_000)
    except (TypeError, ValueError, OverflowError):
        return LEFT_OUT
    return moved.strftime("%Y-%m-%d %H:%M:%S")


def _pseudonym_rule(kind: str) -> Rule:
    """Return a rule with a pseudonym for any text and any number, which may be an address or a serial number."""

    def rule(value: Any, scrubber: Scrubber) -> Any:
        if value is None:
            return None
        return scrubber.names.name(kind, str(value)) if isinstance(value, str | int | float | Decimal) else LEFT_OUT

    return rule


def is_ours(text: str) -> bool:
    """Return whether a text is a word of crossrank's own files: one of a few values."""
    return _OUR_WORDS.fullmatch(text) is not None and is_public(text)


def _scrub_frame(value: Any, scrubber: Scrubber) -> Any:
    """Replace a `Frame`. Its file decides how much of the function's name stays."""
    if not isinstance(value, dict):
        return LEFT_OUT
    file, line, names = str(value.get("filename", "")), value.get("line", 0), scrubber.names
    return {
        "name": names.function(str(value.get("name", "")), file),
        "filename": names.path(file),
        "line": line if isinstance(line, int) else 0,
    }


_NUMBERS: dict[Privacy, Rule] = {
    Privacy.NUMBER: _scrub_number,
    Privacy.SIZE: _scrub_size,
    Privacy.WALL: _scrub_wall,
    Privacy.DAY: _scrub_day,
    Privacy.FRAMES: _scrub_frame,
}
_TEXTS: dict[Privacy, Callable[[str, Scrubber], Any]] = {
    Privacy.EVENT: lambda text, scrubber: scrubber.names.range(text),
    Privacy.PATH: lambda text, scrubber: scrubber.names.path(text),
    Privacy.PLACE: lambda text, scrubber: scrubber.names.place(text),
    Privacy.MESSAGE: lambda text, scrubber: scrubber.names.message(text),
    Privacy.OP_SCHEMA: lambda text, scrubber: text if is_public(text) else LEFT_OUT,
    Privacy.WORD: lambda text, scrubber: text if is_ours(text) else LEFT_OUT,
}


@lru_cache
def rule_of_class(privacy: Privacy) -> Rule:
    """Return the rule for values of a class, and for lists of them."""
    if privacy in _NUMBERS:
        return _nested(_NUMBERS[privacy])
    kind = privacy.value
    if privacy not in _TEXTS and kind not in PATTERNS:
        return _nested(_pseudonym_rule(kind))

    def rule(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, str):
            return number(value, scrubber)
        return _TEXTS[privacy](value, scrubber) if privacy in _TEXTS else scrubber.names.text(kind, value)

    return _nested(rule)


def _nested(rule: Rule) -> Rule:
    """Return a rule for nested lists. A list with a skipped value is skipped as a whole."""

    def of_list(value: Any, scrubber: Scrubber, depth: int = 0) -> Any:
        if not isinstance(value, list | tuple):
            return rule(value, scrubber)
        if depth > MOST_DEPTH:
            return LEFT_OUT
        found = [of_list(one, scrubber, depth + 1) for one in value]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


def each(rule: Rule) -> Rule:
    """Return a rule for a list without its skipped values."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple):
            return number(value, scrubber)
        found = [rule(one, scrubber) for one in value]
        return [one for one in found if one is not LEFT_OUT]

    return of_list


def pair(rules: Sequence[Rule]) -> Rule:
    """Return a rule for a list with one rule for each value."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(rules):
            return LEFT_OUT
        found = [rule(one, scrubber) for rule, one in zip(rules, value, strict=True)]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


KEYS: set[str] = {"filename", "line"}
"""Names of all fields that have a rule."""


def fields(where: str, rules: dict[str, Rule]) -> Rule:
    """Return a rule for an object with one rule for each field. Fields without one are counted under `where`."""
    KEYS.update(rules)

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        made = {}
        for key, one in value.items():
            rule = rules.get(key) if isinstance(key, str) else None
            found = rule(one, scrubber) if rule is not None else LEFT_OUT
            if found is LEFT_OUT:
                known = rule is not None or (isinstance(key, str) and is_public(key))
                scrubber.left_out[f"{where}.{key if known else '…'}"] += 1
            else:
                made[key] = found
        return made

    return of_object


def keyed(key_rule: Rule, rule: Rule) -> Rule:
    """Return a rule for an object with one rule for all keys and one for all values."""

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        found = {key_rule(str(key), scrubber): rule(one, scrubber) for key, one in value.items()}
        return {key: one for key, one in found.items() if key is not LEFT_OUT and one is not LEFT_OUT}

    return of_object


def inner_json(rule: Rule) -> Rule:
    """Return a rule for JSON in a text."""

    def of_text(value: Any, scrubber: Scrubber) -> Any:
        try:
            made = rule(msgspec.json.decode(value), scrubber)
        except (*BROKEN, TypeError):
            return LEFT_OUT
        return LEFT_OUT if made is LEFT_OUT else msgspec.json.encode(made).decode()

    return of_text
