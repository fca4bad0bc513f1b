"""Looks a store over before it is trusted: version, memory policy, persistence, permissions, clock, round trip.

Changes nothing in the store. What this user may not ask is "unknown", never a failure: least privilege is how it
should be run. Only "failed" means that the coordinator cannot work there as it promises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from .inspect import answering
from .store.keys import Keys
from .store.scripts import load, names

OK, WARNING, FAILED, UNKNOWN = "ok", "warning", "failed", "unknown"

#: What is sent as it is, besides scripts: by workers and nodes, and by this package's read-only views.
DIRECT = (
    *("EVAL", "EVALSHA", "PING", "SUBSCRIBE", "UNSUBSCRIBE"),
    *("HGET", "HGETALL", "INFO", "SCARD", "SSCAN", "TIME", "XREAD", "XREVRANGE", "ZRANGE"),
)
_CALL = re.compile(r"redis\.call\(\s*'([A-Z]+)'")
_SLOW_MS, _CLOCK_MS, _OLDEST = 20.0, 5000, (6, 2)

# For each argument a command with its arguments, joined by spaces; answers which of them this user may not run.
_PERMITTED = """
local refused = {}
for _, line in ipairs(ARGV) do
    local words = {}
    for word in string.gmatch(line, '%S+') do words[#words + 1] = word end
    if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = words[1] end
end
return refused
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `outcome` is "ok", "warning", "failed" or "unknown"; `advice` says what to do, or is empty."""

    name: str
    outcome: str
    value: str
    advice: str = ""


def commands() -> tuple[str, ...]:
    """Every command that the store's user needs, sorted: those the scripts call and those sent directly."""
    called = {word for name in names() for word in _CALL.findall(load(name).text)}
    return tuple(sorted(called | set(DIRECT)))


def examine(client: Any, keys: Keys) -> list[Check]:
    """All checks, on each primary of a cluster. Raises StoreUnavailable or StoreRefused if nothing answers at all."""
    with answering():
        if not hasattr(client, "get_primaries"):
            return _server(client, keys)
        found: list[Check] = []
        for node in client.get_primaries():
            checks = _server(client.get_redis_connection(node), keys)
            found += [Check(f"{node.name} {c.name}", c.outcome, c.value, c.advice) for c in checks]
        return found


def _server(client: Any, keys: Keys) -> list[Check]:
    round_trip = _round_trip(client)
    info = _ask(client.info) or {}
    config = {name: _config(client, name) for name in ("maxmemory-policy", "lazyfree-lazy-expire", "save")}
    return [
        round_trip,
        _version(info),
        _role(info),
        _policy(info.get("maxmemory_policy") or config["maxmemory-policy"]),
        _lazy_expire(config["lazyfree-lazy-expire"]),
        _persistence(info, config["save"]),
        _permissions(client, keys),
        _clock(client),
    ]


def _ask(call: Any, *args: Any) -> Any:
    """The answer, or None if this user or this server does not give it."""
    import redis.exceptions as rex

    try:
        return call(*args)
    except rex.ResponseError:  # NOPERM is one, and so is an unknown command
        return None


def _config(client: Any, name: str) -> str | None:
    answer = _ask(client.config_get, name)
    return None if answer is None else str(answer.get(name, "")) if answer else None


def _round_trip(client: Any) -> Check:
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        client.ping()
        taken.append((time.perf_counter() - started) * 1000)
    ms = median(taken)
    advice = f"over {_SLOW_MS:g} ms: every verdict waits for it several times" if ms > _SLOW_MS else ""
    return Check("round-trip", WARNING if advice else OK, f"{ms:.2f} ms", advice)


def _version(info: Mapping[str, Any]) -> Check:
    valkey = info.get("valkey_version")
    text = str(valkey or info.get("redis_version") or "")
    if not text:
        return Check("server", UNKNOWN, "INFO is forbidden", "grant +info to this user to see the version")
    name = f"{'Valkey' if valkey else 'Redis'} {text}, {info.get('redis_mode', info.get('server_mode', 'standalone'))}"
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if not valkey and version < _OLDEST:
        return Check("server", WARNING, name, "older than 6.2: nothing is tested there")
    return Check("server", OK, name)


def _role(info: Mapping[str, Any]) -> Check:
    role = info.get("role")
    if role is None:
        return Check("role", UNKNOWN, "INFO is forbidden")
    if role != "master":
        return Check(
            "role", FAILED, "replica", "writes are refused here: connect to the primary, or use redis+sentinel://"
        )
    return Check("role", OK, "primary")


def _policy(policy: str | None) -> Check:
    name = "maxmemory-policy"
    if policy is None:
        return Check(name, UNKNOWN, "INFO and CONFIG are forbidden", "make sure that it is noeviction")
    if policy != "noeviction":
        return Check(
            name, FAILED, policy, "the server may drop rooms and leases: CONFIG SET maxmemory-policy noeviction"
        )
    return Check(name, OK, policy)


def _lazy_expire(value: str | None) -> Check:
    name = "lazyfree-lazy-expire"
    if value is None:
        return Check(name, UNKNOWN, "CONFIG is forbidden", "make sure that it is yes")
    if value != "yes":
        advice = "a large snapshot that expires stalls the server: CONFIG SET lazyfree-lazy-expire yes"
        return Check(name, WARNING, value, advice)
    return Check(name, OK, value)


def _persistence(info: Mapping[str, Any], save: str | None) -> Check:
    if "aof_enabled" not in info:
        return Check("persistence", UNKNOWN, "INFO is forbidden")
    failing = [n for n in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(n, "ok") != "ok"]
    if failing:
        return Check(
            "persistence", FAILED, f"{failing[0]} is not ok", "the server may refuse writes (MISCONF): see its log"
        )
    if info["aof_enabled"]:
        return Check("persistence", OK, "append-only file")
    if save is None:
        return Check("persistence", UNKNOWN, "no append-only file, CONFIG is forbidden")
    kept = f"snapshots ({save})" if save else "none"
    return Check("persistence", OK, kept, "after a restart the owners write their rooms again, within two ticks")


def _permissions(client: Any, keys: Keys) -> Check:
    wanted = [" ".join((name, *_sample(name, keys))) for name in commands()]
    import redis.exceptions as rex

    try:
        refused = client.eval(_PERMITTED, 1, keys.node("192.0.2.1:1"), *wanted)
    except rex.NoPermissionError:
        return Check("permissions", FAILED, "EVAL is forbidden", "grant what docs/protocol.md lists")
    except rex.ResponseError:  # no redis.acl_check_cmd before Redis 7
        return Check("permissions", UNKNOWN, "this server cannot be asked")
    if refused:
        return Check("permissions", FAILED, f"forbidden: {' '.join(refused)}", "grant what docs/protocol.md lists")
    return Check("permissions", OK, f"{len(wanted)} commands on {keys.namespace}:*")


def _sample(command: str, keys: Keys) -> tuple[str, ...]:
    """Arguments that name a key or channel of ours where the command takes one; they are checked, not run."""
    key = keys.node("192.0.2.1:1")
    if command in ("PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE"):
        return (keys.channel, "x")[: 2 if command == "PUBLISH" else 1]
    if command in ("EVAL", "EVALSHA"):
        return ("x", "1", key)
    if command == "XREAD":
        return ("STREAMS", key, "0")
    if command in ("INFO", "PING", "TIME"):
        return ()
    if command in ("DEL", "EXISTS", "RENAME", "UNLINK"):  # every argument is a key
        return (key, key)
    return (key, "0", "0")


def _clock(client: Any) -> Check:
    before = time.time()
    answer = _ask(client.time)
    after = time.time()
    if answer is None:
        return Check("clock", UNKNOWN, "TIME is forbidden")
    server = answer[0] + answer[1] / 1e6
    ms = round((server - (before + after) / 2) * 1000)
    value = f"the server is {abs(ms)} ms {'ahead' if ms >= 0 else 'behind'}"
    if abs(ms) > _CLOCK_MS:
        return Check("clock", WARNING, value, "harmless here (ages only travel), but events and your logs disagree")
    return Check("clock", OK, value)
