"""The commands that run something: the demo, the embedded store, and the demo's two roles for a compose stack."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..config import variable
from .session import Session, complain, say_json

Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


def add(app: typer.Typer) -> None:
    """Put these commands into the application."""
    for command in (demo, store, node, worker):
        app.command()(command)


def demo(
    context: typer.Context,
    *,
    nodes: Annotated[int, typer.Option(help="Prefill node processes.")] = 3,
    workers: Annotated[int, typer.Option(help="Decode worker processes.")] = 6,
    rate: Annotated[
        float | None, typer.Option(help="Rooms opened per second by all workers together.", show_default=False)
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="How long rooms are opened.", show_default=False)] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay this request trace instead of --rate.")] = None,
    speed: Annotated[float, typer.Option(help="Replay the trace this many times as fast.")] = 1.0,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="KIND@SECOND", help="Repeatable; `none` for no fault at all.")
    ] = None,
    url: Annotated[str, typer.Option("--store", metavar="URL", help="Use this store, not one of the demo's own.")] = "",
    seed: Annotated[int, typer.Option(help="Same seed, same plan.")] = 1,
    transport: Annotated[
        str, typer.Option(metavar="tcp|mooncake|nixl", help="How the bytes of rooms travel: TCP or a real engine.")
    ] = "tcp",
    as_json: Json = False,
) -> None:
    """Run nodes and workers through faults and audit it.

    Real processes and sockets; every room must fail exactly once or not at all. Fault kinds: kill-node, start-
    node, stop-node, restart-node, kill-worker, pause-store, flush-store.
    Exit code 1 if a room was missed, failed twice or failed without cause. JSON: {ok, store, rooms, faults,
    false_failures, probes_sent, keys_without_ttl, seed, seconds, problems, recorded_in}.
    """
    from ..demo.run import DemoOptions, parse_fault, render, run_demo

    faults = None if not fault else tuple(parse_fault(text) for text in fault if text != "none")
    session: Session = context.obj
    _share(session)
    options = DemoOptions(
        nodes=nodes,
        workers=workers,
        rate=rate,
        seconds=seconds,
        trace=str(trace or ""),
        speed=speed,
        faults=faults,
        store=url or session.given_url,
        seed=seed,
        transport=transport,
    )
    result = run_demo(options)
    if as_json:
        say_json(result)
    else:
        render(result)
    if not result["ok"]:
        raise typer.Exit(1)


def store() -> None:
    """Run the embedded store in the foreground.

    Prints its URL; it ends with this command. If one is running already, print its URL and end.
    """
    from ..store.embedded import EmbeddedServer

    stop = threading.Event()
    caught: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    server = EmbeddedServer.start(shared=True)
    print(server.url, flush=True)
    if not server.owned:
        print(f"it is running already (pid {server.pid}) and ends with whoever started it", file=sys.stderr)
        return
    try:
        while not stop.wait(0.2):
            if not server.alive:
                complain(f"the server (pid {server.pid}) has ended")
                raise typer.Exit(1)
    finally:
        server.stop()
    if signal.SIGINT in caught:
        raise typer.Exit(130)


def node(
    context: typer.Context,
    address: Annotated[
        str,
        typer.Option(envvar="COORDINATOR_NODE_ADDRESS", help="host:port that workers connect to; port + 1 streams."),
    ],
    bind: Annotated[
        str, typer.Option(envvar="COORDINATOR_NODE_BIND", help="Interface to listen on; default: the address's host.")
    ] = "",
) -> None:
    """Run one prefill node of the demo until SIGTERM."""
    from ..demo.child import guarded
    from ..demo.node import NodeOptions, main

    url = _prepare(context.obj)
    raise typer.Exit(guarded(main, NodeOptions(address, bind=bind, url=url)))


def worker(
    context: typer.Context,
    name: Annotated[
        str, typer.Option(envvar="COORDINATOR_WORKER_NAME", help="First part of the worker's id.")
    ] = "worker",
    rate: Annotated[float, typer.Option(envvar="COORDINATOR_WORKER_RATE", min=0.001, help="Rooms per second.")] = 20.0,
    nodes: Annotated[
        list[str] | None, typer.Option("--node", metavar="ADDRESS", help="Repeatable; default: those in the store.")
    ] = None,
) -> None:
    """Run one decode worker of the demo until SIGTERM."""
    from ..address import canonical
    from ..demo.child import guarded
    from ..demo.worker import WorkerOptions, main

    chosen = tuple(canonical(node) for node in nodes or ())
    url = _prepare(context.obj)
    raise typer.Exit(guarded(main, WorkerOptions(name=name, nodes=chosen, rate=rate, url=url)))


def _prepare(session: Session) -> str:
    """Log to stderr, and return the store's URL."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _share(session)
    return session.url


def _share(session: Session) -> None:
    """The namespace goes on by the environment: to the worker or node in this process, and to the demo's children."""
    os.environ[variable("namespace")] = session.settings.namespace
