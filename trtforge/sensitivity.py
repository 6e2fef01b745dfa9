"""What the manifest, the report and `quantize --json` say of the search for the nodes to leave float."""

from __future__ import annotations

from typing import Literal

from trtforge.textfile import FileModel


class NodeSensitivity(FileModel):
    """A node that could be quantized.

    Attributes:
        node: ONNX name.
        region: first node of those that are kept or lowered with it; one kernel covers them all.
        flops_share: of all weighted nodes' FLOPs.
        node_sqnr_db: signal to noise of the node's own output when only its region is quantized; None where it is equal
            or not finite.
        output_sqnr_db: the same of the worst model output.
        loss: what quantizing the region alone takes off the criterion.
        kept: in float; otherwise it is lowered.
        why: in words.
    """

    node: str
    region: str
    flops_share: float
    node_sqnr_db: float | None
    output_sqnr_db: float | None
    loss: float
    kept: bool
    why: str


class TriedSet(FileModel):
    """A set of regions that was left float, and what it gave.

    Attributes:
        kept: regions by their first node.
        data: which samples it was judged on: "chosen on" or "confirmed on" those of `SensitivityInfo`.
        predicted: the criterion's value expected from the regions' own losses.
        measured: its value in ONNX Runtime; None where an output was not finite.
        lowered_flops_share: of all weighted nodes' FLOPs, what is lowered.
        met: the budget was met.
    """

    kept: tuple[str, ...]
    data: Literal["chosen", "confirmed"]
    predicted: float
    measured: float | None
    lowered_flops_share: float
    met: bool


class SensitivityInfo(FileModel):
    """How the nodes that stay float were found.

    Attributes:
        number_format: what nodes are lowered to, "int8" or "fp8".
        criterion: "mean cosine of every output", or the metric's figure.
        budget: the value to reach.
        met: the chosen set reaches it.
        note: what came of the search, in words.
        measured_on: samples on which each region was quantized alone.
        rank_correlation: Spearman's, between the ranking on half of those samples and on all; None with one pass only.
        ranked_by: what a region's loss is measured in.
        chosen_on: samples that the sets were judged on.
        confirmed_on: samples that the chosen set was judged on once more.
        nodes: every node that could be quantized, in graph order.
        tried: every set, in the order tried.
    """

    number_format: str
    criterion: str
    budget: float
    met: bool
    note: str
    measured_on: str = ""
    rank_correlation: float | None = None
    ranked_by: str = ""
    chosen_on: str = ""
    confirmed_on: str = ""
    nodes: tuple[NodeSensitivity, ...] = ()
    tried: tuple[TriedSet, ...] = ()
