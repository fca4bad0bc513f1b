"""The options of the two kinds of process, apart from them so that whoever starts one need not import what it does."""

from __future__ import annotations

from dataclasses import dataclass

STUCK_S = 30.0  # a room that is told nothing for so long is recorded as stuck
TCP, MOONCAKE, NIXL = TRANSPORTS = ("tcp", "mooncake", "nixl")
LOOK_S = 2.0  # how often a worker without a list of nodes looks for them in the store


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """`address` is what peers connect to (host:port; the streams use port + 1), `bind` what to listen on, `transport`
    how the bytes of rooms travel.

    `facts` is the file to record to (empty: none), `parent` the pid to die with, `wait` to wait for a line on stdin.
    """

    address: str
    bind: str = ""
    url: str = ""
    transport: str = TCP
    facts: str = ""
    parent: int = 0
    wait: bool = False


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`rate` is this worker's rooms a second for `seconds` (0: until a signal); a `trace` replaces the rate.

    `nodes` are addresses; none: those that the store knows, looked up every LOOK_S. `index` of `count` says which rows
    of a trace are this worker's. `facts`, `parent`, `wait`: as for a node.
    """

    name: str = "worker"
    nodes: tuple[str, ...] = ()
    rate: float = 20.0
    seconds: float = 0.0
    seed: int = 1
    trace: str = ""
    speed: float = 1.0
    index: int = 0
    count: int = 1
    report_errors: bool = True
    transport: str = TCP
    url: str = ""
    facts: str = ""
    parent: int = 0
    wait: bool = False
