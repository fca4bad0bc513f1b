"""Which SGLang this plug-in knows, and what it needs of it. All of it or nothing: half a plug-in would be worse."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import re
from typing import Any

KNOWN = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
_CONN = "sglang.srt.disaggregation.common.conn"
#: What is hooked or relied upon, with the parameters it is called with.
SYMBOLS: dict[str, tuple[str, ...]] = {
    f"{_CONN}.CommonKVManager.__init__": ("self", "args", "disaggregation_mode"),
    f"{_CONN}.CommonKVManager._start_heartbeat_checker_thread": ("self",),
    f"{_CONN}.CommonKVManager._handle_node_failure": ("self", "failed_bootstrap_addr"),
    f"{_CONN}.CommonKVManager.try_ensure_parallel_info": ("self", "bootstrap_addr"),
    f"{_CONN}.CommonKVManager.update_status": ("self", "bootstrap_room", "status"),
    f"{_CONN}.CommonKVManager.record_failure": ("self", "bootstrap_room", "failure_reason"),
    f"{_CONN}.CommonKVReceiver.__init__": ("self", "mgr", "bootstrap_addr", "bootstrap_room"),
    f"{_CONN}.CommonKVBootstrapServer._setup_routes": ("self",),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.plugins.hook_registry.HookType.AROUND": (),
    "sglang.srt.disaggregation.base.conn.KVPoll": (),
}
#: What a decode manager must have when it is made.
ATTRIBUTES = (
    "addr_to_rooms_tracker",
    "connection_lock",
    "connection_pool",
    "disaggregation_mode",
    "failure_records",
    "kv_args",
    "prefill_info_table",
    "prefill_response_tracker",
    "request_status",
    "required_prefill_response_num_table",
)


def version() -> str:
    """The installed SGLang's version, "" if it has none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def problem(found: str | None = None) -> str:
    """Why this SGLang cannot be plugged into, "" if it can."""
    found = version() if found is None else found
    if _base(found) not in KNOWN:
        return f"SGLang {found or 'without a version'} is not known: known are {KNOWN[0]} to {KNOWN[-1]}"
    for name, parameters in SYMBOLS.items():
        try:
            symbol = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as exc:
            return f"SGLang {found} has no {name} ({exc})"
        missing = [p for p in parameters if p not in _parameters(symbol)]
        if missing:
            return f"SGLang {found}: {name} has no parameter {missing[0]!r}"
    return ""


def lacks(manager: Any) -> str:
    """The name of what a decode manager lacks, "" if nothing."""
    return next((name for name in ATTRIBUTES if not hasattr(manager, name)), "")


def _base(found: str) -> str:
    """The release that a version belongs to: 0.5.23.post1+cu130 is 0.5.23; a release candidate is none."""
    match = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", found)
    return match.group(1) if match else ""


def _parameters(symbol: Any) -> list[str]:
    try:
        return list(inspect.signature(inspect.unwrap(symbol)).parameters)
    except (TypeError, ValueError):
        return []
