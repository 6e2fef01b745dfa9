"""The stages between a source file and the graph that is built; `job.py` puts them in order.

Every stage takes values and returns values; graphs are copied where the earlier form is still needed. Quantization and
ONNX Runtime's executor are imported by the stages that use them: a plain fp32 build then starts 0.1 s sooner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401 - makes bfloat16 a numpy type
import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import Diagnosis, InputError
from trtforge.fusion.packed_qkv import PackedQkvReport, pack_qkv
from trtforge.fusion.regions import NearMiss
from trtforge.graph.cost import attention_flops, gemm_flops
from trtforge.graph.edit import all_nodes, copy_graph
from trtforge.graph.lint import RULES, Finding, fix, lint
from trtforge.graph.load import LoadedModel, load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import NormaliseReport, normalise
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.graph.specialise import specialise
from trtforge.inputs import BuildInputs
from trtforge.limits import Limits
from trtforge.profile import ProfileSet
from trtforge.profile_choice import CALIBRATION_BATCH
from trtforge.progress import Note
from trtforge.recipe import QuantRecipe
from trtforge.source import source_kind
from trtforge.spec import FLOAT_DTYPES, Precision

if TYPE_CHECKING:
    from trtforge.fusion.lower_block import BlockReport
    from trtforge.quantization.cast import CastReport
    from trtforge.quantization.checkpoint import Checkpoint
    from trtforge.quantization.observation import Observation
    from trtforge.quantization.overflow import Overflow
    from trtforge.quantization.placement import Placement
    from trtforge.quantization.qdq import QdqReport
    from trtforge.quantization.quantizer import Quantizer
    from trtforge.quantization.weight_only_graph import StoredWeights

# The prepared fp32 graph in a job's work folder, which calibration and verification both run.
FP32_NAME = "fp32.onnx"
_KINDS = {"program": "torch.export program", "folder": "folder", "function": "function"}


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredRegion:
    """What became of a region.

    Attributes:
        region, pattern: its name and what it is.
        lowered_to: in which form it is now; None where it stays as it was.
        reason: why it stays.
    """

    region: str
    pattern: str
    lowered_to: str | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RegionReport:
    """What became of the regions of a graph.

    Attributes:
        regions: the rewritten ones first.
        near_misses: places that are none.
        whole_attention: names of the `Attention` nodes that the builder has to make one kernel of each.
    """

    regions: tuple[LoweredRegion, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    whole_attention: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model ready to be quantized, cast and built.

    Attributes:
        graph: normalised and fused, still in the source's precision.
        normalised: what normalisation changed.
        fused: projections of query, key and value that were respelled, and near misses.
        opt: the input shapes at which costs are counted: the first profile's opt.
        largest: the largest size of each input's dims in any profile.
        mended: what was changed in a model that arrived quantized, so that the builder takes it.
        shapes: sizes by tensor name at `opt`; empty until `infer_shapes`.
        regions: what became of attention regions; empty until lowering.py has decided.
    """

    graph: gs.Graph
    normalised: NormaliseReport
    fused: PackedQkvReport
    opt: Mapping[str, tuple[int, ...]]
    largest: Mapping[str, tuple[int, ...]]
    mended: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    regions: RegionReport = RegionReport()

    def infer_shapes(self, native: OnnxNative) -> None:
        """Fill `shapes`, once."""
        if not self.shapes:
            self.shapes.update(infer_shapes_at(self.graph, self.opt, native))

    @cached_property
    def gemm_flops(self) -> dict[str, int]:
        """FLOPs of every weighted node."""
        return gemm_flops(self.graph, self.shapes)

    @cached_property
    def attention_flops(self) -> dict[str, int]:
        """FLOPs of every product of two activations."""
        return attention_flops(self.graph, self.shapes)


@dataclasses.dataclass(frozen=True, slots=True)
class Wider:
    """What stays wider than the precision asked for, whatever a search for nodes to keep float finds.

    Attributes:
        unquantized: nodes that the quantizer leaves float, and why.
        float32: nodes that stay float32 in an fp16 or bf16 graph, and why.
        overflow: tensors that are too large for float16; None where nothing looked for them.
    """

    unquantized: Mapping[str, str] = dataclasses.field(default_factory=dict)
    float32: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overflow: Overflow | None = None


AS_ASKED = Wider()


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """The graph in the precision asked for.

    Attributes:
        graph: what is built.
        qdq: what was quantized; None when not asked for.
        cast: what stayed fp32 in an fp16 or bf16 graph; None in fp32.
        blocks: what a plugin computes; None without one.
    """

    graph: gs.Graph
    qdq: QdqReport | None
    cast: CastReport | None
    blocks: BlockReport | None = None


def load_source(source: Path, limits: Limits) -> LoadedModel:
    """The model of an ONNX file.

    Raises:
        InputError: no ONNX file, or one that breaks a rule of `graph.load`.
    """
    kind = source_kind(source)
    if kind != "onnx":
        raise InputError(
            f"{source} is a {_KINDS[kind]}, not an ONNX file",
            "this command reads ONNX",
            f"export it first: trtforge export {source} -o model.onnx",
        )
    return load_model(source, limits)


def normalise_source(loaded: LoadedModel, precision: Precision, native: OnnxNative) -> tuple[gs.Graph, NormaliseReport]:
    """The normalised graph, for any profile."""
    # Integers of dynamic quantization need float32; a lower precision starts from the float products they stand for.
    return normalise(loaded.graph, native=native, operators="exact" if precision.name == "fp32" else "float")


def prepare(
    graph: gs.Graph, report: NormaliseReport, profiles: ProfileSet, precision: Precision, native: OnnxNative
) -> Prepared:
    """Fold what the profiles decide, and rewrite the regions that build better in another spelling.

    Args:
        graph: of `normalise_source`; it is used up.
        report: likewise.
        profiles: shape ranges of the engine.
        precision: of the build.
        native: a child process to share with other passes.
    """
    report = dataclasses.replace(report, notes=report.notes + specialise(graph, profiles, native))
    mended = _mend_quantization(graph)
    fused = pack_qkv(graph) if precision.base != "fp32" or precision.quantization else PackedQkvReport((), ())
    opt = {name: shape.opt for name, shape in profiles.first.inputs.items()}
    largest = {
        name: tuple(max(sizes) for sizes in zip(*(p.inputs[name].max for p in profiles.profiles), strict=True))
        for name in opt
    }
    return Prepared(graph, report, fused, opt, largest, mended)


def _mend_quantization(graph: gs.Graph) -> tuple[str, ...]:
    """Mend what a model that arrives quantized has and the builder refuses, in place; what was done, in sentences."""
    is_quantized = any("uantize" in node.op or node.op.startswith(("QLinear", "QGemm")) for node in all_nodes(graph))
    if not is_quantized or all(finding.severity != "error" for finding in lint(graph)):
        return ()
    return tuple(f"{fixed.rule}: {fixed.what}" for fixed in fix(graph))


def observe_activations(
    prepared: Prepared,
    placement: Placement,
    inputs: BuildInputs,
    model_sha256: str,
    work: Path,
    note: Note,
    warn: Callable[[str], None],
    checkpoint: Checkpoint | None = None,
    *,
    keep_rows: bool = False,
) -> Observation:
    """Run the calibration samples through the fp32 graph and observe every tensor to quantize.

    Args:
        prepared: the graph.
        placement: which tensors are needed.
        inputs: the samples and the recipe.
        model_sha256: of the source.
        work: a folder for the graph while ONNX Runtime reads it.
        note: takes progress.
        warn: takes what the user must know.
        checkpoint: saves the state from time to time, and gives what to go on from.
        keep_rows: sample rows of the tensors as well.

    Raises:
        InputError: ONNX Runtime cannot run the graph, or the recipe's mask does not fit.
        ChildDiedError: the process that runs it died.
    """
    from trtforge.quantization.calibrate import Pass, channel_axes, observe_model, padding_mask

    assert inputs.calibration is not None
    path = work / FP32_NAME
    save_for_onnxruntime(prepared.graph, path)
    run = Pass(
        model=path,
        model_sha256=model_sha256,
        channel_axes=channel_axes(prepared.graph, placement.activations),
        dataset=inputs.calibration,
        batch_size=inputs.batch.clamp(CALIBRATION_BATCH),
        mask=padding_mask(inputs.recipe, inputs.calibration.specs),
        keep_rows=keep_rows,
    )
    return observe_model(run, note, warn, checkpoint)


def plan_quantization(prepared: Prepared, recipe: QuantRecipe, native: OnnxNative) -> Placement:
    """Which nodes run in INT8, and why the others do not."""
    from trtforge.quantization.placement import plan_placement

    prepared.infer_shapes(native)
    largest = infer_shapes_at(prepared.graph, prepared.largest, native) if recipe.attention else None
    return plan_placement(prepared.graph, prepared.shapes, recipe, largest=largest)


def plan_weights(prepared: Prepared, precision: Precision, recipe: QuantRecipe) -> Placement:
    """Which weights a weight-only build stores in a low format.

    Raises:
        InputError: none can be.
    """
    from trtforge.quantization.formats import FORMATS
    from trtforge.quantization.weight_only import plan_weight_only

    placement = plan_weight_only(prepared.graph, recipe, FORMATS[precision.quantization or ""])
    if not placement.weights:
        raise nothing_to_quantize(precision, placement)
    return placement


def check_arrived(precision: Precision, placement: Placement) -> None:
    """Refuse FP8 for a model that came with Q/DQ: a product would get operands in two formats, and run in neither.

    Raises:
        InputError: it did.
    """
    if precision.quantization == "fp8" and (placement.kept_quantized or placement.reused):
        nodes = [*(entry.node for entry in placement.kept_quantized), *(site.node for site in placement.reused)]
        raise InputError(
            "--fp8 cannot complete a model that came with Q/DQ",
            f"node {nodes[0]!r} has it already, and both operands of a product need one format",
            "build it with --int8, or start from the float model",
        )


def nothing_to_quantize(precision: Precision, placement: Placement) -> InputError:
    """The error of a model of which every node stays as it is."""
    if arrived := getattr(placement, "kept_quantized", ()):
        from trtforge.quantization.arrived import everything_quantized

        return everything_quantized(arrived)
    kept = placement.kept_float
    return InputError(
        f"--{precision.quantization} has nothing to quantize in this model",
        "; ".join(f"{entry.node}: {entry.reason}" for entry in kept[:4]) or "it has no Conv or MatMul",
        "build it with --fp16",
    )


def lower(
    graph: gs.Graph,
    precision: Precision,
    quantizer: Quantizer | None,
    stored: StoredWeights | None = None,
    kept: Mapping[str, str] | None = None,
    wide: Mapping[str, str] | None = None,
    overflow: Overflow | None = None,
) -> Lowered:
    """A copy of the graph in the precision asked for: Q/DQ first, then casts.

    Args:
        graph: the prepared graph; it is not changed.
        precision: the types.
        quantizer: inserts Q/DQ; None for none.
        stored: the weights of a weight-only build.
        kept: nodes that the quantizer leaves float, and why.
        wide: nodes that stay float32 in an fp16 or bf16 graph, and why.
        overflow: tensors whose nodes stay float32 in an fp16 graph, besides those that calibration saw.

    Raises:
        InputError: the graph's opset is too low for the format.
    """
    graph = copy_graph(graph)
    qdq = cast = None
    observed: dict[str, float] = {}
    if stored is not None or quantizer is not None:
        check_opset(graph, precision)
    if quantizer is not None:
        qdq = quantizer.quantize(graph, kept)
        observed = {name: max(abs(r.min), abs(r.max)) for name, r in quantizer.table.tensors.items()}
    elif stored is not None:
        qdq = stored.insert(graph)
    dtype = FLOAT_DTYPES[precision.base]
    if dtype != "float32":
        from trtforge.quantization.arrived import raise_small_scales
        from trtforge.quantization.cast import cast_graph
        from trtforge.quantization.conv_scales import move_channel_scales

        raise_small_scales(graph, np.dtype(dtype))
        move_channel_scales(graph, np.dtype(dtype))
        beyond = {} if overflow is None or dtype != "float16" else overflow.kept_nodes(graph)
        cast = cast_graph(graph, dtype, observed, {**beyond, **(wide or {})})
    return Lowered(graph, qdq, cast)


def check_opset(graph: gs.Graph, precision: Precision) -> None:
    """Refuse a graph whose opset, which onnx could not raise, lacks the number format.

    Raises:
        InputError: it does.
    """
    from trtforge.quantization.formats import FORMATS

    needed = FORMATS[precision.quantization or "int8"].opset
    if graph.opset < needed:
        raise InputError(
            f"--{precision.quantization} needs opset {needed}; this model stays at opset {graph.opset}",
            "DequantizeLinear does not know the format before, and onnx could not raise the model's opset",
            f"export the model with opset {needed} or newer",
        )


def check_lint(graph: gs.Graph) -> tuple[Finding, ...]:
    """Lint findings that the builder tolerates.

    Raises:
        InputError: a finding that the builder would refuse; names its node.
    """
    findings = lint(graph)
    _refuse([finding for finding in findings if finding.severity == "error"], graph)
    return tuple(findings)


def check_operators(graph: gs.Graph) -> None:
    """Refuse operators that no builder has before anything is calibrated, while tensors have the model's own names.

    Raises:
        InputError: there is one; names its node.
    """
    _refuse(list(RULES["missing-op"](graph)), graph)


def _refuse(errors: Sequence[Finding], graph: gs.Graph) -> None:
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more such nodes)" if len(errors) > 1 else ""
        refusal = InputError(f"{first.what}{more}", first.why, first.fix)
        op = next((node.op for node in all_nodes(graph) if node.name == first.node), "")
        refusal.diagnosis = Diagnosis(first.rule, first.why, first.fix, first.node, op, message=first.what)
        raise refusal


def save_for_onnxruntime(graph: gs.Graph, path: Path) -> bool:
    """Write a graph in a form that ONNX Runtime's CPU provider, which has no bf16 kernels, computes as written.

    Returns:
        True where bf16 is emulated.
    """
    from trtforge.quantization.emulation import emulate_bfloat16, uses_bfloat16

    is_emulated = uses_bfloat16(graph)
    save_model(emulate_bfloat16(graph) if is_emulated else graph, path)
    return is_emulated
