"""`trtforge build`: the whole job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import engine_options as engine
from trtforge.cli import options
from trtforge.cli.explain import explaining, print_trail
from trtforge.cli.render import format_bytes, plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.export_info import ExportInfo
    from trtforge.manifest import Manifest, WeightStorage
    from trtforge.pipeline import BuildResult

NAME = "build"


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
    eval_data: Annotated[
        str | None,
        typer.Option("--eval", metavar="DATA", help="Data to verify with. Default: a fifth of the calibration data."),
    ] = None,
    profile: options.ProfileOption = None,
    recipe: options.Recipe = None,
    backend: options.Backend = "auto",
    gpu: options.Gpu = None,
    budget: options.Budget = None,
    metric: options.Metric = None,
    no_search: Annotated[
        bool,
        typer.Option("--no-search", help="Where INT8 alone misses the budget, fail instead of keeping nodes float."),
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the comparison with fp32.")] = False,
    require_verify: Annotated[bool, typer.Option("--require-verify", help="Exit 1 when nothing verified it.")] = False,
    tf32: options.Tf32 = True,
    plugin: engine.Plugin = None,
    refit: engine.Refit = False,
    strip_weights: engine.StripWeights = False,
    version_compatible: engine.VersionCompatible = False,
    hardware_compatible: engine.HardwareCompatible = "none",
    optimization_level: engine.OptimizationLevel = None,
    workspace: engine.Workspace = None,
    timing_cache: engine.TimingCache = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Default: build/<model>-<precision>.")
    ] = None,
    cache: options.Cache = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what each stage did and why, on stderr.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact made from other inputs.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Build a TensorRT engine from a model: calibrate, quantize, build, read the plan, verify."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.pipeline import build
    from trtforge.spec import BuildSpec, precision_from_options, verify_from_options

    spec = BuildSpec(
        source=source,
        precision=precision_from_options(int8, fp16, bf16, fp32, fp8=fp8, int4=int4, int8_weights=int8_weights),
        calib=calib,
        eval=eval_data,
        profile=profile,
        recipe=recipe,
        backend=backend,
        gpu=gpu,
        budget=budget,
        search=not no_search,
        metric=metric,
        verify=verify_from_options(no_verify, require_verify),
        tf32=tf32,
        engine_options=engine.engine_options(
            plugin,
            refit,
            strip_weights,
            version_compatible,
            hardware_compatible,
            optimization_level,
            workspace,
            timing_cache,
        ),
        output=output,
        cache=cache,
        force=force,
        trust_remote_code=trust_remote_code,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        result = build(spec, explaining(report) if explain else report)
    if explain and (result.reused or "artifact" in from_cache(result.manifest)):
        print_trail(result.manifest)
    if as_json:
        print_json(
            {"artifact": str(result.directory), "reused": result.reused, **result.manifest.model_dump(mode="json")}
        )
    else:
        print_summary(result)
    if not result.manifest.parity.verified:
        sys.stderr.write(f"parity: not verified ({result.manifest.parity.note})\n")
    return 0 if result.passed else 1


def print_summary(result: BuildResult) -> None:
    """The result of a build in a dozen lines."""
    m = result.manifest
    parity = m.parity
    if not parity.verified:
        verdict = "not verified"
    else:
        verdict = "passed" if result.passed else "FAILED"
    sys.stdout.write(f"{plain(str(result.directory))}{'  (up to date)' if result.reused else ''}\n")
    rows = [
        *([] if m.export is None else [("exported", describe_export(m.export))]),
        ("engine", f"{format_bytes(m.files['model.engine'].bytes)} for {', '.join(m.targets)}"),
        ("builder", f"{m.backend.name} {m.backend.version}"),
        ("precision", f"{m.precision.requested}; GEMM FLOPs {_shares(m.precision.gemm_flops_fraction)}"),
        *(("weights", describe_storage(name, entry)) for name, entry in m.precision.weights.items()),
        ("plan", m.plan.unreadable or f"{m.plan.kernels} kernels, {m.plan.fused_attention} fused attention"),
        ("accuracy", f"{verdict}; {parity.candidate} against {parity.reference}" if parity.verified else verdict),
    ]
    for name, output in parity.outputs.items():
        budget = f", budget {parity.budget}" if parity.figure is None else ""
        rows.append(("", f"{name}: cosine {output.cosine:.5f} (min {output.cosine_min:.5f}){budget}"))
    for name, values in parity.metrics.items():
        budget = f", budget {parity.budget}" if parity.figure == name else ""
        rows.append(("", f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in values.items()) + budget))
    if parity.verified and parity.note:
        rows.append(("", parity.note))
    if m.sensitivity is not None:
        rows.append(("search", m.sensitivity.note))
    for node in parity.worst_nodes:
        shown = "not finite" if node.sqnr_db is None else f"{node.sqnr_db:.1f} dB"
        rows.append(("", f"worst node {node.node}: {shown}"))
    if taken := from_cache(m):
        rows.append(("cache", f"{', '.join(taken)} from an earlier build"))
    rows.append(("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in m.timings_s.items())))
    print_table(rows)


def from_cache(manifest: Manifest) -> list[str]:
    """The stages whose results came from the stage cache."""
    cache = manifest.environment.get("cache", {})
    return list(cache.get("reused", ())) if isinstance(cache, dict) else []


def describe_export(info: ExportInfo) -> str:
    """`BertModel by torch 2.13.0, opset 23; equal to torch at 2 shapes`."""
    verdict = f"equal to torch in {len(info.runs)} runs" if info.passed else "DIFFERS from torch"
    return f"{info.architecture} by {info.exporter}, opset {info.opset}; {verdict}"


def describe_storage(name: str, entry: WeightStorage) -> str:
    """`24 in int8, 10.8 MB instead of 21.2 MB`."""
    return f"{entry.count} in {name}, {format_bytes(entry.bytes)} instead of {format_bytes(entry.float_bytes)}"


def _shares(fractions: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in fractions.items() if share) or "unknown"
