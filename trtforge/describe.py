"""What a manifest says of a build: the fingerprint of its inputs, and the precision that its compiled plan shows."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from trtforge import __version__
from trtforge.backends.base import Backend, BuildResult
from trtforge.backends.plan import EnginePlan, node_precision
from trtforge.errors import BuildError
from trtforge.fusion.packed_qkv import PATTERN
from trtforge.fusion.regions import AttentionFfnBlock
from trtforge.graph.cost import GEMM_OPS, constant_weight
from trtforge.graph.edit import all_nodes
from trtforge.graph.intake.element_types import FLOAT32, FLOAT64
from trtforge.graph.lint import Finding
from trtforge.graph.load import LoadedModel
from trtforge.graph.signature import input_specs, output_specs
from trtforge.hashing import fingerprint
from trtforge.inputs import BuildInputs
from trtforge.manifest import (
    CalibrationInfo,
    EngineInfo,
    FusionEntry,
    IoInfo,
    KeptFloatEntry,
    Manifest,
    NearMissEntry,
    PrecisionInfo,
    ProfileInfo,
    RangeInfo,
)
from trtforge.ops.attention_ffn import DOMAIN
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.quantization.table import CalibrationTable
from trtforge.quantization.weight_storage import weight_storage
from trtforge.source import source_kind
from trtforge.spec import CALIBRATED, BuildSpec, precision_from_name
from trtforge.stages import Lowered, Prepared
from trtforge.target import Target
from trtforge.tensor import TensorSpec
from trtforge.user_code import source_sha256

if TYPE_CHECKING:
    from trtforge.quantization.placement import Placement

# In which form a region was built that stays as it was.
UNCHANGED = "unchanged"
# Packages whose version can change an artifact.
_PACKAGES = ("onnx", "onnx-graphsurgeon", "onnxruntime", "numpy", "ml_dtypes", "polygraphy")


def build_identity(spec: BuildSpec, loaded: LoadedModel, inputs: BuildInputs, target: Target, backend: Backend) -> str:
    """Fingerprint of everything that changes the artifact: model, data, profile, recipe, options, versions."""
    return fingerprint(
        {
            "model": [loaded.name, loaded.sha256],
            "data": [inputs.calib_sha256, inputs.evaluation.sha256 if inputs.evaluation else None],
            "profiles": [info.model_dump(mode="json") for info in describe_profiles(inputs.profiles)],
            "recipe": inputs.recipe.fingerprint() if spec.precision.quantization else None,
            "precision": spec.precision.name,
            "target": [target.names, target.explicit],
            "options": [spec.cosine_budget, spec.budget_metric, spec.search, spec.metric, spec.verify, spec.tf32],
            "metric source": None if spec.metric is None else source_sha256(spec.metric),
            "engine": spec.engine_options.identity(),
            "versions": [__version__, backend.name, backend.version(), package_versions()],
        }
    )


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change an artifact."""
    return {name: metadata.version(name) for name in _PACKAGES}


def environment(spec: BuildSpec, timing_cache_sha256: str | None = None) -> dict[str, object]:
    """Where and with what the build ran; the timing cache is the one that it left."""
    found = {} if timing_cache_sha256 is None else {"timing_cache_sha256": timing_cache_sha256}
    return found | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "tf32": spec.tf32,
        "source": str(spec.source if source_kind(spec.source) == "function" else spec.source.resolve()),
    }


def describe_engine(spec: BuildSpec, result: BuildResult) -> EngineInfo:
    """How the builder was told to make the engine, and what came of plugins."""
    values = spec.engine_options.identity()
    return EngineInfo(**values | {"plugins": dict(values["plugins"]), "plugin_layers": result.plugin_layers})


def check_plugin_layers(lowered: Lowered, result: BuildResult) -> None:
    """Refuse an engine in which a plugin computes fewer blocks than were made its own.

    Raises:
        BuildError: TensorRT imported function bodies instead, which it does silently.
    """
    wanted = 0 if lowered.blocks is None else len(lowered.blocks.lowered)
    if result.plugin_layers < wanted:
        raise BuildError(
            f"a plugin computes {result.plugin_layers} layers of the engine, of {wanted} blocks made for it",
            "the library does not have their operators, so the builder took their function bodies",
            "build the library again with this version: trtforge plugin build",
        )


def engine_warnings(spec: BuildSpec, result: BuildResult) -> Iterator[str]:
    """What the user must be told of the engine's options."""
    if spec.engine_options.plugins and not result.plugin_layers:
        yield "--plugin was given, but no plugin computes a layer of the engine: no operator of the model names one"
    if spec.engine_options.strip_weights:
        yield "the engine holds no weights: it has to be refitted from model.onnx before it runs"


def describe_precision(spec: BuildSpec, prepared: Prepared, lowered: Lowered, plan: EnginePlan) -> PrecisionInfo:
    """Types as the plan has them, weighted by FLOPs, and every node that stayed wider than asked for."""
    gemm, attention = prepared.gemm_flops, prepared.attention_flops
    types = node_precision(plan, [*gemm, *attention])
    # The products of a weight-only build run in its float type.
    wanted = spec.precision.quantization if spec.precision.is_calibrated else None
    kept: dict[str, str] = {}
    if lowered.qdq is not None:
        kept |= {entry.node: entry.reason for entry in lowered.qdq.kept_float}
        for node in lowered.qdq.nodes:
            if wanted is not None and types.get(node, wanted) != wanted:
                kept[node] = f"the builder runs it in {types[node]} although it has Q/DQ"
    if lowered.cast is not None:
        for entry in lowered.cast.kept_float32:
            kept.setdefault(entry.node, entry.reason)
    kept = {node: reason for node, reason in kept.items() if wanted is None or types.get(node) != wanted}
    return PrecisionInfo(
        requested=spec.precision.name,
        node_types={node: types[node] for node in [*gemm, *attention] if node in types},
        nodes=dict(sorted(Counter(types[node] for node in gemm if node in types).items())),
        gemm_flops_fraction=_fractions(gemm, types),
        attention_flops_fraction=_fractions(attention, types),
        kept_float=tuple(KeptFloatEntry(node=node, reason=reason) for node, reason in kept.items()),
        weights=weight_storage(lowered.graph),
    )


def pass_notes(prepared: Prepared, lowered: Lowered) -> tuple[str, ...]:
    """What the graph passes did not do, or did to values."""
    notes = prepared.normalised.notes + prepared.mended
    if lowered.qdq is not None:
        notes += lowered.qdq.notes
        notes += tuple(f"{entry.node} came quantized: {entry.reason}" for entry in lowered.qdq.kept_quantized)
    if lowered.cast is not None and lowered.cast.clamped_constants:
        names = ", ".join(lowered.cast.clamped_constants)
        notes += (f"values beyond the range of {lowered.cast.dtype} were replaced by large finite ones in {names}",)
    return notes


def precision_warnings(
    info: PrecisionInfo, prepared: Prepared, plan: EnginePlan, *, is_quantized: bool = True
) -> Iterator[str]:
    """What the user must be told of the types, because the figures alone could be misread.

    `is_quantized` is False where nothing was found to quantize, which was told then.
    """
    wanted = precision_from_name(info.requested).quantization
    if is_quantized and wanted in CALIBRATED and plan.unreadable is None and not info.gemm_flops_fraction.get(wanted):
        reasons = "; ".join(f"{entry.node}: {entry.reason}" for entry in info.kept_float[:3])
        yield f"--{wanted} was asked for, but no product runs in {wanted.upper()} in this engine ({reasons})"
    counted = prepared.gemm_flops
    left_out = [
        node.name
        for node in all_nodes(prepared.graph)
        if node.op in GEMM_OPS and constant_weight(node) is not None and node.name not in counted
    ]
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        yield (
            f"{len(left_out)} weighted nodes are not in gemm_flops_fraction, because they lie in the body of an If, "
            f"Loop or Scan or their size is unknown: {names}"
        )


def describe_profiles(profiles: ProfileSet) -> tuple[ProfileInfo, ...]:
    """The profiles as the manifest holds them."""
    return tuple(
        ProfileInfo(
            name=profile.name,
            inputs={name: _range(span) for name, span in profile.inputs.items()},
            values={name: _range(span) for name, span in profile.values.items()},
        )
        for profile in profiles.profiles
    )


def profiles_from_manifest(manifest: Manifest) -> ProfileSet:
    """The optimisation profiles that an artifact was built with."""

    def spans(ranges: Mapping[str, RangeInfo]) -> dict[str, ShapeRange]:
        return {name: ShapeRange(entry.min, entry.opt, entry.max) for name, entry in ranges.items()}

    profiles = (Profile(info.name, spans(info.inputs), spans(info.values)) for info in manifest.profiles)
    return ProfileSet(tuple(profiles), "artifact")


def describe_io(loaded: LoadedModel) -> tuple[IoInfo, ...]:
    """Inputs, then outputs, of the engine: the source's, in the types that the engine has."""
    inputs = [_describe_port("input", spec) for spec in input_specs(loaded.graph)]
    outputs = [_describe_port("output", spec) for spec in output_specs(loaded.graph)]
    return (*inputs, *outputs)


def _describe_port(mode: Literal["input", "output"], spec: TensorSpec) -> IoInfo:
    # The builders' parser makes float32 of a float64 port and keeps or refuses every other type.
    is_narrowed = spec.dtype == FLOAT64.name
    return IoInfo(
        name=spec.name,
        mode=mode,
        dtype=FLOAT32.name if is_narrowed else spec.dtype,
        shape=spec.shape,
        source_dtype=spec.dtype if is_narrowed else None,
    )


def describe_calibration(placement: Placement | None, table: CalibrationTable | None) -> CalibrationInfo | None:
    """How the activation ranges that the build uses were found."""
    if placement is None or table is None:
        return None
    return CalibrationInfo(
        method=table.method,
        samples=table.samples,
        sha256=table.data_sha256,
        recipe_sha256=table.recipe_sha256,
        amax=table.amax_of(placement.tensors),
    )


def describe_fusion(prepared: Prepared, lowered: Lowered | None = None) -> tuple[FusionEntry, ...]:
    """Regions, and what they were rewritten to; those of a plugin too, once the graph is lowered."""
    respelled = (
        FusionEntry(region=entry.node, pattern=PATTERN, lowered_to=entry.lowered_to)
        for entry in prepared.fused.rewritten
    )
    regions = (
        FusionEntry(region=r.region, pattern=r.pattern, lowered_to=r.lowered_to or UNCHANGED, reason=r.reason)
        for r in prepared.regions.regions
    )
    return (*respelled, *regions, *_describe_blocks(lowered))


def _describe_blocks(lowered: Lowered | None) -> Iterator[FusionEntry]:
    if lowered is None or lowered.blocks is None:
        return
    pattern = AttentionFfnBlock.pattern
    for block in lowered.blocks.lowered:
        yield FusionEntry(region=block.region, pattern=pattern, lowered_to=f"{DOMAIN}::{block.op_type}")
    for region, reason in lowered.blocks.unfit.items():
        yield FusionEntry(region=region, pattern=pattern, lowered_to=UNCHANGED, reason=reason)


def describe_near_misses(prepared: Prepared, lowered: Lowered | None = None) -> tuple[NearMissEntry, ...]:
    """Regions that nearly were."""
    respelled = ((miss.pattern, miss.node, miss.reason) for miss in prepared.fused.near_misses)
    regions = ((miss.pattern, miss.node, miss.reason) for miss in prepared.regions.near_misses)
    blocks = () if lowered is None or lowered.blocks is None else lowered.blocks.near_misses
    found = (*respelled, *regions, *((miss.pattern, miss.node, miss.reason) for miss in blocks))
    return tuple(NearMissEntry(pattern=pattern, node=node, reason=reason) for pattern, node, reason in found)


def describe_findings(findings: Iterable[Finding]) -> tuple[dict[str, str], ...]:
    """Lint findings that did not stop the build."""
    return tuple({key: str(value) for key, value in dataclasses.asdict(finding).items()} for finding in findings)


def _fractions(flops: Mapping[str, int], types: Mapping[str, str]) -> dict[str, float]:
    """Share of the FLOPs by type; "unknown" for nodes that no kernel of the plan covers."""
    total = sum(flops.values())
    if not total or not types:
        return {}
    shares: Counter[str] = Counter()
    for node, amount in flops.items():
        shares[types.get(node, "unknown")] += amount
    return {name: round(amount / total, 6) for name, amount in sorted(shares.items())}


def _range(span: ShapeRange) -> RangeInfo:
    return RangeInfo(min=span.min, opt=span.opt, max=span.max)
