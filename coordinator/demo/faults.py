"""What is done to the processes, when and to whom. Pure: a plan is decided before anything starts.

The seed picks each target, so that the same options give the same plan. A plan that cannot be carried out (start a
node while none is down, kill the last worker, a fault after the end) is a ConfigError before anything starts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError

KILL_NODE, START_NODE, STOP_NODE, RESTART_NODE = "kill-node", "start-node", "stop-node", "restart-node"
KILL_WORKER, PAUSE_STORE, FLUSH_STORE = "kill-worker", "pause-store", "flush-store"

#: What each kind does, for help texts.
KINDS: dict[str, str] = {
    KILL_NODE: "SIGKILL a node",
    START_NODE: "start the node that was killed last, at the same address",
    STOP_NODE: "SIGSTOP a node; it goes on 10 s later, or at the end",
    RESTART_NODE: "SIGKILL a node and have another process at its address within milliseconds",
    KILL_WORKER: "SIGKILL a worker",
    PAUSE_STORE: "the store answers nobody for 2 s (CLIENT PAUSE)",
    FLUSH_STORE: "the store loses everything (FLUSHALL, SCRIPT FLUSH)",
}
#: Faults after which the rooms at the address must fail.
FAILING = (KILL_NODE, STOP_NODE, RESTART_NODE)

STOPPED_S = 10.0
PAUSED_S = 2.0
DEFAULT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault at a time, in seconds after the workers have begun."""

    kind: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.kind}@{self.at_s:g}"


DEFAULT_FAULTS = (Fault(KILL_NODE, 4), Fault(START_NODE, 7), Fault(KILL_WORKER, 9))


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault with its target: the index of a node or of a worker, None for the store."""

    fault: Fault
    target: int | None


def parse_fault(text: str) -> Fault:
    """Read "kill-node@4.5"; raise ConfigError naming the kinds there are."""
    kind, at, second = text.strip().partition("@")
    if kind not in KINDS:
        raise ConfigError(f"fault {text!r}: the kind must be one of {', '.join(KINDS)}")
    try:
        at_s = float(second)
    except ValueError:
        at_s = math.nan
    if not at or not math.isfinite(at_s) or at_s < 0:
        raise ConfigError(f"fault {text!r}: write KIND@SECOND, for example {kind}@4.5")
    return Fault(kind, at_s)


def default_faults(seconds: float) -> tuple[Fault, ...]:
    """Kill a node, start it, kill a worker: at 4, 7 and 9 s, earlier in a run of less than 15 s."""
    scale = min(1.0, seconds / DEFAULT_SECONDS)
    return tuple(Fault(fault.kind, round(fault.at_s * scale, 3)) for fault in DEFAULT_FAULTS)


def plan(faults: Sequence[Fault], nodes: int, workers: int, seconds: float, seed: int) -> tuple[Planned, ...]:
    """Give each fault its target, in the order of time. Raises ConfigError for what cannot be carried out."""
    dice = random.Random(f"faults {seed}")
    planned: list[Planned] = []
    down: list[int] = []
    stopped: dict[int, float] = {}
    gone: set[int] = set()
    for fault in sorted(faults, key=lambda f: f.at_s):
        if fault.at_s >= seconds:
            raise ConfigError(f"fault {fault} lies behind the end of the run ({seconds:g} s): give more --seconds")
        target: int | None = None
        if fault.kind in FAILING:
            busy = {*down, *(node for node, until in stopped.items() if fault.at_s < until)}
            target = _pick(dice, [n for n in range(nodes) if n not in busy], fault, "no node is running then")
            if fault.kind == KILL_NODE:
                down.append(target)
            elif fault.kind == STOP_NODE:
                stopped[target] = fault.at_s + STOPPED_S
        elif fault.kind == START_NODE:
            if not down:
                raise ConfigError(f"fault {fault}: no node is down then; put a {KILL_NODE} before it")
            target = down.pop()
        elif fault.kind == KILL_WORKER:
            alive = [w for w in range(workers) if w not in gone]
            target = _pick(dice, alive if len(alive) > 1 else [], fault, "no worker would be left")
            gone.add(target)
        planned.append(Planned(fault, target))
    return tuple(planned)


def _pick(dice: random.Random, choices: list[int], fault: Fault, problem: str) -> int:
    if not choices:
        raise ConfigError(f"fault {fault}: {problem}")
    return dice.choice(choices)
