"""The stages between a source file and the graph that is built; `job.py` puts them in order.

Every stage takes values and returns values; graphs are copied where the earlier form is still needed. Quantization and
ONNX Runtime's executor are imported by the stages that use them: a plain fp32 build then starts 0.1 s sooner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.fusion.packed_qkv import PackedQkvReport, pack_qkv
from trtforge.graph.cost import attention_flops, gemm_flops
from trtforge.graph.edit import copy_graph
from trtforge.graph.lint import Finding, lint
from trtforge.graph.load import LoadedModel, load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import NormaliseReport, normalise
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.inputs import CALIBRATION_BATCH, BuildInputs
from trtforge.limits import Limits
from trtforge.profile import ProfileSet
from trtforge.quantization.table import CalibrationTable
from trtforge.recipe import QuantRecipe
from trtforge.spec import FLOAT_DTYPES, Precision
from trtforge.textfile import kind_of

if TYPE_CHECKING:
    from trtforge.quantization.cast import CastReport
    from trtforge.quantization.placement import Placement
    from trtforge.quantization.qdq import QdqReport

# The prepared fp32 graph in a job's work folder, which calibration and verification both run.
FP32_NAME = "fp32.onnx"
# Sources that a later stage of the toolchain exports; named so that the error is of use.
_OTHER_SOURCES = {".pt2": "a torch.export program", ".pt": "a PyTorch file", ".pth": "a PyTorch file"}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model ready to be quantized, cast and built.

    Attributes:
        graph: normalised and fused, still in the source's precision.
        normalised: what normalisation changed.
        fused: regions that were rewritten, and near misses.
        opt: the input shapes at which costs are counted: the first profile's opt.
        shapes: sizes by tensor name at `opt`; empty until `infer_shapes`.
    """

    graph: gs.Graph
    normalised: NormaliseReport
    fused: PackedQkvReport
    opt: Mapping[str, tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

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
class Lowered:
    """The graph in the precision asked for.

    Attributes:
        graph: what is built.
        qdq: what was quantized; None when not asked for.
        cast: what stayed fp32 in an fp16 or bf16 graph; None in fp32.
    """

    graph: gs.Graph
    qdq: QdqReport | None
    cast: CastReport | None


def load_source(source: Path, limits: Limits) -> LoadedModel:
    """The model of an ONNX file.

    Raises:
        InputError: no ONNX file, or one that breaks a rule of `graph.load`.
    """
    kind = _OTHER_SOURCES.get(source.suffix)
    if kind is not None or kind_of(source, "model") == "folder":
        raise InputError(
            f"{source} is {kind or 'a folder'}, not an ONNX file",
            "this version builds from ONNX",
            "export it first: torch.onnx.export(model, inputs, 'model.onnx', dynamo=True, opset_version=20)",
        )
    return load_model(source, limits)


def prepare(loaded: LoadedModel, profiles: ProfileSet, precision: Precision, native: OnnxNative) -> Prepared:
    """Normalise the graph and rewrite the regions that build better in another spelling."""
    graph, report = normalise(loaded.graph, native=native)
    fused = pack_qkv(graph) if precision.base != "fp32" or precision.int8 else PackedQkvReport((), ())
    opt = {name: shape.opt for name, shape in profiles.first.inputs.items()}
    return Prepared(graph, report, fused, opt)


def calibrate_table(
    prepared: Prepared,
    placement: Placement,
    inputs: BuildInputs,
    model_sha256: str,
    work: Path,
    report: Callable[[str], None],
) -> CalibrationTable:
    """Run the calibration samples through the fp32 graph and choose amax for every tensor to quantize.

    Args:
        prepared: the graph.
        placement: which tensors are needed.
        inputs: the samples and the recipe.
        model_sha256: of the source.
        work: a folder for the graph while ONNX Runtime reads it.
        report: takes progress notes.

    Raises:
        InputError: nothing can be quantized, or ONNX Runtime cannot run the graph.
    """
    from trtforge.quantization.calibrate import observe, table_from_observers
    from trtforge.reference import ReferenceModel

    dataset = inputs.calibration
    assert dataset is not None
    if not placement.tensors:
        raise InputError(
            "--int8 has nothing to quantize in this model",
            "; ".join(f"{kept.node}: {kept.reason}" for kept in placement.kept_float[:4]) or "it has no Conv or MatMul",
            "build it with --fp16",
        )
    path = work / FP32_NAME
    save_for_onnxruntime(prepared.graph, path)
    done = 0

    def batches() -> Iterator[dict[str, np.ndarray]]:
        nonlocal done
        with ReferenceModel(path, taps=placement.tensors) as model:
            for batch in dataset.batches(inputs.batch.clamp(CALIBRATION_BATCH)):
                yield model.run(batch.feeds)
                done += len(batch)
                report(f"{done} of {len(dataset)} samples")

    observers = observe(batches(), placement.tensors)
    return table_from_observers(
        observers, inputs.recipe, samples=done, model_sha256=model_sha256, data_sha256=dataset.sha256
    )


def plan_quantization(prepared: Prepared, recipe: QuantRecipe, native: OnnxNative) -> Placement:
    """Which nodes run in INT8, and why the others do not."""
    from trtforge.quantization.placement import plan_placement

    prepared.infer_shapes(native)
    return plan_placement(prepared.graph, prepared.shapes, recipe)


def lower(
    graph: gs.Graph, precision: Precision, placement: Placement | None, table: CalibrationTable | None
) -> Lowered:
    """A copy of the graph in the precision asked for: Q/DQ first, then casts.

    Args:
        graph: the prepared graph; it is not changed.
        precision: the types.
        placement: where Q/DQ goes; None for none.
        table: amax of the placement's tensors.
    """
    graph = copy_graph(graph)
    qdq = cast = None
    if placement is not None and table is not None:
        from trtforge.quantization.qdq import insert_qdq

        qdq = insert_qdq(graph, placement, table.amax_of(placement.tensors), FLOAT_DTYPES[precision.base])
    dtype = FLOAT_DTYPES[precision.base]
    if dtype != "float32":
        from trtforge.quantization.cast import cast_graph

        observed = {name: max(abs(r.min), abs(r.max)) for name, r in table.tensors.items()} if table else {}
        cast = cast_graph(graph, dtype, observed)
    return Lowered(graph, qdq, cast)


def check_lint(graph: gs.Graph) -> tuple[Finding, ...]:
    """Lint findings that the builder tolerates.

    Raises:
        InputError: a finding that the builder would refuse; names its node.
    """
    findings = lint(graph)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more such nodes)" if len(errors) > 1 else ""
        raise InputError(f"{first.what}{more}", first.why, first.fix)
    return tuple(findings)


def save_for_onnxruntime(graph: gs.Graph, path: Path) -> bool:
    """Write a graph in a form that ONNX Runtime's CPU provider, which has no bf16 kernels, computes as written.

    Returns:
        True where bf16 is emulated.
    """
    from trtforge.quantization.bfloat16 import emulate_bfloat16, uses_bfloat16

    is_emulated = uses_bfloat16(graph)
    save_model(emulate_bfloat16(graph) if is_emulated else graph, path)
    return is_emulated
