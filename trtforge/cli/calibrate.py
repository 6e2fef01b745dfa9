"""`trtforge calibrate`: a calibration table from data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

NAME = "calibrate"


def command(
    source: options.Source,
    calib: options.Calib = None,
    recipe: options.Recipe = None,
    profile: options.ProfileOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: build/<model>-calibration.json.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing table.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Run calibration data through the fp32 graph and write the range of every activation to quantize."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.pipeline import calibrate
    from trtforge.spec import BuildSpec, Precision
    from trtforge.staging import write_text

    path = output or Path("build") / f"{source.stem}-calibration.json"
    spec = BuildSpec(
        source=source,
        precision=Precision(int8=True, base="fp16"),
        calib=calib,
        recipe=recipe,
        profile=profile,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        table = calibrate(spec, report)
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
