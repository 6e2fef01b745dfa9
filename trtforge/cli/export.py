"""`trtforge export`: a PyTorch model as ONNX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.export_info import ExportInfo

NAME = "export"


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A Hugging Face folder, a .pt2 program, or module:function.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: build/<model>.onnx.")
    ] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="For an fp16 or quantized build: opset 23.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="For a bf16 build: opset 23.")] = False,
    fp32: Annotated[bool, typer.Option("--fp32", help="For an fp32 build, the default: opset 20.")] = False,
    opset: Annotated[int | None, typer.Option(metavar="N", help="Another opset, from 18 to 23.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="FILE", help="Names the dims that stay open. Default: profiles/<model>.yaml."
        ),
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option("--calib", metavar="DATA", help="Its arrays say which of the optional inputs the model gets."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Export a PyTorch model to ONNX, and compare the two on seeded inputs of two shapes.

    The file stays fp32; the precision only chooses the opset. Exits 1 where the two models differ, with the file kept.
    """
    from trtforge.exporting import export
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.source import source_name
    from trtforge.spec import BuildSpec, precision_from_options

    path = output or Path("build") / f"{source_name(source)}.onnx"
    spec = BuildSpec(
        source=source,
        precision=precision_from_options(fp16=fp16, bf16=bf16, fp32=fp32),
        calib=calib,
        profile=profile,
        trust_remote_code=trust_remote_code,
        force=force,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        info = export(spec, path, report, opset)
    if as_json:
        print_json({"model": str(path), "passed": info.passed, **info.model_dump(mode="json")})
    else:
        _print_info(path, info)
    return 0 if info.passed else 1


def _print_info(path: Path, info: ExportInfo) -> None:
    sys.stdout.write(f"{plain(str(path))}\n")
    rows = [
        ("model", f"{info.architecture} by {info.exporter}"),
        ("opset", f"{info.opset}: {info.opset_reason}"),
        *(("dim", f"{name}: {dim.limits}") for name, dim in info.dims.items()),
        *(("fixed", f"{entry.name}: {entry.size}, by {entry.reason}") for entry in info.fixed),
    ]
    for run in info.runs:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in run.inputs.items())
        rows.append(("passed" if run.passed else "FAILED", f"against torch on {shapes}{_reason(run.error)}"))
        for name, output in run.outputs.items():
            if output.max_abs_error is not None and output.max_abs_value is not None:
                rows.append(("", f"{name}: off by {output.max_abs_error:.1e} of {output.max_abs_value:.3g}"))
            else:
                rows.append(("", f"{name}: {'equal' if output.passed else 'differs'}"))
    print_table(rows)


def _reason(error: str | None) -> str:
    return "" if error is None else f": {error}"
