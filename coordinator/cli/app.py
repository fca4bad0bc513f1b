"""The commands: each reads its arguments, asks one module of the package, and prints what came back."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import CoordinatorError
from . import roles
from .session import Session, Unknown, complain, operator, say_json

app = typer.Typer(
    name="coordinator",
    help="Look at, and act on, the shared state of prefill nodes, decode workers and the rooms between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of a node.", show_default=False)]


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Never raises, and prints no traceback unless asked to."""
    code: Any = 0
    try:
        try:
            app(args=None if argv is None else list(argv), prog_name="coordinator")
        except SystemExit as done:
            code = done.code
        sys.stdout.flush()
    except CoordinatorError as exc:
        complain(str(exc))
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read us has seen enough
        code = 1
    except Exception as exc:
        if Session.tracebacks:
            traceback.print_exc()
        complain(f"this is a defect: {type(exc).__name__}: {exc}; `coordinator --traceback ...` shows where")
        code = 1
    return code if isinstance(code, int) else 1 if code else 0


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"coordinator {version('coordinator')}")
        except PackageNotFoundError:
            print("coordinator, not installed: run from a checkout")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(help="The store; default: COORDINATOR_URL, then the running embedded store.", show_default=False),
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(
            help="First word of every key; default: COORDINATOR_NAMESPACE, then coordinator.", show_default=False
        ),
    ] = "",
    traceback: Annotated[bool, typer.Option("--traceback", hidden=True)] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    Session.tracebacks = traceback
    context.obj = Session(url, namespace)


@app.command()
def status(
    context: typer.Context,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")] = False,
) -> None:
    """Show every address and what it holds.

    JSON: {url, namespace, addresses: [{address, state, draining, epoch, instance, info, watchers, rooms, by_status,
    oldest: {room, worker, status, age_ms}, failure: {cause, reason, by, age_ms}, seen_age_ms, announced_age_ms,
    workers: [{worker, lease_left_ms, rooms, by_status, oldest}], votes, pending: {snapshot: rooms}}]}. Rooms are
    decimal strings. With --watch one such object a line.
    """
    from . import show

    show.status(context.obj, as_json, watch)


@app.command()
def rooms(context: typer.Context, address: Address, as_json: Json = False) -> None:
    """List the rooms open at an address.

    A line "worker room" each, in no order. JSON, one a line: {address, worker, room}. Rooms are decimal strings.
    """
    from .. import inspect
    from ..address import canonical

    session: Session = context.obj
    address = canonical(address)
    if inspect.address_view(session.client, session.keys, address) is None:
        raise Unknown(address)
    seen: dict[str, set[int]] = {}
    for worker, piece in inspect.rooms(session.client, session.keys, address):
        listed = seen.setdefault(worker, set())
        for room in piece:
            if room in listed:  # a piece of a set that grows may repeat what came before
                continue
            listed.add(room)
            if as_json:
                say_json({"address": address, "worker": worker, "room": str(room)})
            else:
                print(worker, room)


@app.command()
def fail(
    context: typer.Context,
    address: Address,
    reason: Annotated[str, typer.Option(help="What every owner of a room there will read.")] = "operator",
    as_json: Json = False,
) -> None:
    """Fail an address for everybody.

    Every room open there fails once; joins are refused until the node answers again. Nothing happens to an
    address that is unknown (exit code 1) or has failed already (exit code 0).
    JSON: {address, outcome: "failed" or "already failed", epoch, reason, by, rooms, counts: {worker: rooms}}.
    """
    from .. import inspect
    from ..address import canonical
    from ..errors import StoreUnavailable
    from ..protocol import FAILED, clean_text
    from ..store.client import SyncStore
    from ..store.ops import Ops
    from ..store.verdict import fail_address

    session: Session = context.obj
    address, reason, by = canonical(address), clean_text(reason), operator()
    view = inspect.address_view(session.client, session.keys, address)
    if view is None or not view.epoch:
        raise Unknown(address)
    store = SyncStore(session.client, session.settings.retry_s)
    verdict = fail_address(store, Ops(session.settings), address, reason, by, epoch=view.epoch)
    node, already = verdict.node, verdict.outcome != "FAILED"
    if already and node.state != FAILED:
        raise StoreUnavailable(
            f"{address} got another epoch ({node.epoch}) at this moment; nothing was failed: try again"
        )
    if already:
        reason, by = node.reason, node.by
    total = sum(verdict.counts.values())
    if as_json:
        outcome = "already failed" if already else "failed"
        answer = {"address": address, "outcome": outcome, "epoch": node.epoch, "reason": reason, "by": by}
        say_json({**answer, "rooms": total, "counts": verdict.counts})
    elif already:
        print(f"{address} has failed already, epoch is {node.epoch}: {clean_text(reason)} (by {clean_text(by)})")
    else:
        print(f"failed {address}: epoch is {node.epoch} now, {total} rooms of {len(verdict.counts)} workers")
        for worker, count in sorted(verdict.counts.items()):
            print(f"  {worker}  {count}")


@app.command()
def events(
    context: typer.Context,
    address: Annotated[str | None, typer.Argument(metavar="[ADDRESS]", help="Of this address only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show what happened, oldest first.

    Up to 1000 events of each address; times are the server's. JSON, one a line: {address, id, at_ms, kind, fields}.
    """
    from . import show

    show.events(context.obj, address, follow, as_json)


@app.command()
def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Look the store over for trouble.

    Version, memory policy, persistence, permissions, clock. Exit code 1 if a check failed. JSON: {url, ok,
    checks: [{name, outcome: "ok", "warning", "failed" or "unknown", value, advice}]}.
    """
    from . import show

    if not show.checks(context.obj, as_json):
        raise typer.Exit(1)


roles.add(app)
