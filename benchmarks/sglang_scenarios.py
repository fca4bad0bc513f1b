"""The scenarios of sglang_side_by_side.py: each drives real SGLang processes and returns what it measured.

A Side is one fleet of decode ranks, stock or plugged in. Stock and plugged in never share a node that fails, so that
neither sees the other's traffic. Times are seconds from the event to what was waited for; None is "never", within the
cap that was waited.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_child
from bed import Bed, Decode, FakePrefill, Prefill
from util import wait_until

BACKEND = "mooncake"
HERE = str(Path(__file__).resolve().parent)
_numbers = itertools.count(random.randrange(2**62), 7)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything; `beat_s` is stock's heartbeat interval, None its default of 5 s."""

    ranks: int = 8
    rooms: int = 100
    rounds: int = 3
    hung: int = 5
    nodes: int = 4
    window_s: float = 20.0
    cap_s: float = 20.0
    hung_cap_s: float = 50.0
    races: int = 100
    dead: int = 1000
    forget_s: float = 100.0  # six leases after the last verdict of a thousand
    cost_rooms: int = 1000
    cost_rounds: int = 32
    beat_s: float | None = None


FULL = Scale()
QUICK = Scale(
    ranks=4, rooms=10, rounds=1, hung=1, nodes=2, window_s=4, cap_s=7, hung_cap_s=20, races=12, dead=20, forget_s=0,
    cost_rooms=200, cost_rounds=8, beat_s=2.0,
)  # fmt: skip


@dataclass(slots=True)
class Side:
    """One fleet: its ranks, and the url that plugs it in or None."""

    bed: Bed
    ranks: list[Decode]
    url: str | None
    scale: Scale

    @property
    def name(self) -> str:
        """For messages."""
        return "plugged" if self.url else "stock"

    def node(self, **settings: Any) -> Prefill:
        """A real prefill process of this side."""
        return self.bed.prefill(BACKEND, url=self.url, **settings)

    def open(self, address: str, n: int, ranks: list[Decode] | None = None) -> list[int]:
        """Open `n` rooms at `address` in each rank."""
        asked, rooms = ranks or self.ranks, list(itertools.islice(_numbers, n))
        for rank, found in zip(asked, self.bed.ask(asked, do="ensure", address=address), strict=True):
            assert found, f"rank {self.ranks.index(rank)} ({self.name}) does not reach {address}:\n{rank.log()[-2000:]}"
        self.bed.ask(asked, do="open", address=address, rooms=rooms)
        return rooms


def nodes(bed: Bed, n: int) -> list[FakePrefill]:
    """`n` prefill nodes; a port that somebody else has taken meanwhile is another one."""
    made: list[FakePrefill] = []
    while len(made) < n:
        with contextlib.suppress(OSError):
            made += bed.fakes(1)
    return made


def ended(node: FakePrefill) -> socket.socket:
    """End a node and hold its port, which refuses from now on."""
    node.stop()
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", node.port))
    return held


def order(function: str, **arguments: Any) -> dict[str, Any]:
    """The order that calls a function of sglang_child.py."""
    names = {"receivers": "rooms", "manager": "manager", "receiver": "receiver"}
    wanted = inspect.signature(getattr(sglang_child, function)).parameters
    given = [f"{name}={names[name]}" for name in names if name in wanted]
    given += [f"{name}={value!r}" for name, value in arguments.items()]
    code = f"import sys; sys.path.insert(0, {HERE!r}); import sglang_child\n"
    return {"do": "python", "code": f"{code}result = sglang_child.{function}({', '.join(given)})"}


def fails(ranks: list[Decode], rooms: list[int], event: Any, cap_s: float) -> list[float | None]:
    """Per rank, seconds from `event` (called once all ranks watch; answers its time, or None for now) to the last."""
    for rank in ranks:
        rank.send(**order("wait_failed", rooms=rooms, cap_s=cap_s + 2, pause_s=0.002))
    time.sleep(0.3)
    at = event() or time.monotonic()
    seen = [rank.read(cap_s + 30) for rank in ranks]
    return [None if one["last"] is None else one["last"] - at for one in seen]


def last_of(times: list[float | None]) -> float | None:
    """The last rank's time; None if one never failed all."""
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if len(known) == len(times) else None


def kill(side: Side, node: Prefill, hung: list[FakePrefill], cap_s: float) -> list[float | None]:
    """kill -9 of a prefill with rooms in every rank; `hung` nodes, ahead of it in the tables, hang from then on.

    Plugged in, at the worst moment, just after a probe, so that rounds can be compared: one probe serves all ranks.
    Stock, at any moment: each rank beats at its own time.
    """
    for fake in hung:
        side.open(fake.address, 1)
    rooms = side.open(node.address, side.scale.rooms)
    time.sleep(1.0 + random.random())

    def event() -> float:
        if side.url:
            beats = len(node.ask(do="health"))
            wait_until(lambda: len(node.ask(do="health")) > beats, 10, "a probe")
            time.sleep(0.1)  # its answer arrives: a probe that breaks would tell at once
        for fake in hung:
            fake.hung = True
        return node.kill()

    times = fails(side.ranks, rooms, event, cap_s)
    side.bed.ask(side.ranks, do="clear", rooms=rooms)
    for fake in hung:
        fake.stop()
    return times


class Health:
    """Requests to /health at each side's own nodes, a room of every rank at each, in a window that begins soon."""

    def __init__(self, both: list[Side]) -> None:
        scale, bed = both[0].scale, both[0].bed
        self._nodes = {side.name: nodes(bed, scale.nodes) for side in both}
        for side in both:
            for node in self._nodes[side.name]:
                side.open(node.address, 1)
        self._start = time.monotonic() + 2
        self._end = self._start + scale.window_s

    def counts(self) -> dict[str, int]:
        """By side, when the window is over."""
        time.sleep(max(0.0, self._end + 0.1 - time.monotonic()))
        return {
            name: sum(self._start <= at < self._end for node in nodes for at in node.healths)
            for name, nodes in self._nodes.items()
        }


def restart(side: Side, rank: Decode) -> dict[str, float | None]:
    """Another process takes over the address within a fraction of a beat.

    Answers `old_s`, until the old rooms have failed, and `reached`, the share of new requests whose message the new
    process got. The next process has imported everything already and binds the port when the old one is gone.
    """
    old = side.node()
    rooms = side.open(old.address, 10, [rank])
    new = side.node(port=old.settings["port"], server=False, tp_ranks=[])
    wait_until(lambda: old.ask(do="health"), 10, "a beat")
    beats = len(old.ask(do="health"))
    wait_until(lambda: len(old.ask(do="health")) > beats, 12, "the next beat")
    code = (
        f"managers.append(context.bootstrap_class({BACKEND!r})('127.0.0.1', {old.settings['port']}))\n"
        f"__import__('__main__')._wait_for_server(managers[0])\n"
        f"managers.append(context.make_manager({BACKEND!r}, 'prefill', bootstrap_port={old.settings['port']}))"
    )

    def event() -> float:
        at = old.kill()
        new.ask(do="python", code=code)
        return at

    old_s = last_of(fails([rank], rooms, event, side.scale.cap_s))
    fresh = side.open(old.address, 10, [rank])
    time.sleep(1)
    heard = {frame for _, _, frames in new.ask(do="messages") for frame in frames}
    reached = sum(str(room) in heard for room in fresh) / len(fresh)
    rank.ask(do="clear", rooms=rooms + fresh)
    new.kill()
    return {"old_s": old_s, "reached": reached}


def prefix(side: Side, rank: Decode) -> dict[str, float | None]:
    """Of two nodes one's address begins with the other's, which ends: is the living one's pool entry still there?"""
    short, long = side.bed.fakes(2, ports=prefix_ports())
    side.open(long.address, 1, [rank])
    rooms = side.open(short.address, 1, [rank])

    seconds = fails([rank], rooms, short.stop, side.scale.cap_s)[0]
    time.sleep(0.5)  # plugged in, SGLang's clean-up comes after the failure
    pool = rank.ask(do="sizes")["pool"]
    long.stop()
    return {"failed_s": seconds, "survives": float(any(key.startswith(f"{long.address}_") for key in pool))}


def prefix_ports() -> tuple[int, int]:
    """Two free ports, one of which begins with the other."""
    for short in random.sample(range(2000, 6500), 200):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in (short, 10 * short + 3):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return short, 10 * short + 3
    raise AssertionError("no free pair of ports")


def raising(side: Side, rank: Decode) -> dict[str, float | None]:
    """SGLang's clean-up raises at one node's failure; `next_s`: until the next node's rooms fail."""
    first, second = nodes(side.bed, 2)
    rooms, others = side.open(first.address, 1, [rank]), side.open(second.address, 10, [rank])
    rank.ask(**order("raise_once", address=first.address))
    first.stop()
    wait_until(lambda: "a hook of a backend raised" in rank.log(), side.scale.cap_s, "the handler to raise")
    time.sleep(0.5)
    alive = "HeartbeatChecker" in rank.ask(do="threads")
    seconds = fails([rank], others, second.stop, side.scale.cap_s)[0]
    rank.ask(do="clear", rooms=rooms + others)
    return {"next_s": seconds, "thread": float(alive)}


def race(side: Side, rank: Decode) -> dict[str, int]:
    """See sglang_child.race."""
    fakes = nodes(side.bed, side.scale.races + 1)
    found: dict[str, int] = rank.ask(**order("race", addresses=[fake.address for fake in fakes]), timeout_s=300)
    for fake in fakes:
        fake.stop()
    return found


def dead(sides: list[Side]) -> dict[str, dict[str, Any]]:
    """Two ranks have a room at each of many nodes, which all end, 50 a second: what one has left after clearing them.

    Two, because a worker that is the only one to see so many dead at once doubts itself and waits for longer.
    """
    scale, ranks = sides[0].scale, {side.name: side.ranks[-2:] for side in sides}
    fakes = nodes(sides[0].bed, scale.dead)
    homes = {next(_numbers): fake.address for fake in fakes}
    asked = [rank for pair in ranks.values() for rank in pair]
    before = {name: pair[0].ask(**order("left")) for name, pair in ranks.items()}
    bed = sides[0].bed
    answered = bed.ask(asked, **order("open_each", homes=homes), timeout_s=240)
    assert all(n == scale.dead for n in answered), f"of {scale.dead} addresses answered {answered}"
    with contextlib.ExitStack() as held:  # nobody else on this machine must get one of so many ports
        for number, fake in enumerate(fakes):
            held.enter_context(ended(fake))
            if number % 10 == 9:
                time.sleep(0.2)  # a rack after the other: 50 nodes a second
        return _left_of_dead(sides, ranks, list(homes), before)


def _left_of_dead(
    sides: list[Side], ranks: dict[str, list[Decode]], rooms: list[int], before: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Wait until the rooms have failed, clear them, and wait until nothing is left, or for long enough."""
    scale, bed, asked = sides[0].scale, sides[0].bed, [rank for pair in ranks.values() for rank in pair]
    at = time.monotonic()
    seen = bed.ask(asked, **order("wait_failed", rooms=rooms, cap_s=2 * scale.cap_s, pause_s=0.1), timeout_s=240)
    bed.ask(asked, do="clear", rooms=rooms, timeout_s=120)
    found: dict[str, dict[str, Any]] = {}
    for name, one in zip(ranks, seen[::2], strict=True):
        found[name] = {"failed_s": None if one["last"] is None else one["last"] - at}
    end = time.monotonic() + scale.forget_s + 3
    while True:
        for name, pair in ranks.items():
            after = pair[0].ask(**order("left"))
            found[name]["left"] = {what: max(0, n - before[name][what]) for what, n in after.items()}
        if time.monotonic() > end or not any(n for what, n in found["plugged"]["left"].items() if what != "threads"):
            return found
        time.sleep(1)


def cost(sides: list[Side], client: Any) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Medians of short rounds, asked of a rank of each side in turn, while the worker shares 100 standing rooms.

    Every round is another pair of ranks: two processes that do the same differ by as much as what is measured.

    `burst`: many requests at once. `alone`: a single one after a pause, cold, with what it costs to wake the worker.
    """
    scale, [fake] = sides[0].scale, nodes(sides[0].bed, 1)
    standing = {side.name: side.open(fake.address, 100) for side in sides}
    wait_until(lambda: _shared(client, fake.address) >= 100, 10, "the worker to share its rooms")
    taken = {side.name: {"burst": dict[str, list[float]](), "alone": dict[str, list[float]]()} for side in sides}
    for number in range(scale.cost_rounds):
        for side in sides if number % 2 else sides[::-1]:
            for how, n in (("burst", scale.cost_rooms), ("alone", 1)):
                rooms = list(itertools.islice(_numbers, n))
                call = order("cost", address=fake.address, numbers=rooms, rounds=3, rest_s=0.01)
                for what, value in side.ranks[number // 2 % scale.ranks].ask(**call, timeout_s=120).items():
                    taken[side.name][how].setdefault(what, []).append(value)
    for side in sides:
        side.bed.ask(side.ranks, do="clear", rooms=standing[side.name])
    fake.stop()
    return taken


def _shared(client: Any, address: str) -> int:
    """Rooms at an address in the store."""
    return sum(client.scard(key) for key in client.keys(f"*{{{address}}}:rooms:*"))


@contextlib.contextmanager
def sides(scale: Scale, url: str) -> Iterator[list[Side]]:
    """Both fleets, ready; all that they start is ended."""
    env = {"TEST_LOG": "ERROR"}
    if scale.beat_s is not None:
        env["SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"] = f"{scale.beat_s:g}"
    with Bed() as bed:
        yield [Side(bed, bed.decodes(scale.ranks, BACKEND, url=one, env=env), one, scale) for one in (None, url)]
