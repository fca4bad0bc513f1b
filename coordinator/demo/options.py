"""What a run is asked to do, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError
from .faults import DEFAULT_SECONDS, Fault, Planned, default_faults, plan
from .roles import TCP, TRANSPORTS
from .trace import summarize

DEFAULT_RATE = 120.0
LONGEST_REPLAY_S = 300.0
MAX_NODES, MAX_WORKERS, MAX_RATE = 64, 64, 5000.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """All of a run. None means: the default that fits the rest.

    `rate` is rooms a second in all (not with a trace), `speed` how much faster than recorded a trace is replayed,
    `faults` empty for none. `store` is a URL; empty: a private embedded server. `report_errors` False makes workers
    keep broken transfers to themselves, so that probes alone find the dead node. `transport` is how the
    bytes of rooms travel.
    """

    nodes: int = 3
    workers: int = 6
    rate: float | None = None
    seconds: float | None = None
    trace: str = ""
    speed: float = 1.0
    faults: tuple[Fault, ...] | None = None
    store: str = ""
    seed: int = 1
    report_errors: bool = True
    transport: str = TCP
    #: For tests of the audit itself: worker index -> (module to run instead, folder to find it in).
    _worker_modules: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    def resolve(self) -> Resolved:
        """Check everything and fill in the defaults. Raises ConfigError; a bad line of a trace is found here."""
        _check("--nodes", self.nodes, 1, MAX_NODES)
        _check("--workers", self.workers, 1, MAX_WORKERS)
        _check("--speed", self.speed, 1e-6, 1e6)
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"--transport is {self.transport!r}: it must be one of {', '.join(TRANSPORTS)}")
        if self.rate is not None:
            if self.trace:
                raise ConfigError("--rate and --trace exclude each other: use --speed to change a trace's rate")
            _check("--rate", self.rate, 0.1, MAX_RATE)
        if self.seconds is not None:
            _check("--seconds", self.seconds, 1, 86400)
        if self.speed != 1.0 and not self.trace:
            raise ConfigError("--speed needs a --trace")
        requests, note = None, ""
        seconds = self.seconds or DEFAULT_SECONDS
        if self.trace:
            summary = summarize(self.trace, self.speed, self.seconds or LONGEST_REPLAY_S)
            requests = summary.requests
            seconds = self.seconds or max(1.0, math.ceil(summary.seconds))
            if not self.seconds and summary.cut:
                note = f"replaying the first {LONGEST_REPLAY_S:g} s of the trace: give --seconds or --speed for more"
        faults = default_faults(seconds) if self.faults is None else self.faults
        if self.faults is None and self.workers == 1:
            faults = tuple(fault for fault in faults if fault.kind != "kill-worker")
        planned = plan(faults, self.nodes, self.workers, seconds, self.seed)
        return Resolved(seconds, self.rate or DEFAULT_RATE, requests, planned, note)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What follows from the options. `requests` is known for a trace only; `note` is for people, may be empty."""

    seconds: float
    rate: float
    requests: int | None
    plan: tuple[Planned, ...]
    note: str


def _check(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}: it must be from {low:g} to {high:g}")
