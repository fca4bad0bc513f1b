"""The entry point. SGLang calls `register` first thing in each of its processes.

Without COORDINATOR_URL it does nothing, and imports nothing. With it, hooks are registered for the decode managers
and the bootstrap server, all of them or, if this SGLang is not one that is known, none.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("coordinator")


def register() -> None:
    """Register the hooks with SGLang's HookRegistry. Raises nothing; trouble is one warning, and stock behaviour."""
    if not os.environ.get("COORDINATOR_URL", "").strip():
        return
    try:
        why = _register()
    except Exception as exc:
        log.exception("sglang_not_plugged reason=%r hint='SGLang runs as without the coordinator'", repr(exc))
        return
    if why:
        log.warning("sglang_not_plugged reason=%r hint='SGLang runs as without the coordinator'", why)


def _register() -> str:
    from ..config import Settings
    from ..errors import CoordinatorError
    from ..store.connect import parse_url

    try:
        parse_url(Settings.load().url)
    except CoordinatorError as exc:
        return str(exc)
    from . import compat

    why = compat.problem()
    if why:
        return why
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import decode, prefill

    for target, hook, _ in [*decode.hooks(), *prefill.hooks()]:
        HookRegistry.register(target, hook, HookType.AROUND)
    log.info("sglang_plugged version=%s", compat.version())
    return ""
