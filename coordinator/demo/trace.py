"""Where requests come from: made up with a seed, or read from a trace in one of the two public formats.

- JSON lines: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, ...}`, one object a line;
- CSV with the columns TIMESTAMP (date and time, up to 7 decimals), ContextTokens, GeneratedTokens.

The first line tells which. Files are streamed, never loaded. Times are seconds since the first row; a row that
lies before the first one counts as 0. Empty lines are skipped; any other line that does not parse is a ConfigError
with file, line number and what is wrong.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

from ..errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIELDS = ("timestamp", "input_length", "output_length")
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `at_s` seconds after the start, lengths in tokens."""

    at_s: float
    input_length: int
    output_length: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a replay of a trace amounts to: rows in it, wall seconds until the last of them, whether more follow."""

    requests: int
    seconds: float
    cut: bool


def read(path: str | Path) -> Iterator[Request]:
    """Stream the requests of a trace file. Raises ConfigError naming file, line and what is wrong."""
    try:
        with open(path, encoding="utf-8", newline="") as lines:
            numbered = ((number, line.strip()) for number, line in enumerate(lines, 1))
            filled = ((number, line) for number, line in numbered if line)
            first = next(filled, None)
            if first is None:
                raise ConfigError(f"trace {path} is empty")
            if first[1].startswith("{"):
                yield from _relative(_json_rows(path, first, filled))
            else:
                yield from _relative(_csv_rows(path, first, filled))
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read: {exc.strerror or exc}") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"trace {path} is not text: {exc.reason} at byte {exc.start}") from None


def replay(path: str | Path, speed: float, seconds: float) -> Iterator[Request]:
    """The requests of a trace, `speed` times as fast, until `seconds` of wall time."""
    for request in read(path):
        at_s = request.at_s / speed
        if at_s > seconds:
            return
        yield Request(at_s, request.input_length, request.output_length)


def summarize(path: str | Path, speed: float, seconds: float) -> Summary:
    """Read the part of a trace that would be replayed, so that a bad line is reported before anything starts."""
    requests, last = 0, 0.0
    for request in read(path):
        if request.at_s / speed > seconds:
            return Summary(requests, last, cut=True)
        requests, last = requests + 1, max(last, request.at_s / speed)
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    return Summary(requests, last, cut=False)


def synthetic(rate: float, seconds: float, seed: str) -> Iterator[Request]:
    """Poisson arrivals of `rate` a second for `seconds`; input lengths like a chat service's (median 8,000 tokens)."""
    dice = random.Random(seed)
    at_s = dice.expovariate(rate)
    while at_s < seconds:
        length = min(48_000, max(500, round(dice.lognormvariate(9.0, 0.6))))
        yield Request(at_s, length, round(dice.uniform(20, 800)))
        at_s += dice.expovariate(rate)


def every(requests: Iterable[Request], index: int, count: int) -> Iterator[Request]:
    """The share of worker `index` of `count`: every count-th request."""
    return (request for number, request in enumerate(requests) if number % count == index)


def _relative(rows: Iterator[Request]) -> Iterator[Request]:
    start: float | None = None
    for row in rows:
        start = row.at_s if start is None else start
        yield Request(max(0.0, row.at_s - start), row.input_length, row.output_length)


def _json_rows(path: str | Path, first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[Request]:
    for number, line in _chain(first, rest):
        try:
            row = json.loads(line)
        except ValueError as exc:
            _refuse(path, number, f"it is not a JSON object ({exc})")
        if not isinstance(row, dict):
            _refuse(path, number, "it is not a JSON object")
        missing = [name for name in FIELDS if name not in row]
        if missing:
            _refuse(path, number, f"it has no {' and no '.join(missing)}")
        values = [_number(path, number, name, row[name]) for name in FIELDS]
        yield Request(values[0] / 1000, int(values[1]), int(values[2]))


def _csv_rows(path: str | Path, first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[Request]:
    names = [name.strip() for name in _cells(path, *first)]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        hint = 'expected {"timestamp": ...} or a header with ' + ", ".join(COLUMNS)
        _refuse(path, first[0], f"the header has no {' and no '.join(missing)}; {hint}")
    places = [names.index(name) for name in COLUMNS]
    for number, line in rest:
        cells = _cells(path, number, line)
        if len(cells) != len(names):
            _refuse(path, number, f"it has {len(cells)} cells, the header has {len(names)}")
        when, context, generated = (cells[place].strip() for place in places)
        lengths = [_number(path, number, COLUMNS[1], context, int), _number(path, number, COLUMNS[2], generated, int)]
        yield Request(_time(path, number, when), int(lengths[0]), int(lengths[1]))


def _cells(path: str | Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as exc:
        _refuse(path, number, f"it is not CSV ({exc})")


def _time(path: str | Path, number: int, text: str) -> float:
    try:
        head, dot, decimals = text.partition(".")
        fraction = float("0." + decimals) if dot else 0.0  # seven decimals are more than datetime reads
        return (datetime.fromisoformat(head).replace(tzinfo=None) - _EPOCH) / timedelta(seconds=1) + fraction
    except ValueError:
        _refuse(path, number, f"TIMESTAMP {text!r} is not a date and time such as 2023-11-16 18:15:46.6805900")


def _number(
    path: str | Path, number: int, name: str, value: object, read_text: Callable[[str], float] | None = None
) -> float:
    if isinstance(value, str) and read_text is not None:
        try:
            value = read_text(value)
        except ValueError:
            _refuse(path, number, f"{name} {value!r} is not a whole number")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        _refuse(path, number, f"{name} is {json.dumps(value)[:40]}, not a number from 0 up")
    return value


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _refuse(path: str | Path, number: int, problem: str) -> NoReturn:
    raise ConfigError(f"trace {path}, line {number}: {problem}")
