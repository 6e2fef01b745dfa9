"""`trtforge quantize`: the graph with Q/DQ, without building it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.sensitivity import SensitivityInfo

NAME = "quantize"


def command(
    source: options.Source,
    int8: options.Int8 = False,
    fp8: options.Fp8 = False,
    int4: options.Int4 = False,
    int8_weights: options.Int8Weights = False,
    fp16: options.Fp16 = False,
    bf16: options.Bf16 = False,
    fp32: options.Fp32 = False,
    calib: options.Calib = None,
    recipe: options.Recipe = None,
    profile: options.ProfileOption = None,
    budget: options.Budget = None,
    metric: options.Metric = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: build/<model>-<precision>.onnx.")
    ] = None,
    cache: options.Cache = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Quantize by TensorRT's rules and write the ONNX file that a build would use; to INT8 unless told otherwise."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.pipeline import quantize
    from trtforge.source import source_name
    from trtforge.spec import BuildSpec, precision_from_options

    is_int8 = int8 or not (fp8 or int4 or int8_weights)
    precision = precision_from_options(is_int8, fp16, bf16, fp32, fp8=fp8, int4=int4, int8_weights=int8_weights)
    path = output or Path("build") / f"{source_name(source)}-{precision.name}.onnx"
    spec = BuildSpec(
        source=source,
        precision=precision,
        calib=calib,
        recipe=recipe,
        profile=profile,
        budget=budget,
        metric=metric,
        cache=cache,
        force=force,
        trust_remote_code=trust_remote_code,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        result = quantize(spec, path, report)
    kept = [{"node": entry.node, "reason": entry.reason} for entry in result.qdq.kept_float]
    arrived = [{"node": entry.node, "reason": entry.reason} for entry in result.qdq.kept_quantized]
    if as_json:
        print_json(
            {
                "model": str(path),
                "precision": precision.name,
                "quantized": list(result.qdq.nodes),
                "kept_float": kept,
                "kept_quantized": arrived,
                "lint": [finding.what for finding in result.findings],
                "sensitivity": None if result.sensitivity is None else result.sensitivity.model_dump(mode="json"),
            }
        )
        return 0 if result.passed else 1
    sys.stdout.write(f"{plain(str(path))}\n  {len(result.qdq.nodes)} nodes quantized, {len(kept)} kept float\n")
    if kept:
        print_table([(entry["node"], entry["reason"]) for entry in kept])
    if arrived:
        sys.stdout.write(f"  {len(arrived)} nodes came quantized\n")
        print_table([(entry["node"], entry["reason"]) for entry in arrived])
    if result.sensitivity is not None:
        print_sensitivity(result.sensitivity)
    return 0 if result.passed else 1


def print_sensitivity(info: SensitivityInfo) -> None:
    """What came of the search, then every node: its share of the FLOPs, its error alone, and where it runs."""
    sys.stdout.write(f"  {plain(info.note)}\n")
    if info.nodes:
        rows: list[tuple[str, ...]] = [("node", "region", "FLOPs", "SQNR at node", "at outputs", "", "why")]
        for entry in info.nodes:
            decibels = ["-" if v is None else f"{v:.1f} dB" for v in (entry.node_sqnr_db, entry.output_sqnr_db)]
            kept = "kept" if entry.kept else "lowered"
            rows.append((entry.node, entry.region, f"{entry.flops_share:.1%}", *decibels, kept, entry.why))
        print_table(rows)
