"""What a rank is called: readable in redis-cli, and which ranks belong to one decode engine."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

GROUP = "COORDINATOR_GROUP"
_BAD = re.compile(r"[^A-Za-z0-9._-]+")


def rank_names(manager: Any) -> tuple[str, str]:
    """(name, group) of a decode manager's worker.

    The ranks of one engine share `dist_init_addr` if it spans several hosts, else this host and the HTTP port.
    COORDINATOR_GROUP says otherwise; "-" means no group.
    """
    args = manager.kv_args
    ranks = [("tp", getattr(args, "engine_rank", 0)), ("pp", getattr(args, "pp_rank", 0))]
    ranks += [("dp", getattr(manager, "system_dp_rank", 0))]
    name = "decode-" + "-".join(f"{axis}{int(rank or 0)}" for axis, rank in ranks if rank or axis == "tp")
    given = os.environ.get(GROUP, "").strip()
    group = given or getattr(manager, "dist_init_addr", None) or f"{socket.gethostname()}-{_http_port()}"
    return clean(name), "" if group == "-" else clean(str(group))


def clean(text: str) -> str:
    """`text` as a name: what a name cannot hold becomes '-', and the end is kept if it is too long."""
    return _BAD.sub("-", text)[-64:].lstrip("._-") or "x"


def _http_port() -> int:
    try:
        from sglang.srt.runtime_context import get_serving

        return int(get_serving().port)
    except Exception:  # another version, or no server: the host alone
        return 0
