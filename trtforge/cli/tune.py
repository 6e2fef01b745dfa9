"""`trtforge loadtest tune REPO`: find the batching settings that serve most within an objective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter, saying_what_stays

if TYPE_CHECKING:
    from trtforge.loadtest.tuning.result import TuneResult

NAME = "tune"


def command(
    repository: Annotated[Path, typer.Argument(metavar="REPO", help="Of `trtforge package`.", show_default=False)],
    slo: Annotated[
        list[str],
        typer.Option(
            metavar="OBJECTIVE", help="What must be met, e.g. p99=50ms; all where several.", show_default=False
        ),
    ],
    traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What to send (YAML); users or rates say which loop, tune chooses how many. Default: made from the "
            "model's metadata, open loop.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the traffic's, or the only one that clients call.")
    ] = None,
    delays: Annotated[str, typer.Option(metavar="LIST", help="Queue delays to try, in us.")] = "0,500,2000",
    preferred: Annotated[
        str, typer.Option(metavar="LIST", help="Preferred batch sizes to try: none, packaged, or sizes such as 4+16.")
    ] = "none,packaged",
    instances: Annotated[str, typer.Option(metavar="LIST", help="Copies of the model to try.")] = "1,2",
    budget: Annotated[float, typer.Option(metavar="MINUTES", help="For the whole search.")] = 10.0,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of the confirmation; from three on, the noise is known.")
    ] = 3,
    server_cpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Cores of the server, e.g. 0. Default: all.")
    ] = None,
    client_cpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Cores of the client, e.g. 1. Default: all.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Trials, report and settings; a search that was interrupted goes on. Default: build/tune-<REPO>.",
        ),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the best settings into REPO.")] = False,
    triton_env: options.TritonEnv = None,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Try queue delays, preferred batch sizes and instances on the real server, and confirm the best.

    Each combination gets a server of its own, under the given traffic. What counts is the highest throughput that meets
    the objective; the best is then measured against Triton's default (no dynamic batching) in turns, which gives the
    gain and its noise. Exits with 1 where nothing meets the objective.
    """
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.loadtest.objective import parse_objectives
    from trtforge.loadtest.session import check_extra
    from trtforge.loadtest.tune import TRIALS_NAME, TuneSpec, tune
    from trtforge.loadtest.tuning.candidate import parse_preferred
    from trtforge.serving.triton.environment import find_triton, places_from_option

    check_extra()
    spec = TuneSpec(
        repository=repository,
        objectives=parse_objectives(slo),
        install=find_triton(places_from_option(triton_env)),
        output=output or Path("build") / f"tune-{repository.absolute().name}",
        model=model,
        traffic=traffic,
        delays_us=_numbers("--delays", delays),
        preferred=parse_preferred(preferred),
        instances=_numbers("--instances", instances),
        minutes=budget,
        repeats=repeat,
        server_cpus=None if server_cpus is None else _numbers("--server-cpus", server_cpus),
        client_cpus=None if client_cpus is None else _numbers("--client-cpus", client_cpus),
        apply=apply,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with saying_what_stays(spec.output / TRIALS_NAME), progress_reporter() as report:
        result = tune(spec, report)
    for warning in result.warnings:
        sys.stderr.write(f"warning: {plain(warning)}\n")
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result, spec.output)
    if not result.passed:
        sys.stderr.write(f"failed: {plain(result.verdict()[1])}\n")
    return 0 if result.passed else 1


def _print_result(result: TuneResult, output: Path) -> None:
    from trtforge.loadtest.tune import PAGE_NAME
    from trtforge.loadtest.tuning.page import candidate_rows

    print_table([("settings", "answers/s", "mean batch", "queue", "compute", "padding"), *candidate_rows(result)])
    word, meaning = result.verdict()
    sys.stdout.write(f"{word}: {meaning}\n")
    if result.diff:
        sys.stdout.write(f"{_plain_lines(result.diff)}\n")
        sys.stdout.write("written into the repository\n" if result.is_applied else "write it with --apply\n")
    sys.stdout.write(f"report: {plain(str(output / PAGE_NAME))}\n")


def _plain_lines(text: str) -> str:
    """Several lines of a stranger's text, fit for a terminal."""
    return "\n".join(plain(line) for line in text.split("\n"))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from trtforge.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as err:
        why = "it takes whole numbers with commas between"
        raise InputError(f"{option} {text!r} cannot be used", why, f"{option} 0,1") from err
