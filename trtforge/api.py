"""The commands as typed functions:

    import trtforge

    result = trtforge.build("model.onnx", precision="int8", calib="calibration.npz")
    result.manifest.precision.gemm_flops_fraction["int8"]

Options that a call leaves out have the command line's defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from trtforge import pipeline
from trtforge.engine_options import EngineOptions
from trtforge.limits import Limits
from trtforge.method_table import MethodTable
from trtforge.pipeline import COMPARED_SAMPLES, BuildResult, QuantizeResult
from trtforge.progress import Reporter, ignore
from trtforge.quantization.table import CalibrationTable
from trtforge.spec import BuildSpec, Verification, precision_from_name


class CalibrateOptions(TypedDict, total=False):
    """Options of calibration; each is described in `BuildSpec`."""

    calib: str | Path | None
    profile: str | Path | None
    recipe: str | Path | None
    cache: str | Path | None
    trust_remote_code: bool
    force: bool
    limits: Limits


class CompareOptions(CalibrateOptions, total=False):
    """Options of a comparison; each is described in `BuildSpec`."""

    eval: str | Path | None
    metric: str | None


class QuantizeOptions(CalibrateOptions, total=False):
    """Options of quantization; each is described in `BuildSpec`."""

    budget: float | None
    metric: str | None


class BuildOptions(QuantizeOptions, total=False):
    """Options of a build; each is described in `BuildSpec`."""

    eval: str | Path | None
    backend: str
    gpu: str | None
    search: bool
    verify: Verification
    tf32: bool
    engine_options: EngineOptions
    output: str | Path | None


def build(
    source: str | Path, *, precision: str = "fp32", report: Reporter = ignore, **options: Unpack[BuildOptions]
) -> BuildResult:
    """Build an engine; the whole job.

    Args:
        source: an ONNX file, a `.pt2` program, a Hugging Face folder, or "package.module:function".
        precision: "fp32", "fp16" or "bf16"; or "int8", "fp8", "int4" or "int8-weights", each with the rest in fp16, or
            followed by "+bf16" or "+fp32".
        report: takes progress and warnings.
        **options: see `BuildSpec`.

    Returns:
        The artifact's folder, its manifest, and whether it met its accuracy budget.

    Raises:
        TrtForgeError: bad input, or not possible here; nothing is left behind.
    """
    return pipeline.build(_spec(source, precision, options), report)


def calibrate(
    source: str | Path, *, report: Reporter = ignore, **options: Unpack[CalibrateOptions]
) -> CalibrationTable:
    """The calibration table of a model; see `pipeline.calibrate`."""
    return pipeline.calibrate(_spec(source, "int8", options), report)


def compare(
    source: str | Path,
    *,
    samples: int = COMPARED_SAMPLES,
    report: Reporter = ignore,
    **options: Unpack[CompareOptions],
) -> MethodTable:
    """The method table of a model; see `pipeline.compare`."""
    spec = _spec(source, "int8", options)
    return pipeline.compare(spec, samples, report)


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    precision: str = "int8",
    report: Reporter = ignore,
    **options: Unpack[QuantizeOptions],
) -> QuantizeResult:
    """Write the graph with Q/DQ; see `pipeline.quantize`."""
    spec = _spec(source, precision, options)
    return pipeline.quantize(spec, Path(output), report)


def _spec(source: str | Path, precision: str, options: Mapping[str, Any]) -> BuildSpec:
    """What a call asks for; all its paths may be `str` or `Path`."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in {"output", "cache"} & given.keys():
        given[name] = Path(given[name])
    for name in {"calib", "eval", "profile", "recipe"} & given.keys():
        given[name] = os.fspath(given[name])  # it may be `module:function` or a shipped name too
    return BuildSpec(source=Path(source), precision=precision_from_name(precision), **given)
