"""What a search is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.data import Dataset
from trtforge.inputs import BatchRange
from trtforge.quantization.sites import Dependent

# Makes the graph that a build would use, with the named nodes left float.
Lower = Callable[[frozenset[str]], gs.Graph]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One search.

    Attributes:
        base: the float graph, topologically sorted.
        quantized: the same graph with every Q/DQ pair.
        lower: makes the graph to judge, from the names of the nodes that stay float.
        reference: ONNX file of `base`.
        gemm_flops: of weighted nodes, by name.
        attention_flops: of products of two activations, by name.
        calibration: samples to choose on; None takes the held-out ones.
        held_out: samples to confirm on; None takes all calibration samples.
        held_out_loss: what INT8 everywhere takes off the criterion on the held-out samples, where that is known.
        batch: sizes of the first axis.
        dependents: nodes that `lower` leaves float where one that they need is.
        budget: the criterion's value to reach.
        metric: `module:function` whose first figure is the criterion; None is the mean cosine of the worst output.
        number_format: what nodes are lowered to, "int8" or "fp8".
        work: a folder for graphs.
    """

    base: gs.Graph
    quantized: gs.Graph
    lower: Lower
    reference: Path
    gemm_flops: Mapping[str, int]
    attention_flops: Mapping[str, int]
    calibration: Dataset | None
    held_out: Dataset | None
    held_out_loss: float | None
    batch: BatchRange
    dependents: Sequence[Dependent]
    budget: float
    metric: str | None
    number_format: str
    work: Path
