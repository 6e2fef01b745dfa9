"""`trtforge reduce`: the smallest part of a model that does not build."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import engine_options as engine
from trtforge.cli import options
from trtforge.cli.render import plain, print_json, progress_reporter
from trtforge.errors import REDUCE_HINT

if TYPE_CHECKING:
    from trtforge.reducing import Reduced

NAME = "reduce"
# Nodes that are listed by name.
_MAX_SHOWN = 10


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
    profile: options.ProfileOption = None,
    recipe: options.Recipe = None,
    backend: options.Backend = "auto",
    gpu: options.Gpu = None,
    tf32: options.Tf32 = True,
    plugin: engine.Plugin = None,
    refit: engine.Refit = False,
    strip_weights: engine.StripWeights = False,
    version_compatible: engine.VersionCompatible = False,
    hardware_compatible: engine.HardwareCompatible = "none",
    optimization_level: engine.OptimizationLevel = None,
    workspace: engine.Workspace = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: build/<model>-reduced.onnx.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Cut a model that does not build to the smallest part that fails the same way; takes the options of the build."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.reducing import reduce_model
    from trtforge.source import source_name
    from trtforge.spec import BuildSpec, precision_from_options

    spec = BuildSpec(
        source=source,
        precision=precision_from_options(int8, fp16, bf16, fp32, fp8=fp8, int4=int4, int8_weights=int8_weights),
        calib=calib,
        profile=profile,
        recipe=recipe,
        backend=backend,
        gpu=gpu,
        tf32=tf32,
        engine_options=engine.engine_options(
            plugin,
            refit,
            strip_weights,
            version_compatible,
            hardware_compatible,
            optimization_level,
            workspace,
            timing_cache=None,
        ),
        force=force,
        trust_remote_code=trust_remote_code,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        found = reduce_model(spec, output or Path("build") / f"{source_name(source)}-reduced.onnx", report)
    if as_json:
        print_json(_as_json(found))
    else:
        _print_part(found)
    return 0


def _as_json(found: Reduced) -> dict[str, Any]:
    error, diagnosis = found.error, found.error.diagnosis
    return {
        "model": str(found.model),
        "nodes": list(found.nodes),
        "num_nodes": found.num_nodes,
        "is_smallest": found.is_smallest,
        "trials": found.trials,
        "profile": found.profiles,
        "error": {"what": error.what, "why": error.why, "fix": error.fix},
        "diagnosis": None if diagnosis is None else dataclasses.asdict(diagnosis),
    }


def _without_hint(fix: str) -> str:
    """What to do besides what has just been done."""
    before, _, after = fix.partition(REDUCE_HINT)
    return "; ".join(part for part in (before.strip("; "), after.removeprefix(", and ").strip("; ")) if part)


def _print_part(found: Reduced) -> None:
    error = found.error
    fix = _without_hint(error.fix)
    more = "" if found.is_smallest else "; the search ended before it was the smallest"
    lines = [
        plain(str(found.model)),
        f"  {len(found.nodes)} of {found.num_nodes} nodes, after {found.trials} trials{more}",
        *(f"    {plain(name)}" for name in found.nodes[:_MAX_SHOWN]),
        *(["    ..."] if len(found.nodes) > _MAX_SHOWN else []),
        f"  it fails like the whole: {plain(error.what)}",
        f"    why: {plain(error.why)}",
        *([f"    fix: {plain(fix)}"] if fix else []),
        "  with this profile:",
        *(f"    {line}" for line in found.profiles.splitlines()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
