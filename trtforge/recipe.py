"""How a model is quantized: versioned data, never code."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from trtforge.errors import InputError
from trtforge.hashing import fingerprint
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import FileModel, kind_of, parse_yaml, read_text, validate

CalibrationMethod = Literal["minmax", "percentile", "entropy", "mse"]


@dataclasses.dataclass(frozen=True, slots=True)
class Granularity:
    """How many scales a tensor has.

    `Granularity(None)` is one scale for the whole tensor: weight [K, N] -> scale [].
    `Granularity(1)` keeps axis 1: weight [K, N] -> scale [N].
    """

    axis: int | None

    def reduced_axes(self, rank: int) -> tuple[int, ...]:
        """The axes over which amax is taken for a tensor of this rank."""
        return tuple(axis for axis in range(rank) if self.axis is None or axis != self.axis % rank)


class QuantRecipe(FileModel):
    """A quantization recipe, as in `calibration/recipes/*.yaml`.

    Attributes:
        method: how an activation's amax is chosen from what calibration saw.
        percentile: the share of absolute values, in percent, that stays inside amax (method percentile).
        weights: one scale per output channel, or one per weight tensor.
        weight_range: a weight channel's amax is its largest value (minmax), or gives the least squared error (mse).
        smooth: per-channel scaling that moves outliers from activations into weights: an alpha from 0 to 1, "auto" (an
            alpha per layer by search) or "none".
        shift: per-channel offsets that centre activations, so that both halves of the INT8 range are used.
        bias_correction: the mean error of a quantized layer's output is taken off its bias.
        rounding: weights go to the nearest step, or to those that keep the layer's output closest (learned).
        attention: quantize the two products of attention as well, where TensorRT fuses that.
        mask: an integer input [batch, sequence] whose zeros mark padding, which calibration then ignores; "auto" is
            `attention_mask` where the model has such an input, "none" takes every position.
        exclude: node names, with `*` and `?`, that stay float.
    """

    version: Literal[1] = 1
    method: CalibrationMethod = "minmax"
    percentile: Annotated[float, pydantic.Field(gt=50.0, le=100.0)] = 99.999
    weights: Literal["per_channel", "per_tensor"] = "per_channel"
    weight_range: Literal["minmax", "mse"] = "minmax"
    smooth: Annotated[float, pydantic.Field(ge=0.0, le=1.0)] | Literal["auto", "none"] = "auto"
    shift: bool = True
    bias_correction: bool = True
    rounding: Literal["nearest", "learned"] = "learned"
    attention: bool = False
    mask: str = "auto"
    exclude: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that the recipe decides."""
        return fingerprint(self.model_dump(mode="json"))


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with trtforge, by name."""
    return shipped_files("recipes")


def shipped_files(kind: str) -> dict[str, Path]:
    """Data files that come with trtforge, by stem: from the installed package, else from the source tree.

    Args:
        kind: "recipes" or "profiles".
    """
    in_tree = {"recipes": "calibration/recipes", "profiles": "profiles"}[kind]
    package = Path(str(resources.files("trtforge")))
    for folder in (package / "shipped" / kind, package.parent / in_tree):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def load_recipe(name_or_path: str | Path | None, limits: Limits = DEFAULT_LIMITS) -> QuantRecipe:
    """The recipe of a YAML file, or of a shipped name; None gives the defaults.

    Raises:
        InputError: no such file or name, or invalid content.
    """
    if name_or_path is None:
        return QuantRecipe()
    path = Path(name_or_path)
    if kind_of(path, "recipe") in {"folder", None}:
        shipped = shipped_recipes()
        if str(name_or_path) not in shipped:
            raise InputError(
                f"recipe {str(name_or_path)!r} does not exist",
                f"it is no file and no shipped recipe ({', '.join(shipped) or 'none'})",
                "give the path of a YAML file or one of those names",
            )
        path = shipped[str(name_or_path)]
    text = read_text(path, "recipe", limits)
    value = parse_yaml(text, f"recipe {path}", limits)
    return validate(QuantRecipe, {} if value is None else value, f"recipe {path}")
