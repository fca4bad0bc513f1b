"""Shared rooms for disaggregated LLM serving: names only, loaded when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Settings
    from .decide.ledger import Room
    from .errors import (
        ConfigError,
        CoordinatorError,
        InvalidAddress,
        InvalidRoom,
        InvalidStatus,
        JoinRefused,
        NodeSuperseded,
        RoomExists,
        ScriptFault,
        StoreNotFound,
        StoreRefused,
        StoreUnavailable,
        UnknownAddress,
        WorkerClosed,
    )
    from .node import PrefillNode
    from .rooms import Cause, Failure, Status
    from .runtime.probe import HttpProbe, Probe, Sight
    from .worker import NodeFailure, Worker

__version__ = "0.1.0"

_HOMES = {
    "config": ("Settings",),
    "decide.ledger": ("Room",),
    "errors": (
        "ConfigError", "CoordinatorError", "InvalidAddress", "InvalidRoom", "InvalidStatus", "JoinRefused",
        "NodeSuperseded", "RoomExists", "ScriptFault", "StoreNotFound", "StoreRefused", "StoreUnavailable",
        "UnknownAddress", "WorkerClosed",
    ),
    "node": ("PrefillNode",),
    "rooms": ("Cause", "Failure", "Status"),
    "runtime.probe": ("HttpProbe", "Probe", "Sight"),
    "worker": ("NodeFailure", "Worker"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Cause",
    "ConfigError",
    "CoordinatorError",
    "Failure",
    "HttpProbe",
    "InvalidAddress",
    "InvalidRoom",
    "InvalidStatus",
    "JoinRefused",
    "NodeFailure",
    "NodeSuperseded",
    "PrefillNode",
    "Probe",
    "Room",
    "RoomExists",
    "ScriptFault",
    "Settings",
    "Sight",
    "Status",
    "StoreNotFound",
    "StoreRefused",
    "StoreUnavailable",
    "UnknownAddress",
    "Worker",
    "WorkerClosed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
