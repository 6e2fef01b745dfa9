"""The method table: what every way to choose ranges costs one model, with the conditions of the measurement.

Rows are {method} x {weights} x {smooth}. Everything in it repeats exactly, except seconds and the resident memory.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

import pydantic
import yaml

from trtforge.parity import OutputParity
from trtforge.recipe import CalibrationMethod, QuantRecipe
from trtforge.textfile import FileModel

Weights = Literal["per_channel", "per_tensor"]
Smooth = Literal["none", "auto"]
Count = Annotated[int, pydantic.Field(ge=0)]

# What rows are judged by where there is neither a metric nor labels.
COSINE = "cosine"


class MethodRow(FileModel):
    """One combination.

    Attributes:
        method, weights, smooth: the recipe's fields that it differs in.
        outputs: figures by output name, against the fp32 graph.
        metrics: top1 from labels, and the user's figures.
        quantized_nodes: nodes that got Q/DQ.
        smoothed_tensors: activations that are scaled by channel first.
        seconds: choosing ranges, and where asked for, smoothing and weights; the pass over the data is not in it.
        state_bytes: what calibration holds for it after the pass: histograms and extremes, for a search rows as well.
    """

    method: CalibrationMethod
    weights: Weights
    smooth: Smooth
    outputs: dict[str, OutputParity]
    metrics: dict[str, float]
    quantized_nodes: Count
    smoothed_tensors: Count
    seconds: float
    state_bytes: Count

    @property
    def is_finite(self) -> bool:
        """No output has NaN or infinity where the fp32 graph has none."""
        return not any(output.nan for output in self.outputs.values())

    @property
    def worst(self) -> OutputParity:
        """The output with the lowest mean cosine; one that is not finite comes before all others."""
        return min(self.outputs.values(), key=lambda output: (not output.nan, output.cosine))

    @property
    def loss(self) -> float:
        """What the worst output's mean cosine lacks to 1."""
        return max(0.0, 1.0 - self.worst.cosine)

    @property
    def label(self) -> str:
        """`entropy, per channel, smoothed`."""
        return ", ".join((self.method, *titles(self.weights, self.smooth)))


class DataInfo(FileModel):
    """Samples that were run.

    Attributes:
        samples: how many.
        sha256: fingerprint of them.
    """

    samples: Count
    sha256: str


class MethodTable(FileModel):
    """A `<model>-methods.json`.

    Attributes:
        model, model_sha256: name and fingerprint of the source.
        recipe: what all rows share; its method, weights and smooth are not used.
        versions: of what chose and ran the graphs.
        calibration: samples of the one pass that feeds all rows.
        evaluation: samples that the figures come from.
        batch: at which they ran.
        reference_metrics: the fp32 graph's.
        judged_by: the metric that the best row was chosen by, or "cosine".
        best: index of the best row; equal metrics are decided by cosine, equal cosines by the order of the rows.
        tensors: activations that were observed.
        pass_seconds: of the pass over the calibration samples.
        peak_rss_bytes: of the largest process up to the end of that pass, this one or ONNX Runtime's.
    """

    schema_version: Literal[1] = 1
    model: str
    model_sha256: str
    recipe: QuantRecipe
    versions: dict[str, str]
    calibration: DataInfo
    evaluation: DataInfo
    batch: Annotated[int, pydantic.Field(ge=1)]
    reference_metrics: dict[str, float]
    judged_by: str
    best: Count
    tensors: Count
    pass_seconds: float
    peak_rss_bytes: Count
    rows: tuple[MethodRow, ...]

    @property
    def best_row(self) -> MethodRow:
        """The row that `best` names."""
        return self.rows[self.best]

    @property
    def criterion(self) -> str:
        """What `best` was chosen by, in words."""
        cosine = "the worst output's cosine"
        return cosine if self.judged_by == COSINE else f"{self.judged_by}, then {cosine}"

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"

    def best_recipe(self) -> str:
        """The YAML of a recipe that quantizes as the best row was."""
        row = self.best_row
        return recipe_text(vary(self.recipe, row.method, row.weights, row.smooth))


def vary(base: QuantRecipe, method: CalibrationMethod, weights: Weights, smooth: Smooth) -> QuantRecipe:
    """A recipe with another combination; activations are shifted only where they are smoothed."""
    changes = {"method": method, "weights": weights, "smooth": smooth}
    return base.model_copy(update=changes if smooth != "none" else {**changes, "shift": False})


def measured(base: QuantRecipe) -> QuantRecipe:
    """The recipe that rows are measured with: weights go to the nearest step and biases stay, unless it says otherwise.

    Learning the rounding takes longer than everything else, and gains much the same in every row.
    """
    quick = {"rounding": "nearest", "bias_correction": False}
    return base.model_copy(update={k: v for k, v in quick.items() if k not in base.model_fields_set})


def recipe_text(recipe: QuantRecipe) -> str:
    """A recipe as YAML: what the combination decides, and whatever else is not the default."""
    fields: dict[str, Any] = {"version": recipe.version, "method": recipe.method}
    if recipe.method == "percentile":
        fields["percentile"] = recipe.percentile
    fields |= {"weights": recipe.weights, "smooth": recipe.smooth}
    fields |= {k: v for k, v in recipe.model_dump(mode="json", exclude_defaults=True).items() if k != "percentile"}
    return str(yaml.safe_dump(fields, sort_keys=False))


def titles(weights: Weights, smooth: Smooth) -> tuple[str, str]:
    """`per channel` and `smoothed`."""
    return weights.replace("_", " "), "plain" if smooth == "none" else "smoothed"


def find_best(rows: list[MethodRow], metric: str) -> int:
    """Index of the row with the largest metric, then cosine, the first of equal ones; rows with NaN come last."""

    def rank(index: int) -> tuple[bool, float, float]:
        row = rows[index]
        value = row.worst.cosine if metric == COSINE else row.metrics.get(metric, -math.inf)
        return row.is_finite, value, row.worst.cosine

    return max(range(len(rows)), key=rank)
