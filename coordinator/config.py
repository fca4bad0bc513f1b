"""Settings: frozen, checked once, from arguments over `COORDINATOR_*` variables over defaults.

Every field is one variable (`tick_s` is COORDINATOR_TICK_S). Each has a unit in its name. Relations between
fields are checked when the object is made, so a wrong one stops the start and changes nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from .errors import ConfigError

PREFIX = "COORDINATOR_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def _knob(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Settings:
    """All knobs. Times are seconds; see docs/configuration.md for how they act together.

    Detection time of a killed node is at most `probe_interval_s` plus a few round trips (if the worker whose turn it
    was is gone too, one interval more, or one `tick_s` if that is longer), of a hung node
    2 * max_misses * (probe_interval_s + probe_timeout_s). A dead worker's rooms are gone after `lease_s` + `tick_s`.
    """

    url: str = _knob("", "Store URL; empty: see the order of discovery in the README")
    namespace: str = _knob("coordinator", "First word of every key and of the channel")
    tick_s: float = _knob(0.5, "Idle pace: lease renewal and polling of every address", 0.01, 60)
    flush_s: float = _knob(0.005, "Pace of writes while rooms open and close", 0.0005, 1)
    lease_s: float = _knob(5.0, "How long a silent worker stays listed (more than 3 ticks)", 0.05, 3600)
    probe_interval_s: float = _knob(1.0, "An address is probed once per interval by all workers together", 0.02, 600)
    probe_timeout_s: float = _knob(1.0, "A probe unanswered for this long is a miss", 0.01, 60)
    max_misses: int = _knob(2, "Misses in a row that make a worker vote against a node", 1, 100)
    votes: int = _knob(2, "Workers that must agree to fail a node (all, if fewer watch it)", 1, 1000)
    health_path: str = _knob("/health", "HTTP path that a probe GETs")
    instance_header: str = _knob("X-Coordinator-Instance", "Response header that carries the node's instance id")
    instance_field: str = _knob("", "Field of a JSON response that carries the instance id, dots descend")
    call_timeout_s: float = _knob(1.0, "Socket timeout of one store call", 0.05, 60)
    retry_s: float = _knob(5.0, "Deadline of one store operation with all its retries (at least one call)", 0.05, 600)
    batch_rooms: int = _knob(500, "Rooms in one sync call", 1, 6000)
    retention_s: float = _knob(600.0, "TTL of every key after its last use (at least 4 leases)", 0.2, 30 * 86400)
    linger_s: float = _knob(30.0, "How long an acknowledged snapshot stays readable", 0, 86400)
    events_kept: int = _knob(1000, "Entries kept in an address's event stream (trimmed approximately)", 10, 1_000_000)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_field(f.name, getattr(self, f.name), f)
        if not _NAME.fullmatch(self.namespace):
            raise ConfigError(f"namespace {self.namespace!r}: use 1-64 letters, digits, '.', '_' or '-'")
        if not self.health_path.startswith("/"):
            raise ConfigError(f"health_path {self.health_path!r} must start with '/'")
        self._relation(self.lease_s > 3 * self.tick_s, "lease_s > 3 * tick_s")
        self._relation(self.flush_s <= self.tick_s, "flush_s <= tick_s")
        self._relation(self.retention_s >= 4 * self.lease_s, "retention_s >= 4 * lease_s")
        self._relation(self.linger_s <= self.retention_s, "linger_s <= retention_s")
        self._relation(self.retry_s >= self.call_timeout_s, "retry_s >= call_timeout_s")

    def _relation(self, holds: bool, text: str) -> None:
        if holds:
            return
        values = ", ".join(f"{f.name} is {getattr(self, f.name)}" for f in fields(self) if f.name in text.split())
        raise ConfigError(f"{text} does not hold: {values}")

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, /, **given: Any) -> Settings:
        """Settings from `given` (None counts as not given), else from `env` (os.environ), else defaults.

        An unknown argument, or a variable whose text does not parse (an empty number too), raises ConfigError
        naming it.
        """
        env = os.environ if env is None else env
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, f in known.items():
            text = env.get(variable(name))
            if given.get(name) is not None:
                values[name] = given[name]
            elif text is not None:
                values[name] = _parse(variable(name), text.strip(), f.default)
        for name in given:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}: known are {', '.join(known)}")
        return cls(**values)


def variable(name: str) -> str:
    """The environment variable of a field: tick_s -> COORDINATOR_TICK_S."""
    return PREFIX + name.upper()


def variables() -> dict[str, str]:
    """Every variable this package reads for Settings, with its help text."""
    return {variable(f.name): str(f.metadata["help"]) for f in fields(Settings)}


def check_name(name: object, what: str = "name") -> str:
    """Return a worker's name or group: 1-64 letters, digits, '.', '_' or '-'; raise ConfigError otherwise."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ConfigError(f"{what} {ascii(name)[:80]}: use 1-64 letters, digits, '.', '_' or '-', first a letter or digit")


def _parse(name: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    try:
        return type(default)(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} is not {'a whole number' if type(default) is int else 'a number'}"
        ) from None


def _check_field(name: str, value: Any, f: Any) -> None:
    default = f.default
    assert default is not MISSING
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be text, not {value!r}")
        return
    if isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else (int, float)):
        raise ConfigError(
            f"{name} must be {'a whole number' if isinstance(default, int) else 'a number'}, not {value!r}"
        )
    if not math.isfinite(value) or not f.metadata["low"] <= value <= f.metadata["high"]:
        raise ConfigError(f"{name} is {value}: it must be from {f.metadata['low']} to {f.metadata['high']}")
