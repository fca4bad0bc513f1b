"""Stock SGLang and SGLang with this plug-in, side by side in one run: what docs/sglang.md shows.

Real decode managers and receivers in processes of their own, eight ranks of each kind, SGLang's default settings and
ours, one redis-server. What takes milliseconds is measured in turn, in several rounds, and its median is shown; what
only waits for stock's heartbeat runs beside each other. Runs about five minutes. Exits 1 if a goal is missed.

    make bench-sglang                                     in the environment of make test-sglang, newest version
    python benchmarks/sglang_side_by_side.py [--quick] [--json] [--write-docs] [--url redis://...]

--quick (below a minute) only shows that it runs: four ranks, stock beats every 2 s, goals do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "plugin")]

import sglang_scenarios as scenarios  # noqa: E402
from sglang_report import Report, write_docs  # noqa: E402

if TYPE_CHECKING:
    from sglang_scenarios import Scale, Side

DOCS = ROOT / "docs" / "sglang.md"
#: Scenarios of one rank, and which; dead addresses are the last two's.
RANK_OF = {"restart": 0, "prefix": 1, "race": 1, "raising": 1}


class Run:
    """All scenarios over two fleets, in an order in which none disturbs what another measures."""

    def __init__(self, both: list[Side], client: Any, say: Callable[[str], None]) -> None:
        self.both, self.client, self.say = both, client, say
        self.scale: Scale = both[0].scale
        self.bed = both[0].bed
        self.found: dict[str, Any] = {"kill": {"stock": [], "plugged": []}, "hung": {"stock": [], "plugged": []}}

    def all(self) -> dict[str, Any]:
        """What was measured, by scenario."""
        stock, plugged = self.both
        scenarios.nodes(self.bed, 1)  # starts the thread that all of them share
        self.kills()
        self.say("cost of calls")
        self.found["cost"] = scenarios.cost(self.both, self.client)
        with ThreadPoolExecutor(8) as pool:
            self.say("hung nodes; restart, prefix, exception, race of the plugged side")
            waiting = pool.submit(self.kill_one, stock, "hung")
            for _ in range(self.scale.rounds):
                self.kill_one(plugged, "hung")
            self.some(RANK_OF, plugged)
            waiting.result()
            self.say("/health; restart, prefix, race of the stock side")
            counting = scenarios.Health(self.both)
            others = pool.submit(self.some, ("prefix", "race"), stock)
            self.single("restart", stock)
            others.result()
            self.found["health"] = counting.counts()
            self.say("dead addresses; exception of the stock side, whose heartbeat ends with it")
            last = pool.submit(self.single, "raising", stock)
            self.found["dead"] = scenarios.dead(self.both)
            last.result()
        return self.found

    def kills(self) -> None:
        """Rounds of kill -9, stock and plugged in turn; the plugged side, which is quick, twice each time."""
        for number in range(self.scale.rounds):
            self.say(f"kill -9, round {number + 1} of {self.scale.rounds}")
            for side in self.both if number % 2 else self.both[::-1]:
                for _ in range(2 if side.url and self.scale.rounds > 1 else 1):
                    self.kill_one(side, "kill")

    def kill_one(self, side: Side, what: str) -> None:
        """One kill -9, its times added."""
        start = time.monotonic()
        hung = scenarios.nodes(self.bed, self.scale.hung) if what == "hung" else []
        node = side.node()
        cap_s = self.scale.hung_cap_s if hung else self.scale.cap_s
        self.found[what][side.name].append(scenarios.kill(side, node, hung, cap_s))
        self.say(f"  {what}, {side.name}: {time.monotonic() - start:.0f} s")

    def some(self, names: Iterable[str], side: Side) -> None:
        """Scenarios of one rank, one after the other."""
        for name in names:
            self.single(name, side)

    def single(self, name: str, side: Side) -> None:
        """A scenario of one rank; two at the same time are at different ranks."""
        start = time.monotonic()
        self.found.setdefault(name, {})[side.name] = getattr(scenarios, name)(side, side.ranks[RANK_OF[name]])
        self.say(f"  {name}, {side.name}: {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def store(url: str) -> Iterator[str]:
    """A running store's url, or a redis-server for this run."""
    if url:
        yield url
        return
    from servers import Server

    server = Server("redis").start()
    try:
        yield server.url
    finally:
        server.stop()


def main() -> int:
    """Run it, print it, keep it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="", help="a running store; default: a redis-server for this run")
    options.add_argument("--quick", action="store_true", help="small and fast: only shows that it runs")
    options.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options.add_argument("--write-docs", action="store_true", help="replace the table in docs/sglang.md")
    given = options.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    random.seed()
    scale = scenarios.QUICK if given.quick else scenarios.FULL
    with store(given.url) as url:
        import redis

        say(f"starting {2 * scale.ranks} decode ranks")
        with scenarios.sides(scale, url) as both:
            version = str(both[0].ranks[0].ready["version"])
            found = Run(both, redis.Redis.from_url(url, decode_responses=True), say).all()
    report = Report(found, scale, version, time.monotonic() - start)
    print(json.dumps(report.plain()) if given.json else report.text())
    if given.write_docs:
        write_docs(DOCS, report)
    return 0 if given.quick or report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
