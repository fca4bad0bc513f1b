"""What a process records: one JSON object a line, in a file of its own, each line written with one system call.

`t` is wall-clock nanoseconds (all processes run on one host), `event` the kind of fact; the rest depends on it:

    start      role ("worker", "node"), id, pid, and a node's address
    opened     address, room                          the worker has joined
    refused    address, state                         the worker was told to go elsewhere
    stored     rooms                                  these openings are in the store
    status     address, room, status
    succeeded  address, room                          all bytes arrived and the ledger took the Success
    failed     address, room, cause, reason, epoch    on_failure was called
    left       address, room
    broken     address, room, error                   the transfer broke; evidence, no verdict
    stuck      address, room                          open for far too long, or open when the worker was closed
    orphans    worker, rooms                          a node was told that this worker died with these rooms
    waiting    -                                      a node holds its port and listens when it is told to
    serving    -                                      a node listens
    announced  -                                      the store knows this life of the node
    tally      counters of the process so far
    fault, back                                       the orchestrator did something, or undid it

A process that is killed may leave half a line at the end. Nothing else may be malformed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Fact = dict[str, Any]


class Facts:
    """Appends facts to one file; without a path it records nothing."""

    def __init__(self, path: str | Path | None) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if path else None

    def write(self, event: str, **fields: Any) -> int:
        """Record one fact now; returns its time in ns. Safe from any thread."""
        now = time.time_ns()
        if self._handle is not None:
            os.write(
                self._handle, json.dumps({"t": now, "event": event, **fields}, separators=(",", ":")).encode() + b"\n"
            )
        return now


class FactsFile:
    """Reads what was appended to one file since the last look. A last line that is not finished yet is left there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0

    def news(self) -> list[Fact]:
        """The facts added since; [] while the file does not exist. Raises ValueError naming a malformed line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _torn = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        facts: list[Fact] = []
        for line in whole.splitlines():
            try:
                fact = json.loads(line)
                if not isinstance(fact["t"], int) or not isinstance(fact["event"], str):
                    raise TypeError("t or event is of the wrong type")
            except (ValueError, TypeError, KeyError) as exc:
                raise ValueError(f"{self.path} holds a line that is no fact: {line[:100]!r} ({exc})") from None
            facts.append(fact)
        return facts


def read_all(path: str | Path) -> list[Fact]:
    """Every finished line of one file."""
    return FactsFile(path).news()
