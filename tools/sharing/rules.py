"""What can become of a value: rules for single ones, and rules made of rules for lists and objects.

A rule takes a value of a decoded JSON document and gives what stands in its place, or `LEFT_OUT`. No rule but those for
numbers hands a value on that it does not know.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from math import isfinite
from typing import Any

import msgspec

from crossrank.errors import BROKEN
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.vocabulary import is_public

LEFT_OUT: Any = object()
"""In the place of a value that is not written."""
MOST_DEPTH = 12
_OUR_WORDS = re.compile(r"[a-z]+(?:[_ ][a-z]+){0,8}|Kineto(?: [a-z]+){0,3}|")
_EPOCH_US = 6 * 10**14
_EPOCH_NS = 6 * 10**17
"""Above these a time is one since 1970 (of 1989 and later), and not since the machine started."""


class Scrubber:
    """The names of a run, and what of one file was left out."""

    def __init__(self, names: Pseudonyms, *, coarse: bool) -> None:
        self.names = names
        self.coarse = coarse
        self.left_out: Counter[str] = Counter()
        self.damage: list[str] = []


Rule = Callable[[Any, Scrubber], Any]


def number(value: Any, scrubber: Scrubber) -> Any:
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else LEFT_OUT  # JSON of ours has no larger ones
    return value if value is None or isinstance(value, float | Decimal) else LEFT_OUT


def nested(rule: Rule) -> Rule:
    """Values in lists, however deep. What has a value that is left out is left out as a whole."""

    def of_list(value: Any, scrubber: Scrubber, depth: int = 0) -> Any:
        if not isinstance(value, list | tuple):
            return rule(value, scrubber)
        if depth > MOST_DEPTH:
            return LEFT_OUT
        found = [of_list(one, scrubber, depth + 1) for one in value]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


numbers = nested(number)


def power_of_two(count: int) -> int:
    """The nearest power of two, of equally near ones the larger.

    >>> [power_of_two(count) for count in (0, 1, 3, 5, 6, 1000, -1)]
    [0, 1, 4, 4, 8, 1024, -1]
    """
    if count < 2:
        return count
    low = 1 << (count.bit_length() - 1)
    return low if count - low < 2 * low - count else 2 * low


def size(value: Any, scrubber: Scrubber) -> Any:
    """A count of elements or bytes."""
    if isinstance(value, str):  # ROCm writes them so
        return str(size(int(value), scrubber)) if value.isdecimal() and len(value) < 20 else LEFT_OUT
    known = isinstance(value, int) and not isinstance(value, bool)
    return power_of_two(value) if known and scrubber.coarse else number(value, scrubber)


sizes = nested(size)


def counts(rule: Rule) -> Rule:
    """Numbers in lists, or JSON of such as a text: torch writes ranks and splits either way."""

    def of_either(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, str) or not value:
            return rule(value, scrubber)
        return inner_json(rule)(value, scrubber)

    return of_either


def text(kind: str) -> Rule:
    """A text of a kind of the vocabulary, or a name for it."""

    def rule(value: Any, scrubber: Scrubber) -> Any:
        return scrubber.names.text(kind, value) if isinstance(value, str) else number(value, scrubber)

    return rule


def name(kind: str) -> Rule:
    """A name for any text, and for any number, which may be an address or a serial number."""

    def rule(value: Any, scrubber: Scrubber) -> Any:
        if value is None:
            return None
        return scrubber.names.name(kind, str(value)) if isinstance(value, str | int | float | Decimal) else LEFT_OUT

    return rule


def is_ours(text: str) -> bool:
    """Whether a text is one of our own files' words: which of a few things something is."""
    return _OUR_WORDS.fullmatch(text) is not None and is_public(text)


def our_word(value: Any, scrubber: Scrubber) -> Any:
    return value if isinstance(value, str) and is_ours(value) else number(value, scrubber)


def path(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.path(value) if isinstance(value, str) else number(value, scrubber)


def place(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.place(value) if isinstance(value, str) else number(value, scrubber)


def event_name(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.range(value) if isinstance(value, str) else LEFT_OUT


def message(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.message(value) if isinstance(value, str) else number(value, scrubber)


def wall(value: Any, scrubber: Scrubber) -> Any:
    """A time since 1970 in ns or us, as a number or its digits; what is too small for one stays."""
    if isinstance(value, str):
        moved = wall(int(value), scrubber) if value.isdecimal() and len(value) < 20 else LEFT_OUT
        return LEFT_OUT if moved is LEFT_OUT else str(moved)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return number(value, scrubber)
    if not isfinite(value):
        return LEFT_OUT
    whole = int(value)
    if whole > _EPOCH_NS:
        return scrubber.names.wall(whole)
    return value if whole < _EPOCH_US else Decimal(value) - scrubber.names.shift_ns // 1000


def day(value: Any, scrubber: Scrubber) -> Any:
    """`2023-09-07 16:09:59`"""
    try:
        moment = datetime.datetime.strptime(value, "%Y-%m-%d %H:%M:%S")
        moved = moment - datetime.timedelta(seconds=scrubber.names.shift_ns // 1_000_000_000)
    except (TypeError, ValueError, OverflowError):
        return LEFT_OUT
    return moved.strftime("%Y-%m-%d %H:%M:%S")


def each(rule: Rule) -> Rule:
    """A list, of which each value has the rule."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple):
            return number(value, scrubber)
        found = [rule(one, scrubber) for one in value]
        return [one for one in found if one is not LEFT_OUT]

    return of_list


def pair(*rules: Rule) -> Rule:
    """A list whose values have a rule each."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(rules):
            return LEFT_OUT
        found = [rule(one, scrubber) for rule, one in zip(rules, value, strict=True)]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


KEYS: set[str] = {"filename", "line"}
"""Names of all fields that have a rule."""


def fields(where: str, rules: dict[str, Rule]) -> Rule:
    """An object, of which each field has a rule. Fields without one are counted under `where`."""
    KEYS.update(rules)

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        made = {}
        for key, one in value.items():
            rule = rules.get(key) if isinstance(key, str) else None
            found = rule(one, scrubber) if rule is not None else LEFT_OUT
            if found is LEFT_OUT:
                scrubber.left_out[
                    f"{where}.{key if rule is not None or (isinstance(key, str) and is_public(key)) else '…'}"
                ] += 1
            else:
                made[key] = found
        return made

    return of_object


def all_of(rule: Rule, names: str) -> dict[str, Rule]:
    """The fields with these names, between which there are commas, all with one rule.

    >>> list(all_of(number, "a b,  c"))
    ['a b', 'c']
    """
    return dict.fromkeys(map(str.strip, names.split(",")), rule)


def keyed(kind: str, rule: Rule) -> Rule:
    """An object whose keys are texts of a kind, and whose values all have the rule."""

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        found = {scrubber.names.text(kind, str(key)): rule(one, scrubber) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not LEFT_OUT}

    return of_object


def inner_json(rule: Rule) -> Rule:
    """JSON as a text."""

    def of_text(value: Any, scrubber: Scrubber) -> Any:
        try:
            made = rule(msgspec.json.decode(value), scrubber)
        except (*BROKEN, TypeError):
            return LEFT_OUT
        return LEFT_OUT if made is LEFT_OUT else msgspec.json.encode(made).decode()

    return of_text
