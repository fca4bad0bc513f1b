"""`python -m coordinator.demo`: the demo without the rest of the command line."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..errors import CoordinatorError
from .faults import KINDS
from .options import DemoOptions
from .roles import TCP, TRANSPORTS
from .run import parse_fault, render, run_demo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    *,
    nodes: Annotated[int, typer.Option(help="Prefill nodes.")] = 3,
    workers: Annotated[int, typer.Option(help="Decode workers.")] = 6,
    rate: Annotated[float | None, typer.Option(help="Rooms opened a second, by all workers together.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long rooms are opened.")] = None,
    trace: Annotated[str, typer.Option(help="Replay a trace (JSON lines or CSV) instead of a rate.")] = "",
    speed: Annotated[float, typer.Option(help="Replay this many times as fast.")] = 1.0,
    fault: Annotated[list[str] | None, typer.Option(help=f"KIND@SECOND, repeatable: {', '.join(KINDS)}.")] = None,
    store: Annotated[str, typer.Option(help="Store URL; empty: a private embedded server.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same rooms and targets.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    transport: Annotated[str, typer.Option(help=f"How bytes travel: {', '.join(TRANSPORTS)}.")] = TCP,
    report_errors: Annotated[bool, typer.Option(help="Workers report broken transfers as evidence.")] = True,
) -> None:
    """Run real processes through faults and audit what they recorded."""
    try:
        faults = tuple(parse_fault(text) for text in fault) if fault else None
        result = run_demo(
            DemoOptions(
                nodes=nodes,
                workers=workers,
                rate=rate,
                seconds=seconds,
                trace=trace,
                speed=speed,
                faults=faults,
                store=store,
                seed=seed,
                report_errors=report_errors,
                transport=transport,
            )
        )
    except CoordinatorError as exc:
        typer.echo(f"error: {exc}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(result))
    else:
        render(result)
    raise typer.Exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    app()
