"""`trtforge loadtest URL`: put a served model under load, and measure what its users would see."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from trtforge.cli import options, tune
from trtforge.cli.load_results import print_result, result_as_json
from trtforge.cli.render import plain, print_json, progress_reporter

NAME = "loadtest"
_DEFAULT = "run"


class _Group(TyperGroup):
    """`loadtest URL` means `loadtest run URL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before what names none."""
        if args and args[0] not in self.commands:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Group, no_args_is_help=True, help="Load tests of a served model: `loadtest URL` and others.")


app.command(tune.NAME)(tune.command)


@app.command(_DEFAULT)
def run(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, e.g. 127.0.0.1:8000.", show_default=False)],
    traffic: Annotated[
        Path, typer.Option(metavar="FILE", help="What to send, and what is a right answer (YAML).", show_default=False)
    ],
    protocol: Annotated[
        str | None, typer.Option(metavar="NAME", help="http or grpc. Default: the traffic file's, else http.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Closed loop: users at a time, e.g. 1,4,16; for the file's loads."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Open loop: requests per second, e.g. 50,100; for the file's loads."),
    ] = None,
    duration: Annotated[float | None, typer.Option(metavar="SECONDS", help="Of each measurement.")] = None,
    warmup: Annotated[float | None, typer.Option(metavar="SECONDS", help="Before it, not counted.")] = None,
    repeat: Annotated[
        int | None, typer.Option(metavar="N", help="Measure each step so often; from three on, the noise is known.")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option(metavar="OBJECTIVE", help="Count how far it is met, e.g. p99=50ms.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the server's Prometheus metrics. Default: port 8002, beside 8000."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An earlier run; worse beyond the noise is exit 1.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write run.json and report.html there.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Send traffic to a served model and measure latency, throughput and errors, without coordinated omission.

    Exits with 1 where answers were wrong or missing altogether, where the server died (what was measured is kept), or
    where figures are worse than the baseline's. `trtforge loadtest tune` looks for the best batching.
    """
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.load_testing import LoadTest, run_load_test

    test = LoadTest(
        url=url,
        traffic=traffic,
        protocol=_protocol(protocol),
        changes=_changes(concurrency, rate, duration, warmup, repeat),
        metrics=metrics,
        objectives=tuple(slo or ()),
        baseline=baseline,
        output=output,
        force=force,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        result = run_load_test(test, report)
    if as_json:
        print_json(result_as_json(result))
    else:
        print_result(result, output)
    for problem in result.problems:
        sys.stderr.write(f"failed: {plain(problem)}\n")
    return 1 if result.problems else 0


def _protocol(text: str | None) -> Literal["http", "grpc"] | None:
    from trtforge.errors import InputError

    if text not in (None, "http", "grpc"):
        raise InputError(f"--protocol {text!r} is not known", "known: http, grpc", "--protocol grpc")
    return "grpc" if text == "grpc" else "http" if text == "http" else None


def _changes(
    concurrency: str | None, rate: str | None, duration: float | None, warmup: float | None, repeat: int | None
) -> dict[str, Any]:
    """What the options put in the place of the traffic file's values."""
    changes: dict[str, Any] = {}
    if concurrency is not None or rate is not None:
        changes["load"] = {
            "users": [int(number) for number in _numbers("--concurrency", concurrency, whole=True)],
            "rates": _numbers("--rate", rate, whole=False),
        }
    given = {"duration_s": duration, "warmup_s": warmup, "repeats": repeat}
    return changes | {name: value for name, value in given.items() if value is not None}


def _numbers(option: str, text: str | None, whole: bool) -> list[float]:
    from trtforge.errors import InputError

    parts = [] if text is None else text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [-1.0]
    if any(not 0 < number < float("inf") or (whole and number != int(number)) for number in numbers):
        why = f"it takes {'whole ' if whole else ''}numbers above 0, with commas between"
        raise InputError(f"{option} {text!r} cannot be used", why, f"{option} {'1,4,16' if whole else '50,100'}")
    return numbers
