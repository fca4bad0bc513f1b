"""What a person sees: a live table (or a line a second where there is no terminal), and the result at the end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..inspect import AddressView
from .facts import Fact

_STYLES = {
    "alive": "green",
    "running": "green",
    "suspect": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
}
_DRAW_S = 0.25
_LINE_S = 1.0


@dataclass
class Board:
    """All that is shown while a run goes on. `nodes` are (address, process, what the store holds)."""

    seed: int
    seconds: float
    events: deque[str]
    second: float = 0.0
    start_ns: int = 0
    nodes: Sequence[tuple[str, str, AddressView | None]] = ()
    workers: Sequence[tuple[str, str]] = ()
    next_fault: str = ""
    trouble: str = ""
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def take(self, name: str, role: str, address: str, facts: Sequence[Fact]) -> None:
        """Count what a process has recorded since the last look; bursts of failures become one event."""
        counts = self.counts.setdefault(name, Counter())
        failed: Counter[tuple[str, str]] = Counter()
        for fact in facts:
            event = fact["event"]
            counts[event] += 1
            if event == "failed":
                failed[fact["address"], fact["cause"]] += 1
            elif event == "orphans":
                self._event(fact["t"], f"{address} was told of {len(fact['rooms'])} rooms of dead {fact['worker']}")
            elif event == "serving" and self.start_ns:
                self._event(fact["t"], f"{address} serves again")
        for (where, cause), count in failed.items():
            last = max(fact["t"] for fact in facts if fact["event"] == "failed")
            self._event(last, f"{name} failed {count} rooms at {where} ({cause})")

    def _event(self, t: int, text: str) -> None:
        self.events.append(f"{(t - self.start_ns) / 1e9:5.1f} s  {text}")

    def totals(self) -> Counter[str]:
        """Over all processes."""
        return sum(self.counts.values(), Counter())

    def line(self) -> str:
        """The whole board in one line."""
        t = self.totals()
        states = " ".join(f"{address}={view.state if view else '-'}" for address, _, view in self.nodes)
        stored = sum(view.rooms for _, _, view in self.nodes if view)
        text = f"{self.second:5.1f} s  {states}  rooms open {stored} succeeded {t['succeeded']} failed {t['failed']}"
        return (
            text
            + (f"  next {self.next_fault}" if self.next_fault else "")
            + (f"  {self.trouble}" if self.trouble else "")
        )

    def tables(self) -> Group:
        """The live view."""
        head = Text(
            f"{self.second:5.1f} s of {self.seconds:g}   seed {self.seed}   next fault: {self.next_fault or 'none'}"
        )
        nodes = _table("address", "process", "state", ">epoch", ">rooms", ">workers", "last failure")
        for address, process, view in self.nodes:
            seen = ["-"] * 5
            if view is not None:
                failure = f"{view.failure.cause}, {view.failure.age_ms / 1000:.1f} s ago" if view.failure else ""
                seen = [_styled(view.state), str(view.epoch), str(view.rooms), str(view.watchers), failure]
            nodes.add_row(address, _styled(process), *seen)
        workers = _table("worker", "process", ">open", ">succeeded", ">failed", ">refused")
        for name, process in self.workers:
            c = self.counts.get(name, Counter())
            still = "-" if process == "killed" else str(c["opened"] - c["left"] - c["stuck"])
            workers.add_row(name, _styled(process), still, str(c["succeeded"]), str(c["failed"]), str(c["refused"]))
        trouble = [Text(f"store: {self.trouble}", style="yellow")] if self.trouble else []
        return Group(head, nodes, workers, *trouble, Text("\n".join(self.events)))


class Display:
    """Shows a board: live on a terminal, else a line a second. Writes to stderr unless another console is given."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        )
        self._next = 0.0

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One event. Above the live table, so that it stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, board: Board) -> None:
        """Draw, not more often than is useful."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._live is not None:
            self._next = now + _DRAW_S
            self._live.update(board.tables(), refresh=True)
        else:
            self._next = now + _LINE_S
            self.say(board.line())


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the result for people: faults, totals, and what is wrong if anything is."""
    console = console or Console(highlight=False)
    # Fits 80 columns. The first and the last owner's time are ms after the fault; the causes are in --json.
    faults = _table("fault", ">at", "target", ">rooms", ">failed", ">twice", ">missed", ">first ms", ">last ms")
    for fault in result["faults"]:
        times = [_ms(fault[name]) for name in ("first_ms", "all_ms")]
        numbers = [str(fault[name]) for name in ("affected", "failed", "failed_twice", "missed")]
        target = fault["address"] or fault["worker"] or "store"
        faults.add_row(fault["kind"], f"{fault['at_s']:.0f} s", target, *numbers, *times)
    console.print(faults)
    rooms = result["rooms"]
    console.print("rooms: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in rooms.items()))
    names = ("false_failures", "probes_sent", "keys_without_ttl")
    console.print(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in names))
    if result["ok"]:
        console.print("ok: every owner was told of every room, once, and nobody else was", style="green")
        return
    for problem in result["problems"]:
        console.print(f"not ok: {problem}", style="red", markup=False)
    if result.get("recorded_in"):
        console.print(f"what every process recorded, and its log: {result['recorded_in']}", markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _styled(state: str) -> str:
    style = _STYLES.get(state)
    return f"[{style}]{state}[/]" if style else state


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
