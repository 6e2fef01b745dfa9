"""Sensitivity: the error that each region causes when it alone is quantized, at its nodes and at the model's outputs.

A few samples at a time run through the model segment by segment (`quantization.switches`). Only what those samples put
into one segment is held; from there the rest of the model runs once in float and once per region of the segment. Graphs
run as written, without graph optimisation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.batch import Batch
from trtforge.graph.save import save_model
from trtforge.parity import MASK_INPUT, OutputParity, ParityAccumulator
from trtforge.quantization.emulation import emulate_bfloat16, uses_bfloat16
from trtforge.quantization.regions import Region, Sites
from trtforge.quantization.switches import SwitchGraph, plan_segments, switch_graph
from trtforge.reference import ReferenceModel
from trtforge.verify import MetricError, call_metric, feeds_and_labels

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Sensitivity:
    """What quantizing one region alone does.

    Attributes:
        outputs: figures of the model's outputs that come after it.
        node_sqnr_db: by node name; None where the node's output is equal to the float one's, or not finite.
        metric_loss: what it takes off the metric, mean over the samples; None without a metric.
    """

    outputs: Mapping[str, OutputParity]
    node_sqnr_db: Mapping[str, float | None]
    metric_loss: float | None

    @property
    def output_sqnr_db(self) -> float | None:
        """Of the worst output; None where all are equal."""
        return min((o.sqnr_db for o in self.outputs.values() if o.sqnr_db is not None), default=None)


class _Power:
    """Signal and noise of one node's output."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0

    def add(self, exact: np.ndarray, actual: np.ndarray, feeds: Arrays) -> None:
        """Add one batch, without the positions where `attention_mask` is 0 of an output [batch, sequence, ...]."""
        difference = actual - exact
        mask = feeds.get(MASK_INPUT)
        if mask is not None and mask.ndim == 2 and mask.shape == exact.shape[:2]:
            exact, difference = exact[mask != 0], difference[mask != 0]
        # Node outputs are large, and decibels need no float64.
        self.signal += float(np.vdot(exact, exact))
        self.noise += float(np.vdot(difference, difference))

    @property
    def sqnr_db(self) -> float | None:
        is_known = 0 < self.noise < math.inf and 0 < self.signal < math.inf
        return 10.0 * math.log10(self.signal / self.noise) if is_known else None


class _Totals:
    """Sums of one region over the samples."""

    def __init__(self) -> None:
        self.outputs = ParityAccumulator()
        self.nodes: dict[str, _Power] = {}
        self.metric_loss = 0.0
        self.samples = 0


class Probe:
    """Measures regions on more and more samples; use it as a context manager.

    Args:
        base: the float graph, topologically sorted.
        quantized: the same graph with all Q/DQ pairs.
        sites: the quantized inputs.
        regions: in graph order.
        flops: by node name.
        metric: the user's function, or None.
        work: a folder for the graph that runs.
        report: takes progress notes.

    Attributes:
        cost: of one sample, in runs of the whole model.
        runs: of ONNX Runtime so far.
    """

    def __init__(
        self,
        base: gs.Graph,
        quantized: gs.Graph,
        sites: Sites,
        regions: Sequence[Region],
        flops: Mapping[str, int],
        metric: Callable[..., Any] | None,
        work: Path,
        report: Callable[[str], None],
    ) -> None:
        if uses_bfloat16(base):
            base, quantized = emulate_bfloat16(base), emulate_bfloat16(quantized)
        self._graphs = base, quantized
        self._sites = sites
        self._segments = plan_segments(base, regions, flops)
        self._metric = metric
        self._path = work / "sensitivity.onnx"
        self._report = report
        self._model: ReferenceModel | None = None
        self._totals = {region.name: _Totals() for region in regions}
        self.cost = sum(segment.share * (len(segment.regions) + 1) for segment in self._segments)
        self.runs = 0

    def add(self, batches: Sequence[Batch]) -> None:
        """Measure every region on some more samples, which are held in memory together.

        Raises:
            InputError: ONNX Runtime refuses the graph, or the metric fails.
        """
        cached: list[Arrays] = [batch.feeds for batch in batches]
        exact: list[Arrays] = []
        for number, segment in enumerate(self._segments):
            dtypes = {name: cached[0][name].dtype for name in segment.inputs}
            switched = switch_graph(*self._graphs, self._sites, self._segments, number, dtypes)
            self._load(switched.graph)
            kept = self._segments[number + 1].inputs if number + 1 < len(self._segments) else ()
            found: dict[str, list[Arrays]] = {region.name: [] for region in segment.regions}
            for index, batch in enumerate(batches):
                floats = self._run(switched, cached[index], None)
                if number == 0:
                    exact.append({name: floats[name] for name in switched.outputs})
                for region in segment.regions:
                    self._report(f"segment {number + 1} of {len(self._segments)}: {region.name}")
                    outputs = self._measure(region, switched, cached[index], floats, batch)
                    if self._metric is not None:
                        found[region.name].append({**exact[index], **outputs})
                cached[index] = {name: floats[name] if name in floats else cached[index][name] for name in kept}
            self._add_metric(found, exact, batches)

    def results(self) -> dict[str, Sensitivity]:
        """Figures by region over all samples so far."""
        return {
            name: Sensitivity(
                total.outputs.result(),
                {node: power.sqnr_db for node, power in total.nodes.items()},
                None if self._metric is None else total.metric_loss / max(total.samples, 1),
            )
            for name, total in self._totals.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._model is not None:
            self._model.close()

    def _load(self, graph: gs.Graph) -> None:
        save_model(graph, self._path)
        if self._model is None:
            self._model = ReferenceModel(self._path, as_written=True)
        else:
            self._model.load(self._path, as_written=True)

    def _run(self, switched: SwitchGraph, inputs: Arrays, region: Region | None) -> dict[str, np.ndarray]:
        """One run with one region quantized, or none: its nodes' outputs, or all that is wanted of the float run."""
        assert self._model is not None
        switches = {
            switch: np.asarray(region is not None and name == region.name) for name, switch in switched.switches.items()
        }
        if region is None:
            wanted = [*switched.node_outputs.values(), *switched.crossing]
        else:
            wanted = [switched.node_outputs[node] for node in region.nodes]
        self.runs += 1
        return self._model.run({**inputs, **switches}, list(dict.fromkeys((*switched.outputs, *wanted))))

    def _measure(
        self, region: Region, switched: SwitchGraph, inputs: Arrays, floats: Arrays, batch: Batch
    ) -> dict[str, np.ndarray]:
        """Add one batch of one region; returns the model's outputs."""
        actual = self._run(switched, inputs, region)
        total = self._totals[region.name]
        outputs = {name: actual[name] for name in switched.outputs}
        total.outputs.add({name: floats[name] for name in outputs}, outputs, batch.feeds)
        for node in region.nodes:
            tensor = switched.node_outputs[node]
            total.nodes.setdefault(node, _Power()).add(floats[tensor], actual[tensor], batch.feeds)
        return outputs

    def _add_metric(
        self, found: Mapping[str, Sequence[Arrays]], exact: Sequence[Arrays], batches: Sequence[Batch]
    ) -> None:
        """Add what each region takes off the metric on these samples."""
        if self._metric is None:
            return
        feeds = [feeds_and_labels(batch) for batch in batches]
        samples = sum(len(batch) for batch in batches)
        best = _first(call_metric(self._metric, exact, exact, feeds))
        for name, outputs in found.items():
            try:
                loss = best - _first(call_metric(self._metric, outputs, exact, feeds))
            except MetricError:
                # It has worked on the float outputs, so these are at fault.
                loss = math.inf
            self._totals[name].metric_loss += samples * loss
            self._totals[name].samples += samples


def _first(figures: Mapping[str, float]) -> float:
    return next(iter(figures.values()), math.nan)
