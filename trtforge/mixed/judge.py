"""What a set of regions left float gives: real graphs, lowered as for a build, run as written in ONNX Runtime."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trtforge.data import Dataset
from trtforge.graph.save import save_model
from trtforge.mixed.task import Task
from trtforge.quantization.emulation import as_computed
from trtforge.quantization.regions import Region
from trtforge.quantization.search import Kept
from trtforge.reference import ReferenceModel
from trtforge.verify import Candidate, MetricError, Run, Scorer

COSINE = "mean cosine of every output"


class Judge:
    """Evaluates sets on one dataset, each set once.

    Args:
        task: the search.
        model: a process of ONNX Runtime to work in; what it has loaded is replaced.
        dataset: the samples.
        regions: all of them.
        label: what the samples are called.
        report: takes progress notes.

    Attributes:
        label: what the samples are called.
        criterion: what is judged, in words.
        ceiling: the criterion's value for the float graph itself.
        allowed: the loss that the budget allows.
        known: losses of the sets evaluated so far.
    """

    def __init__(
        self,
        task: Task,
        model: ReferenceModel,
        dataset: Dataset,
        regions: Sequence[Region],
        label: str,
        report: Callable[[str], None],
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=task.work))
        self.label = label
        model.load(task.reference, as_written=True)
        self._scorer = Scorer(model, [Run(dataset, task.batch.opt)], task.metric, folder, report)
        self._nodes = {region.name: region.nodes for region in regions}
        self._lower = task.lower
        self._path = folder / "candidate.onnx"
        figure = self._scorer.figure
        self.criterion = figure or COSINE
        self.ceiling = 1.0 if figure is None else self._scorer.exact.metrics[figure]
        self.allowed = self.ceiling - task.budget
        self.known: dict[Kept, float] = {}
        self._output_losses: dict[Kept, dict[str, float]] = {}

    def loss(self, kept: Kept) -> float:
        """What a set takes off the criterion, at least 0; inf where an output is not finite."""
        if kept not in self.known:
            self.known[kept] = self._evaluate(kept)
        return self.known[kept]

    def missed_outputs(self, kept: Kept) -> tuple[str, ...]:
        """The outputs of an evaluated set whose mean cosine loses more than is allowed; all of them where none does."""
        losses = self._output_losses.get(kept, {})
        return tuple(name for name, loss in losses.items() if loss > self.allowed) or tuple(losses)

    def _evaluate(self, kept: Kept) -> float:
        nodes = frozenset(node for region in kept for node in self._nodes[region])
        graph = self._lower(nodes)
        save_model(as_computed(graph), self._path)
        candidate = Candidate("candidate", f"graph with {len(nodes)} nodes kept float", self._path)
        try:
            scores = self._scorer.score(candidate)
        except MetricError:
            # It has worked on the reference's outputs, so these are at fault.
            return math.inf
        outputs = scores.batches[0].outputs
        losses = {name: math.inf if output.nan else 1.0 - output.cosine for name, output in outputs.items()}
        self._output_losses[kept] = losses
        figure = self._scorer.figure
        if math.inf in losses.values() or figure is None:
            return max(losses.values(), default=0.0)
        return max(self.ceiling - scores.metrics[figure], 0.0)
