"""Calibration: run the model on the data, observe its activations, then choose amax per tensor.

The process that runs the model observes it too. What it remembers is of bounded size, so that memory does not depend on
the number of samples; it comes here at the end, and from time to time to be saved.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from trtforge import __version__
from trtforge.data import Dataset
from trtforge.errors import ChildDiedError, InputError
from trtforge.graph.edit import all_nodes
from trtforge.hashing import fingerprint
from trtforge.parity import MASK_INPUT
from trtforge.progress import Note
from trtforge.quantization.calibrators import choose_amax
from trtforge.quantization.checkpoint import Checkpoint
from trtforge.quantization.equalize import Candidate
from trtforge.quantization.observation import Observation
from trtforge.quantization.observers import StreamingObserver
from trtforge.quantization.placement import ActivationSite
from trtforge.quantization.table import CalibrationTable, TensorRange
from trtforge.recipe import QuantRecipe
from trtforge.reference import CPU, ReferenceModel
from trtforge.tensor import TensorSpec

_SERVICE = "trtforge.quantization.observe_service:SERVICE"


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One pass over calibration data.

    Attributes:
        model: the fp32 graph's ONNX file.
        model_sha256: of the source that it was made from.
        channel_axes: the tensors to observe; see `Observation`.
        dataset: the samples.
        batch_size: samples per run.
        mask: see `Observation`.
        keep_rows: see `Observation`.
    """

    model: Path
    model_sha256: str
    channel_axes: Mapping[str, int | None]
    dataset: Dataset
    batch_size: int
    mask: str | None = None
    keep_rows: bool = False

    def identity(self, executor: str) -> str:
        """Fingerprint of everything that the observation depends on; `executor` is what runs the model."""
        options = [list(self.channel_axes.items()), self.batch_size, self.mask, self.keep_rows, executor]
        return fingerprint([__version__, self.model_sha256, self.dataset.sha256, *options])

    def start_empty(self) -> Observation:
        """The observation before the first batch."""
        return Observation(self.channel_axes, mask=self.mask, keep_rows=self.keep_rows)


def observe_model(
    work: Pass, note: Note, warn: Callable[[str], None], checkpoint: Checkpoint | None = None
) -> Observation:
    """Run a model on all samples and observe its tensors.

    Args:
        work: what to run.
        note: takes progress.
        warn: takes what the user must know.
        checkpoint: where to save the state, and what to go on from.

    Raises:
        InputError: ONNX Runtime cannot run the model, the mask does not fit, or it hides every position.
        ChildDiedError: the process that runs it died.
    """
    if work.mask is not None:
        check_mask(work.mask, work.dataset.specs)
    total = len(work.dataset)
    with ReferenceModel(work.model, taps=list(work.channel_axes), use_gpu=True, service=_SERVICE) as model:
        if model.gpu_failure:
            warn(f"calibration runs on the CPU: ONNX Runtime cannot use its CUDA provider ({model.gpu_failure})")
        if model.provider != CPU:
            note(f"running on {model.provider}", level="notice")
        identity = work.identity(f"{model.provider} {model.version}")
        observation = work.start_empty() if checkpoint is None else checkpoint.load(identity, work.start_empty, warn)
        done, batches_done = observation.samples, observation.batches
        if done:
            note(f"continuing at sample {done} of {total}", done, total, "notice")
        options = {"channel_axes": list(work.channel_axes.items()), "mask": work.mask, "keep_rows": work.keep_rows}
        model.call("start", options, observation.state())
        for index, batch in enumerate(work.dataset.batches(work.batch_size)):
            if index < batches_done:
                continue
            model.call("observe", {"samples": len(batch)}, batch.feeds)
            done += len(batch)
            note(f"{done} of {total} samples", done, total)
            if checkpoint is not None and checkpoint.is_due:
                checkpoint.save(identity, model.call("state", {}, {})[1])
        _take_state(observation, model)
    if work.mask is not None:
        _check_masked(observation, warn)
    return observation


def channel_axes(graph: gs.Graph, sites: Sequence[ActivationSite]) -> dict[str, int | None]:
    """The channel axis of every tensor to quantize: the axis over which its first weighted consumer sums.

    An axis counted from the end has positions before it: see `Observation`.
    """
    nodes = {node.name: node for node in all_nodes(graph)}
    axes: dict[str, int | None] = {}
    for site in sites:
        if axes.get(site.tensor) is None:
            axes[site.tensor] = _summed_axis(nodes[site.node], site.input_index)
    return axes


def _summed_axis(node: gs.Node, input_index: int) -> int | None:
    if node.op in {"Conv", "ConvTranspose"}:
        return 1
    if node.op == "MatMul":
        return -1 if input_index == 0 else -2
    if node.op == "Gemm":
        is_transposed = bool(node.attrs.get("transA" if input_index == 0 else "transB", 0))
        return -2 if is_transposed == (input_index == 0) else -1
    return None


def padding_mask(recipe: QuantRecipe, specs: Sequence[TensorSpec]) -> str | None:
    """The input that marks padding, by the recipe; None for none.

    Args:
        recipe: names it, or leaves it to the model's inputs.
        specs: the model's inputs.
    """
    if recipe.mask == "none":
        return None
    if recipe.mask != "auto":
        return recipe.mask
    fits = (
        spec.name == MASK_INPUT
        and spec.dtype.startswith(("int", "uint", "bool"))
        and (spec.shape is not None and len(spec.shape) == 2)
        for spec in specs
    )
    return MASK_INPUT if any(fits) else None


def check_mask(mask: str, specs: Sequence[TensorSpec]) -> None:
    """Refuse a recipe's mask that is no integer input [batch, sequence] of the model.

    Raises:
        InputError: names the inputs that come close.
    """
    what = f"the recipe's mask '{mask}' cannot be used"
    spec = next((spec for spec in specs if spec.name == mask), None)
    if spec is None:
        names = [item.name for item in specs]
        close = difflib.get_close_matches(mask, names, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(close)}?" if close else "name one of them, or leave mask out"
        raise InputError(what, f"the model has no such input; its inputs are {', '.join(names)}", fix)
    if not spec.dtype.startswith(("int", "uint", "bool")) or (spec.shape is not None and len(spec.shape) != 2):
        why = f"it is {spec.describe()}; a mask is an integer or bool input [batch, sequence], 0 at padding"
        raise InputError(what, why, "name such an input, or leave mask out")


def _check_masked(observation: Observation, warn: Callable[[str], None]) -> None:
    """What a mask did: nothing is worth a warning, and hiding everything is an error."""
    masked = observation.masked_tensors
    if not masked:
        warn(
            f"the recipe's mask '{observation.mask}' hid nothing: no tensor to quantize has its batch and sequence axes"
        )
    elif all(not (o.count or o.num_non_finite) for name, o in observation.observers.items() if name in masked):
        raise InputError(
            f"the recipe's mask '{observation.mask}' hides every position of the calibration data",
            "it is 0 everywhere",
            "give data with real tokens, or leave mask out",
        )


def _take_state(observation: Observation, model: ReferenceModel) -> None:
    try:
        observation.restore(model.call("state", {}, {})[1])
    except (KeyError, ValueError) as err:
        raise ChildDiedError(
            "the ONNX Runtime process sent an answer that trtforge does not accept", str(err), "do not trust this model"
        ) from err


def table_from_observers(
    observers: Mapping[str, StreamingObserver],
    recipe: QuantRecipe,
    *,
    samples: int,
    model_sha256: str,
    data_sha256: str,
    equalized: Mapping[str, Candidate] | None = None,
    exact: Mapping[str, float] | None = None,
) -> CalibrationTable:
    """The calibration table that `recipe.method` gives for what was observed.

    Args:
        observers: by tensor name.
        recipe: chooses the method.
        samples: number of calibration samples that were run.
        model_sha256: of the source model.
        data_sha256: of the calibration data.
        equalized: what is done to some activations first, which gives them another amax.
        exact: amax of activations for which no method is needed.
    """
    changed = equalized or {}
    given = {**(exact or {}), **{name: candidate.amax for name, candidate in changed.items()}}
    ranges = {
        name: TensorRange(
            amax=float(np.float32(given[name] if name in given else choose_amax(observer, recipe))),
            min=observer.minimum,
            max=observer.maximum,
            rms=float(np.float32(observer.rms)),
            non_finite=observer.num_non_finite,
            equalization=changed[name].to_table() if name in changed else None,
        )
        for name, observer in observers.items()
    }
    return CalibrationTable(
        method=recipe.method,
        percentile=recipe.percentile if recipe.method == "percentile" else None,
        samples=samples,
        model_sha256=model_sha256,
        data_sha256=data_sha256,
        recipe_sha256=recipe.fingerprint(),
        tensors=ranges,
    )
