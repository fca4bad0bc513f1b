"""The table of sglang_side_by_side.py: rows with stable keys, as text, as plain data, and in docs/sglang.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_scenarios import Scale

BEGIN, END = "<!-- side-by-side: begin -->", "<!-- side-by-side: end -->"
HEAD = ("what", "stock", "plugged in", "ratio or gain", "goal", "reached")
SIDES = ("stock", "plugged")
Times = list[float | None]  # of each rank, seconds from the event, None for never
PROBE_S = 1.0  # COORDINATOR_PROBE_INTERVAL_S


@dataclass(slots=True)
class Row:
    """One line. `stock` and `plugged` are numbers in `unit`, None for "never within the time that was waited"."""

    key: str
    what: str
    unit: str
    stock: float | None
    plugged: float | None
    goal: str = ""
    reached: bool | None = None
    stock_text: str = ""
    plugged_text: str = ""
    ratio_text: str = ""

    def cells(self) -> list[str]:
        """As the table shows them."""
        reached = {None: "", True: "yes", False: "NO"}[self.reached]
        texts = (
            self.stock_text or _number(self.stock, self.unit),
            self.plugged_text or _number(self.plugged, self.unit),
        )
        return [self.what, *texts, self.ratio_text or self._ratio(), self.goal, reached]

    def _ratio(self) -> str:
        if not self.stock or not self.plugged:
            return ""
        if self.unit == "ns":
            return f"{self.plugged / self.stock:.2f}x"
        return f"{self.stock / self.plugged:.3g} times less" if self.stock > self.plugged else ""


class Report:
    """Rows of one run."""

    def __init__(self, found: dict[str, Any], scale: Scale, version: str, seconds: float) -> None:
        self.found, self.scale, self.version, self.seconds = found, scale, version, seconds
        self.rows = [*self._failures(), *self._events(), *self._races(), *self._costs()]

    @property
    def ok(self) -> bool:
        """No goal was missed."""
        return all(row.reached is not False for row in self.rows)

    def _failures(self) -> list[Row]:
        s, found = self.scale, self.found
        last = {what: _each(found[what], _last) for what in ("kill", "hung")}
        spread = _each(found["kill"], _spread)
        killed, slowed = last["kill"]["plugged"], last["hung"]["plugged"]
        slower = None if killed is None or slowed is None else slowed / killed - 1
        what = f"kill -9 of the prefill to the last of {s.rooms} rooms in {s.ranks} ranks failed"
        hung = f"the same, {s.hung} hung nodes ahead in the table"
        rows = [
            _row("kill_s", what, "s", last["kill"], "at most 1.5 s", _most(killed, 1.5)),
            _row("hung_s", hung, "s", last["hung"], "less than 20% more", _most(slower, 0.2)),
            _row(
                "spread_ms", "between the first and the last rank", "ms", spread, "at most 50 ms",
                _most(spread["plugged"], 50),
            ),
        ]  # fmt: skip
        if slower is not None:
            rows[1].plugged_text = f"{_number(slowed, 's')} ({slower:+.0%})"
        return rows

    def _events(self) -> list[Row]:
        s, found = self.scale, self.found
        most = round(s.nodes * (s.window_s / PROBE_S + 1))
        old = {side: one["old_s"] for side, one in found["restart"].items()}
        reached = {side: 100 * one["reached"] for side, one in found["restart"].items()}
        kept = {side: one["survives"] for side, one in found["prefix"].items()}
        after = {side: one["next_s"] for side, one in found["raising"].items()}
        asked = f"/health requests in {s.window_s:g} s, {s.ranks} ranks, {s.nodes} nodes"
        restart = "restart between two beats: until the old rooms have failed"
        prefix = "a node ends whose address begins another's: is the other's pool entry kept?"
        raising = "after an exception in the clean-up: until the next node's rooms have failed"
        rows = [
            _row("health_requests", asked, "", found["health"], f"at most {most}", found["health"]["plugged"] <= most),
            _row("restart_s", restart, "s", old, "at most 1.5 s", _most(old["plugged"], 1.5)),
            _row("restart_reached", "new requests that reach it", "%", reached, "all", reached["plugged"] == 100),
            _row("prefix_kept", prefix, "bool", kept, "yes", kept["plugged"] == 1),
            _row("exception_s", raising, "s", after, "at most 1.5 s", _most(after["plugged"], 1.5)),
        ]
        for row in rows:
            if row.unit == "s":
                row.stock_text, row.plugged_text = (_never(one, s.cap_s) for one in (row.stock, row.plugged))
        return rows

    def _races(self) -> list[Row]:
        race, dead = self.found["race"], self.found["dead"]
        opened = {side: one["open"] for side, one in race.items()}
        left = {side: sum(one["left"].values()) - one["left"]["threads"] for side, one in dead.items()}
        what = "a room opened while its node is failed: no failure ever ends it"
        gone = f"{self.scale.dead:,} dead addresses, their rooms cleared: entries left"
        threads = dead["plugged"]["left"]["threads"]  # a pool's few come and stay, one for each address would be a leak
        clean = left["plugged"] == 0 and threads < 10 if self.scale.forget_s else None
        rows = [
            _row("race_open", what, "", opened, "none", opened["plugged"] == 0),
            _row("dead_entries", gone, "", left, "nothing", clean),
        ]
        rows[0].stock_text, rows[0].plugged_text = (f"{race[i]['open']} of {race[i]['races']}" for i in SIDES)
        rows[1].stock_text, rows[1].plugged_text = (_left(dead[side]["left"]) for side in SIDES)
        return rows

    def _costs(self) -> list[Row]:
        cost, rows = self.found["cost"], []
        for call, what, most in (
            ("receiver", "CommonKVReceiver()", 1.25),
            ("poll", "poll()", 1.1),
            ("clear", "clear()", 0),
        ):
            for clock, how in (("cpu", "CPU of the calling thread"), ("wall", "on the clock")):
                key = f"{call}_{clock}_ns"
                values = {side: statistics.median(cost[side]["burst"][key]) for side in SIDES}
                reached = values["plugged"] <= most * values["stock"] if most else None
                rows.append(_row(key, f"{what}, {how}", "ns", values, f"at most {most}x" if most else "", reached))
        return rows

    def plain(self) -> dict[str, Any]:
        """For machines. Keys of rows stay; `found` has every sample, rank by rank."""
        rows = {row.key: asdict(row) | {"key": row.key} for row in self.rows}
        return {
            "sglang": self.version, "ok": self.ok, "seconds": round(self.seconds, 1), "scale": asdict(self.scale),
            "rows": rows, "found": self.found,
        }  # fmt: skip

    def title(self) -> str:
        """What was run."""
        beat = f"{self.scale.beat_s:g} s (not the default)" if self.scale.beat_s else "5 s"
        return f"SGLang {self.version}, {self.scale.ranks} ranks of each kind, stock beats every {beat}"

    def text(self) -> str:
        """For a terminal."""
        lines = [list(HEAD), *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([f"{self.title()}; took {self.seconds:.0f} s", "", *table])

    def markdown(self) -> str:
        """For the documents."""
        lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in self.rows)]
        return "\n".join([f"{self.title()}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def write_docs(path: Path, report: Report) -> None:
    """Replace what is between the two markers; a file that does not exist is made."""
    text = path.read_text() if path.exists() else f"# SGLang\n\n{BEGIN}\n{END}\n"
    before, mark, rest = text.partition(BEGIN)
    _, end_mark, after = rest.partition(END)
    if not mark or not end_mark:
        raise SystemExit(f"{path} has no line {BEGIN!r} followed by {END!r}: add both where the table belongs")
    path.write_text(f"{before}{BEGIN}\n\n{report.markdown()}\n\n{END}{after}")


def _row(
    key: str, what: str, unit: str, values: Mapping[str, float | None], goal: str = "", reached: bool | None = None
) -> Row:
    return Row(key, what, unit, values["stock"], values["plugged"], goal, reached)


def _each(rounds: dict[str, list[Times]], what: Callable[[Times], float | None]) -> dict[str, float | None]:
    """The median over the rounds of each side."""
    return {side: _median([what(times) for times in taken]) for side, taken in rounds.items()}


def _last(times: Times) -> float | None:
    known = [one for one in times if one is not None]
    return max(known) if len(known) == len(times) else None


def _spread(times: Times) -> float | None:
    """Milliseconds between ranks."""
    known = [one for one in times if one is not None]
    return 1000 * (max(known) - min(known)) if len(known) == len(times) else None


def _median(values: Times) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _most(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


def _never(value: float | None, cap_s: float) -> str:
    return "" if value is not None else f"never ({cap_s:g} s)"


def _left(left: dict[str, int]) -> str:
    return ", ".join(f"{what} {n:,}" for what, n in left.items() if n) or "nothing"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "never"
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "s":
        return f"{value:.2f} s"
    text = f"{value:,.0f}"
    return f"{text} {unit}".strip() if unit != "%" else f"{text}%"
