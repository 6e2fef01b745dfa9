"""`trtforge calibrate`: a calibration table from data, or with `--compare` a table of all methods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import format_bytes, plain, print_json, print_table, progress_reporter, saying_what_stays

if TYPE_CHECKING:
    from trtforge.method_table import MethodRow, MethodTable
    from trtforge.spec import BuildSpec

NAME = "calibrate"


def command(
    source: options.Source,
    calib: Annotated[
        str | None,
        typer.Option(
            "--calib",
            "--data",
            metavar="DATA",
            help="Calibration data: .npz, a folder of them, or module:function. Default: calibration/<model>.npz "
            "beside the model or here.",
        ),
    ] = None,
    recipe: options.Recipe = None,
    profile: options.ProfileOption = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Measure every method, per channel and per tensor, plain and smoothed, on held-out data."
        ),
    ] = False,
    eval_data: Annotated[
        str | None,
        typer.Option("--eval", metavar="DATA", help="With --compare: data to measure on. Default: a fifth, held out."),
    ] = None,
    metric: options.Metric = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", help="With --compare: samples to measure on, at most [64].")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Default: build/<model>-calibration.json, with --compare build/<model>-methods.json and .html.",
        ),
    ] = None,
    cache: options.Cache = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing table.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Run calibration data through the fp32 graph and write the range of every activation to quantize.

    A long run saves its state beside the output every few seconds: the same command goes on after an interruption.
    """
    from trtforge.errors import InputError
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.source import source_name
    from trtforge.spec import BuildSpec, Precision

    spec = BuildSpec(
        source=source,
        precision=Precision("int8", "fp16"),
        calib=calib,
        eval=eval_data,
        metric=metric,
        recipe=recipe,
        profile=profile,
        cache=cache,
        trust_remote_code=trust_remote_code,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    if compare:
        path = output or Path("build") / f"{source_name(source)}-methods.json"
        return _compare(spec, samples, path, force, as_json)
    for option, value in (("--eval", eval_data), ("--metric", metric), ("--samples", samples)):
        if value is not None:
            raise InputError(
                f"{option} has nothing to measure",
                "calibrate chooses ranges and does not run a quantized model",
                "give --compare as well, or leave it out",
            )
    return _calibrate(spec, output or Path("build") / f"{source_name(source)}-calibration.json", force, as_json)


def _calibrate(spec: BuildSpec, path: Path, force: bool, as_json: bool) -> int:
    from trtforge.pipeline import calibrate
    from trtforge.staging import check_not_read, write_text

    check_not_read(path, (spec.source, spec.calib, spec.recipe, spec.profile))
    partial = Path(f"{path}.partial")
    with saying_what_stays(partial), progress_reporter() as report:
        table = calibrate(spec, report, partial)
    write_text(path, table.to_json(), force)
    if as_json:
        print_json({"table": str(path), **table.model_dump(mode="json")})
        return 0
    sys.stdout.write(f"{plain(str(path))}\n")
    rows = [("tensor", "amax", "max/rms")]
    for name, entry in table.tensors.items():
        spread = max(abs(entry.min), abs(entry.max)) / entry.rms if entry.rms else 0.0
        rows.append((name, f"{entry.amax:.4g}", f"{spread:.1f}"))
    print_table(rows)
    sys.stdout.write(f"  {table.method}, {table.samples} samples\n")
    return 0


def _compare(spec: BuildSpec, samples: int | None, path: Path, force: bool, as_json: bool) -> int:
    from trtforge.errors import InputError
    from trtforge.pipeline import COMPARED_SAMPLES, compare
    from trtforge.report.methods import render_methods
    from trtforge.staging import check_free, write_text

    if path.suffix != ".json":
        raise InputError(
            f"{path} cannot be the method table",
            "the table is JSON, and a page with the same name and .html is written beside it",
            f"give -o {path.with_suffix('.json')}" if path.name else "give a file name that ends in .json",
        )
    page, partial = path.with_suffix(".html"), Path(f"{path}.partial")
    for file in (path, page):
        check_free(file, force)
    with saying_what_stays(partial), progress_reporter() as report:
        table = compare(spec, COMPARED_SAMPLES if samples is None else samples, report, partial)
    document, html = table.to_json(), render_methods(table)
    write_text(page, html, force)
    write_text(path, document, force)
    if as_json:
        sys.stdout.write(document)
    else:
        sys.stdout.write(f"{plain(str(path))}\n{plain(str(page))}\n")
        _print_methods(table)
    return 0


def _print_methods(table: MethodTable) -> None:
    """The rows, the best one marked; then the conditions, and the recipe of the best."""
    metrics = list(table.reference_metrics)
    titles = ("", "method", "weights", "smoothing", "cosine", "1 - cosine", "SQNR", *metrics, "seconds", "memory")
    print_table([titles, *(_cells(row, row is table.best_row, metrics) for row in table.rows)])
    best = table.best_row
    exact = "".join(f"; {name} of fp32 {value:.4f}" for name, value in table.reference_metrics.items())
    sys.stdout.write(
        f"  * best by {plain(table.criterion)}: {best.label}{plain(exact)}\n"
        f"  measured on {table.evaluation.samples} samples, the rest in fp32; all ranges come from one pass over "
        f"{table.calibration.samples} samples\n"
        f"  which took {table.pass_seconds:.1f} s and at most {format_bytes(table.peak_rss_bytes)} in one process; "
        "seconds and memory are what each row adds to it and holds of it\n\n"
        "recipe of the best, for --recipe FILE:\n"
    )
    for line in table.best_recipe().splitlines():
        sys.stdout.write(f"  {plain(line)}\n")


def _cells(row: MethodRow, is_best: bool, metrics: list[str]) -> tuple[str, ...]:
    from trtforge.method_table import titles
    from trtforge.report.figures import cosine, decibel

    weights, smooth = titles(row.weights, row.smooth)
    figures = (cosine(row.worst.cosine), f"{row.loss:.1e}", decibel(row.worst)) if row.is_finite else ("NaN", "-", "-")
    values = (f"{row.metrics[name]:.4f}" for name in metrics)
    cost = (f"{row.seconds:.2f}", format_bytes(row.state_bytes))
    return ("*" if is_best else "", row.method, weights, smooth, *figures, *values, *cost)
