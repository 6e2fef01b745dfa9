"""`trtforge quantize`: the graph with Q/DQ, without building it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

NAME = "quantize"


def command(
    source: options.Source,
    fp16: options.Fp16 = False,
    bf16: options.Bf16 = False,
    fp32: options.Fp32 = False,
    calib: options.Calib = None,
    recipe: options.Recipe = None,
    profile: options.ProfileOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: build/<model>-<precision>.onnx.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Insert INT8 Q/DQ pairs by TensorRT's rules and write the ONNX file that a build would use."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.pipeline import quantize
    from trtforge.spec import BuildSpec, precision_from_options

    precision = precision_from_options(True, fp16, bf16, fp32)
    path = output or Path("build") / f"{source.stem}-{precision.name}.onnx"
    spec = BuildSpec(
        source=source,
        precision=precision,
        calib=calib,
        recipe=recipe,
        profile=profile,
        force=force,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        result = quantize(spec, path, report)
    kept = [{"node": entry.node, "reason": entry.reason} for entry in result.qdq.kept_float]
    if as_json:
        print_json(
            {
                "model": str(path),
                "precision": precision.name,
                "quantized": list(result.qdq.nodes),
                "kept_float": kept,
                "lint": [finding.what for finding in result.findings],
            }
        )
        return 0
    sys.stdout.write(f"{plain(str(path))}\n  {len(result.qdq.nodes)} nodes quantized, {len(kept)} kept float\n")
    if kept:
        print_table([(entry["node"], entry["reason"]) for entry in kept])
    return 0
