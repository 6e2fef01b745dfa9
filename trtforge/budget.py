"""The stage that makes a quantized graph meet its budget: nodes that cost too much accuracy stay float."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.graph.edit import copy_graph
from trtforge.inputs import BuildInputs
from trtforge.manifest import ParityInfo
from trtforge.mixed.choose import Choice, choose_float_nodes
from trtforge.mixed.task import Task
from trtforge.quantization.equalize_graph import apply_equalization
from trtforge.quantization.quantizer import Quantizer
from trtforge.quantization.rounding import RoundedWeights
from trtforge.spec import BuildSpec
from trtforge.stages import AS_ASKED, FP32_NAME, Prepared, Wider, lower, save_for_onnxruntime


def meet_budget(
    spec: BuildSpec,
    inputs: BuildInputs,
    prepared: Prepared,
    quantizer: Quantizer,
    parity: ParityInfo | None,
    work: Path,
    report: Callable[[str], None],
    wider: Wider = AS_ASKED,
) -> Choice:
    """Find the nodes that stay float.

    Args:
        spec: budget, metric and precision count.
        inputs: the samples.
        prepared: the float graph, with its shapes.
        quantizer: quantizes it.
        parity: figures of INT8 alone on the held-out samples; None where they were not taken.
        work: a folder for graphs.
        report: takes progress notes.
        wider: what stays wide whatever is found.

    Raises:
        InputError: there are no samples, or the metric fails.
    """
    reference = work / FP32_NAME
    if not reference.exists():
        save_for_onnxruntime(prepared.graph, reference)
    base, quantized = copy_graph(prepared.graph), copy_graph(prepared.graph)
    apply_equalization(base, quantizer.placement, quantizer.table, wider.unquantized)
    # Corrections of biases belong to all of a layer's error and have no switch.
    plain = RoundedWeights(quantizer.rounded.weights, {}, ())
    dataclasses.replace(quantizer, rounded=plain).quantize(quantized, wider.unquantized)

    def lower_with(kept: Collection[str]) -> gs.Graph:
        reasons = {**dict.fromkeys(kept, ""), **wider.unquantized}
        lowered = lower(
            prepared.graph, spec.precision, quantizer, kept=reasons, wide=wider.float32, overflow=wider.overflow
        )
        return lowered.graph

    task = Task(
        base=base,
        quantized=quantized,
        lower=lower_with,
        reference=reference,
        gemm_flops=prepared.gemm_flops,
        attention_flops=prepared.attention_flops,
        calibration=inputs.calibration,
        held_out=inputs.evaluation,
        held_out_loss=None if parity is None else _cosine_loss(parity),
        batch=inputs.batch,
        dependents=quantizer.placement.dependents,
        budget=spec.cosine_budget,
        metric=spec.budget_metric,
        number_format=quantizer.number_format.name,
        work=work,
    )
    return choose_float_nodes(task, report)


def _cosine_loss(parity: ParityInfo) -> float | None:
    """What the worst output's mean cosine lacks to 1; None where the budget is on a metric."""
    if parity.figure is not None:
        return None
    return max((math.inf if output.nan else 1.0 - output.cosine for output in parity.outputs.values()), default=None)
