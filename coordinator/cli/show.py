"""What people look at: tables and lines, and the JSON forms of the same values.

Text that comes from the store is made printable before it reaches a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import inspect
from ..address import canonical
from ..doctor import FAILED, OK, UNKNOWN, WARNING, examine
from ..errors import StoreUnavailable
from ..inspect import AddressView, Event, RoomView
from ..protocol import clean_text
from .session import Session, Unknown, complain, say_json

PIPED_WIDTH = 240  # where no terminal is, no column is cut
WATCH_S = 1.0
_STYLES = {"alive": "green", "suspect": "yellow", OK: "green", WARNING: "yellow", FAILED: "red", UNKNOWN: "dim"}


def status(session: Session, as_json: bool, watch: bool) -> None:
    """Print one look at every address; with `watch` one each second, while the store may go away and come back."""
    if not watch:
        views = _look(session)
        if as_json:
            say_json(_status_json(session, views), indent=2)
        else:
            _console().print(_status_table(session, views))
    elif as_json:
        for views in _looks(session):
            say_json(_status_json(session, views))
            sys.stdout.flush()
    else:
        with Live(console=_console(), auto_refresh=False) as live:
            for views in _looks(session):
                live.update(_status_table(session, views), refresh=True)


def _looks(session: Session) -> Iterator[list[AddressView]]:
    """The first look must succeed: a wrong URL is an error, not something to wait for."""
    yield _look(session)
    while True:
        time.sleep(WATCH_S)
        try:
            yield _look(session)
        except StoreUnavailable as exc:
            complain(f"{exc}; looking again every second")


def events(session: Session, address: str | None, follow: bool, as_json: bool) -> None:
    """Print the trail of one address or of all."""
    address = address and canonical(address)
    if address and not follow and inspect.address_view(session.client, session.keys, address) is None:
        raise Unknown(address)
    if not follow:
        for event in inspect.events(session.client, session.keys, address):
            _say_event(event, as_json)
        return
    away = False

    def trouble(exc: StoreUnavailable) -> None:
        nonlocal away
        if not away:
            complain(f"{exc}; going on when it is back")
        away = True

    poll_s = min(0.25, session.settings.call_timeout_s / 2)
    for event in inspect.follow(session.client, session.keys, address, poll_s=poll_s, trouble=trouble):
        away = False
        _say_event(event, as_json)
        sys.stdout.flush()


def checks(session: Session, as_json: bool) -> bool:
    """Print what the doctor found; returns whether nothing failed."""
    found = examine(session.client, session.keys)
    good = all(check.outcome != FAILED for check in found)
    if as_json:
        say_json({"url": session.shown_url, "ok": good, "checks": [asdict(check) for check in found]}, indent=2)
        return good
    table = _table("CHECK", "OUTCOME", "FOUND", "ADVICE")
    for check in found:
        table.add_row(check.name, _styled(check.outcome), _text(check.value), _text(check.advice))
    _console().print(table)
    return good


def _look(session: Session) -> list[AddressView]:
    return inspect.address_views(session.client, session.keys, inspect.addresses(session.client, session.keys))


def _status_json(session: Session, views: Iterable[AddressView]) -> dict[str, Any]:
    listed = []
    for view in views:
        one = asdict(view)
        for holder in (one, *one["workers"]):
            if holder["oldest"]:
                holder["oldest"]["room"] = str(holder["oldest"]["room"])  # 63 bits: more than a JSON number keeps
        listed.append(one)
    return {"url": session.shown_url, "namespace": session.settings.namespace, "addresses": listed}


def _status_table(session: Session, views: list[AddressView]) -> Table | Text:
    if not views:
        return Text(f"no addresses: nobody uses namespace {session.settings.namespace} of {session.shown_url}")
    table = _table("ADDRESS", "STATE", "EPOCH", "INSTANCE", "WORKERS", "ROOMS", "BOOT", "WAIT", "MOVE")
    for name in ("OLDEST ROOM", "LAST FAILURE", "PENDING"):
        table.add_column(name, overflow="fold")
    for view in views:
        state = _styled(view.state)
        if view.draining:
            state.append(" draining", "yellow")
        counts = (str(count) for count in view.by_status.values())
        last: tuple[Text | str, ...] = (_oldest(view.oldest), _failure(view), _pending(view.pending))
        row: tuple[Text | str, ...] = (
            str(view.epoch),
            _text(view.instance),
            _workers(view),
            str(view.rooms),
            *counts,
            *last,
        )
        table.add_row(view.address, state, *row)
    return table


def _workers(view: AddressView) -> str:
    gone = len(view.workers) - view.watchers
    return f"{view.watchers}" + (f" (+{gone} expired)" if gone else "")


def _oldest(room: RoomView | None) -> Text:
    return _text(f"{room.room} {room.status} {_age(room.age_ms)} ({room.worker})" if room else "")


def _failure(view: AddressView) -> Text:
    failure = view.failure
    return _text(f"{_age(failure.age_ms)} ago: {failure.reason} (by {failure.by})" if failure else "")


def _pending(pending: Mapping[str, int]) -> str:
    return f"{sum(pending.values())} rooms in {len(pending)}" if pending else ""


def _age(ms: int) -> str:
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _say_event(event: Event, as_json: bool) -> None:
    if as_json:
        fields = dict(event.fields)
        say_json({"address": event.address, "id": event.id, "at_ms": event.at_ms, "kind": event.kind, "fields": fields})
        return
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    words = " ".join(f"{name}={value!r}" if " " in value else f"{name}={value}" for name, value in event.fields.items())
    print(at, event.address, clean_text(f"{event.kind:<10} {words}".rstrip()))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: str) -> Text:
    return Text(clean_text(value))


def _styled(word: str) -> Text:
    return Text(clean_text(word), _STYLES.get(word, ""))
