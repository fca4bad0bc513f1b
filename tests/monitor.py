"""What a server is asked to do, by MONITOR: every command of every client, and every command of every script.

with Monitor(server) as seen:
    ...
seen.commands                 # in order; `.words`, `.by_script`
script_calls(seen)            # for each script call: the keys it was given, the commands it ran
"""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import redis
from servers import Server
from util import wait_until

_LINE = re.compile(r"^\+?[0-9.]+ \[\d+ (\S+)\] (.*)$")
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Command:
    """One command; `words` as MONITOR prints them (escapes stay), the name in upper case."""

    words: tuple[str, ...]
    by_script: bool

    @property
    def name(self) -> str:
        return self.words[0]


class Monitor:
    """Collects from the moment the block is entered until it is left."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.commands: list[Command] = []
        self._lines: list[str] = []

    def __enter__(self) -> Monitor:
        self._socket = socket.create_connection(("127.0.0.1", self.server.port), 5)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._socket.sendall(b"MONITOR\r\n")
        self._thread.start()
        wait_until(lambda: self._lines, 5, "MONITOR")
        return self

    def _read(self) -> None:
        with self._socket.makefile("r", encoding="utf-8", errors="replace", newline="\r\n") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\r\n"))

    def saw(self, name: str, text: str) -> bool:
        """Whether a command of that name with `text` somewhere in it has been seen so far."""
        return any(f'"{name}"' in line.upper() and text in line for line in self._lines)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        with self.server.client() as client:
            client.echo("the end of this block")
        wait_until(lambda: "the end of this block" in self._lines[-1], 20, "the last command in MONITOR")
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._socket.close()
        self.commands = [command for line in self._lines[:-1] if (command := _parse(line))]


def _parse(line: str) -> Command | None:
    match = _LINE.match(line)
    if not match:
        return None
    words = _WORD.findall(match[2])
    return Command((words[0].upper(), *words[1:]), match[1] == "lua")


def script_calls(seen: Monitor) -> list[tuple[tuple[str, ...], list[Command]]]:
    """Each script call as (keys it was given, commands it ran)."""
    calls: list[tuple[tuple[str, ...], list[Command]]] = []
    for command in seen.commands:
        if command.by_script:
            calls[-1][1].append(command)
        elif command.name in ("EVAL", "EVALSHA"):
            count = int(command.words[2])
            calls.append((command.words[3 : 3 + count], []))
    return calls


def keys_of(client: redis.Redis, command: Command) -> list[str]:
    """The keys that a command touches, as the server itself sees it."""
    if len(command.words) == 1:  # TIME
        return []
    try:
        return cast("list[str]", cast(Any, client).command_getkeys(*command.words))
    except redis.ResponseError as exc:
        if "no key arguments" in str(exc):
            return []
        raise
