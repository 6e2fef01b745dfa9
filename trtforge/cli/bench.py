"""`trtforge bench plugin|report`: measure the CUDA plugin against other ways to compute a transformer block."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.benching import Grid, HostResult, PluginBenchResult
    from trtforge.benchmark.history import Change
    from trtforge.benchmark.results import RunResult

NAME = "bench"

app = typer.Typer(no_args_is_help=True, help="Benchmarks of the CUDA plugin.")

_Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace the page.")]


def _list(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", metavar="LIST", help=what)


@app.command("plugin")
def plugin(
    batch: Annotated[str | None, _list("batch", "Default: 8,1,32.")] = None,
    seq: Annotated[str | None, _list("seq", "Default: 512,128,384,64,2048.")] = None,
    hidden: Annotated[str | None, _list("hidden", "Default: 768,384,1024.")] = None,
    heads: Annotated[str | None, _list("heads", "Default: those of models of that width.")] = None,
    ffn: Annotated[str | None, _list("ffn", "Inner width. Default: 4 x hidden.")] = None,
    dtype: Annotated[str | None, _list("dtype", "fp16, bf16, int8. Default: fp16; with --host all.")] = None,
    mask: Annotated[str | None, _list("mask", "none, causal, lengths, bias. Default: none; with --host all.")] = None,
    order: Annotated[str, typer.Option(metavar="NAME", help="Of the norms: pre or post.")] = "post",
    activation: Annotated[str, typer.Option(metavar="NAME", help="gelu, gelu_tanh, relu or silu.")] = "gelu",
    peers: Annotated[
        str | None,
        _list(
            "peers",
            "eager, sdpa, cublaslt, compile, tensorrt, tensorrt+plugin, 'plugin (launches)'. Default: all installed.",
        ),
    ] = None,
    host: Annotated[
        bool,
        typer.Option("--host", help="Without a GPU: check the cases, cut to small sizes, on the emulator. Not timed."),
    ] = False,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --host: auto (default), launches or persistent.")
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option(metavar="LIB", help="Of `trtforge plugin build --kernels`. Default: compiled for the card."),
    ] = None,
    plugin_library: Annotated[
        Path | None, typer.Option("--plugin", metavar="LIB", help="For TensorRT with the plugin.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save every result at once as a line; continued if there."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier run; slower beyond the noise is exit 1.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="N", min=0.1, help="End in time; most telling first.")
    ] = None,
    html: _Html = None,
    force: _Force = False,
    as_json: options.AsJson = False,
) -> int:
    """Check the plugin against float64, then time it against PyTorch and TensorRT on this machine's GPU."""
    from trtforge.benching import PluginBench, bench_plugin
    from trtforge.errors import InputError
    from trtforge.staging import check_free

    grid = _grid(batch, seq, hidden, heads, ffn, dtype, mask, order, activation, host)
    if host:
        _refuse_with_host(
            output=output, baseline=baseline, minutes=minutes, html=html, peers=peers, plugin=plugin_library
        )
        return _check_on_host(grid, strategy or "auto", library, as_json)
    if strategy is not None:
        why = "on a GPU each strategy is measured as an implementation of its own"
        raise InputError("--strategy is for --host", why, "choose it with --peers 'plugin (launches)' or add --host")
    spec = PluginBench(
        grid=grid,
        library=library,
        plugin_library=plugin_library,
        output=output,
        baseline=baseline,
        minutes=minutes,
        names=None if peers is None else ("plugin", *(name.strip() for name in peers.split(","))),
    )
    if html is not None:
        check_free(html, force)  # before the work, not after it
    with progress_reporter() as report:
        result = bench_plugin(spec, report)
    if html is not None:
        _write_page(result.run, html, force)
    if as_json:
        print_json(_result_as_json(result))
    else:
        _print_run(result.run)
        _print_rest(result)
    return 0 if result.passed else 1


@app.command("report")
def report(
    results: Annotated[
        Path, typer.Argument(metavar="FILE", help="Of `bench plugin -o` or `--json`.", show_default=False)
    ],
    html: _Html = None,
    force: _Force = False,
    as_json: options.AsJson = False,
) -> int:
    """Show the results of an earlier run, made on this machine or another."""
    from trtforge.benching import read_run

    run = read_run(results)
    if html is not None:
        _write_page(run, html, force)
    if as_json:
        print_json(run.to_dict())
    else:
        _print_run(run)
    return 0


def _grid(
    batch: str | None,
    seq: str | None,
    hidden: str | None,
    heads: str | None,
    ffn: str | None,
    dtype: str | None,
    mask: str | None,
    order: str,
    activation: str,
    host: bool,
) -> Grid:
    from trtforge.benching import Grid
    from trtforge.benchmark.case import DTYPES, MASKS
    from trtforge.ops.attention_ffn import ACTIVATIONS, ORDERS

    numbers = (
        ("batches", "--batch", batch),
        ("sequences", "--seq", seq),
        ("widths", "--hidden", hidden),
        ("heads", "--heads", heads),
        ("inner_widths", "--ffn", ffn),
    )
    given: dict[str, Any] = {field: _numbers(option, text) for field, option, text in numbers if text is not None}
    for field, option, text, allowed in (("dtypes", "--dtype", dtype, DTYPES), ("masks", "--mask", mask, MASKS)):
        if text is not None or host:
            given[field] = allowed if text is None else _names(option, text.split(","), allowed)
    (given["order"],) = _names("--order", [order], ORDERS)
    (given["activation"],) = _names("--activation", [activation], ACTIVATIONS)
    return Grid(**given)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from trtforge.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as err:
        raise InputError(f"{option} {text!r} cannot be used", "it takes whole numbers", f"{option} 8,32") from err


def _names(option: str, parts: Sequence[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    from trtforge.errors import InputError

    names = tuple(part.strip() for part in parts)
    for name in names:
        if name not in allowed:
            raise InputError(
                f"{option} {name!r} is not known", f"known: {', '.join(allowed)}", f"{option} {allowed[0]}"
            )
    return names


def _refuse_with_host(**given: object) -> None:
    from trtforge.errors import InputError

    used = [f"--{name}" for name, value in given.items() if value is not None]
    if used:
        why = "on the emulator nothing is measured, and there is nothing to compare or to draw"
        raise InputError(f"--host does not take {', '.join(used)}", why, "leave it out, or use a machine with a GPU")


def _check_on_host(grid: Grid, strategy: str, library: Path | None, as_json: bool) -> int:
    from trtforge.benching import check_plugin_on_host

    with progress_reporter() as report_:
        result = check_plugin_on_host(grid, strategy, library, report=report_)
    if as_json:
        print_json(_host_as_json(result))
    else:
        _print_host(result)
    return 0 if result.passed else 1


def _print_host(result: HostResult) -> None:
    rows = [("case on the emulator", "result")]
    for check in result.checks:
        word = "right" if check.verdict.is_right else "WRONG"
        rows.append((check.case.key, f"{word}: {check.verdict.describe()}"))
    print_table(rows)
    if result.record is None:
        sys.stdout.write("kernel resources: give --library LIB, of `trtforge plugin build`\n")
    else:
        kernels: list[tuple[str, ...]] = [("kernel", "architecture", "registers", "spilled bytes", "shared bytes")]
        for kernel in result.record.kernels:
            sizes = (kernel.registers, kernel.spilled_bytes, kernel.shared_bytes)
            kernels.append((kernel.name, f"sm_{kernel.architecture}", *map(str, sizes)))
        print_table(kernels)
    num_right = sum(check.verdict.is_right for check in result.checks)
    sys.stdout.write(f"{num_right} of {len(result.checks)} right on the emulator; times need a GPU\n")


def _host_as_json(result: HostResult) -> dict[str, Any]:
    checks = [
        {
            "case": check.case.to_dict(),
            "is_right": check.verdict.is_right,
            "rms_ratio": check.verdict.rms_ratio,
            "max_ratio": check.verdict.max_ratio,
        }
        for check in result.checks
    ]
    kernels = None if result.record is None else [kernel.to_dict() for kernel in result.record.kernels]
    return {"host": True, "passed": result.passed, "checks": checks, "kernels": kernels}


def _print_run(run: RunResult) -> None:
    from trtforge.benchmark.page import descriptions, figures, peaks_of, speedup_text

    peaks = peaks_of(run)
    sys.stdout.write(f"{plain(str(run.conditions.get('card')))}; times in us, cold L2\n")
    if peaks is not None:
        sys.stdout.write(
            f"peaks: {peaks.fp16_tflops:g} TFLOP/s, {peaks.bandwidth_gbps:g} GB/s ({plain(peaks.source)})\n"
        )
    names = descriptions(run)
    if not names:
        sys.stdout.write("nothing was measured\n")
        return
    print_table(list(names.items()))
    for result in run.cases:
        sys.stdout.write(f"{result.case.key}\n")
        head = ("", "", "median", "p10", "p90", "TFLOP/s", "GB/s", "of the roofline", "plugin is faster by")
        rows: list[tuple[str, ...]] = [head]
        for measured in result.measurements:
            if measured.failure is not None:
                rows.append((measured.implementation, measured.mode, f"not timed: {measured.failure}"))
            else:
                shown = figures(result.case, measured, peaks)
                rows.append((measured.implementation, measured.mode, *shown, speedup_text(result, measured)))
        print_table(rows)


def _print_rest(result: PluginBenchResult) -> None:
    if result.left_out:
        sys.stdout.write(f"left out for want of time: {len(result.left_out)} steps\n")
    for change in result.changes:
        word = "REGRESSION" if change.is_regression else "ok"
        ratio = "not timed" if change.ratio is None else f"{change.ratio:.3f} x the time before"
        sys.stdout.write(f"{word}: {change.key}, {change.implementation}, {change.mode}: {ratio}\n")
    for text in result.run.wrong:
        sys.stdout.write(f"WRONG: {plain(text)}\n")


def _result_as_json(result: PluginBenchResult) -> dict[str, Any]:
    return {
        **result.run.to_dict(),
        "passed": result.passed,
        "left_out": [{"case": step.case.key, "names": step.names} for step in result.left_out],
        "changes": [_change_as_json(change) for change in result.changes],
    }


def _change_as_json(change: Change) -> dict[str, Any]:
    return {
        "case": change.key,
        "implementation": change.implementation,
        "mode": change.mode,
        "ratio": change.ratio,
        "is_regression": change.is_regression,
    }


def _write_page(run: RunResult, path: Path, force: bool) -> None:
    from trtforge.benching import render_page
    from trtforge.staging import write_text

    write_text(path, render_page(run), force)
