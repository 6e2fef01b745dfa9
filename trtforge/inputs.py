"""Find and check everything that a build reads besides the model: data, table, recipe, profiles.

Conventions: `calibration/<stem>.npz` or `calibration/<stem>.json` and `profiles/<stem>.yaml`, beside the model first,
then in the working directory. Without `--eval`, the last fifth of the data (at least 8 samples) is held out for
verification and calibration does not see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from trtforge.batch import Batch
from trtforge.data import Dataset, open_dataset
from trtforge.errors import InputError
from trtforge.export_info import DimInfo
from trtforge.hashing import fingerprint
from trtforge.profile import Profile, ProfileSet
from trtforge.profile_choice import DimSource, check_traced, describe_shapes, resolve_profiles
from trtforge.quantization.table import CalibrationTable, load_table
from trtforge.recipe import QuantRecipe, load_recipe
from trtforge.source import source_name
from trtforge.spec import BuildSpec
from trtforge.tensor import TensorSpec
from trtforge.textfile import kind_of

MIN_HELD_OUT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRange:
    """Sizes of the first axis that the engine takes; opt is the first profile's."""

    min: int
    opt: int
    max: int

    def clamp(self, size: int) -> int:
        """The allowed size that is nearest."""
        return max(self.min, min(size, self.max))


@dataclasses.dataclass(frozen=True, slots=True)
class BuildInputs:
    """What a build reads besides the model.

    Attributes:
        recipe: how to quantize.
        profiles: shape ranges of the engine.
        batch: sizes of the first axis, from the first profile.
        calibration: samples to calibrate on, and to find what overflows float16; None where the build does neither, or
            a table is given.
        table: the user's calibration table.
        evaluation: samples to verify on.
        calib_sha256: of the calibration data or table.
    """

    recipe: QuantRecipe
    profiles: ProfileSet
    batch: BatchRange
    calibration: Dataset | None
    table: CalibrationTable | None
    evaluation: Dataset | None
    calib_sha256: str | None


def gather_inputs(
    spec: BuildSpec,
    specs: Sequence[TensorSpec],
    model_sha256: str,
    warn: Callable[[str], None],
    dims: DimSource | None = None,
    traced: Mapping[str, DimInfo] = MappingProxyType({}),
) -> BuildInputs:
    """Read and check recipe, data, table and profiles of a build.

    Args:
        spec: the build.
        specs: the model's inputs.
        model_sha256: a table made from another model is refused.
        warn: takes what the user should know, such as samples shared by both data sets.
        dims: examines the graph where no profile file gives the ranges; None takes what the model's inputs state.
        traced: of an exported model, the sizes that it was traced for, by the name of a dim.

    Raises:
        InputError: something is missing or does not fit; says exactly what to give.
    """
    recipe = load_recipe(spec.recipe, spec.limits)
    source = spec.calib or find_calibration(spec.source)
    table = None
    data = None
    if source is not None and str(source).endswith(".json"):
        if spec.precision.is_weight_only and spec.calib is not None:
            raise InputError(
                f"--{spec.precision.quantization} takes calibration data, not a calibration table",
                f"{source} holds ranges of activations, which stay float; choosing weights takes the activations",
                "give the data with --calib, or leave it out",
            )
        # One that only the conventions found says nothing of a build that does not quantize activations.
        if spec.precision.is_calibrated or spec.calib is not None:
            table = load_table(Path(source), spec.limits)
            table.check_model(model_sha256)
    elif source is not None and (spec.precision.quantization or spec.verify != "off"):
        data = open_dataset(source, specs, spec.limits)
    if spec.precision.is_calibrated and source is None:
        raise _missing_calibration(spec, specs)
    evaluation = open_dataset(spec.eval, specs, spec.limits) if spec.eval and spec.verify != "off" else None
    profiles = resolve_profiles(spec.profile, spec.source, specs, data or evaluation, spec.limits, dims)
    check_traced(profiles, specs, traced)
    if profiles.source == "graph":
        warn(f"the graph leaves no choice of input shapes: {describe_shapes(profiles.first)}")
    batch = batch_range(profiles.first, data or evaluation)
    data = fit_to_profiles(data, profiles, batch) if data else None
    evaluation = fit_to_profiles(evaluation, profiles, batch) if evaluation else None
    calibration, evaluation = _split(data, evaluation, spec, warn)
    return BuildInputs(
        recipe=recipe,
        profiles=profiles,
        batch=batch,
        calibration=calibration if spec.precision.quantization or spec.precision.base == "fp16" else None,
        table=table if spec.precision.is_calibrated else None,
        evaluation=evaluation,
        calib_sha256=data.sha256 if data else (fingerprint(table.to_json()) if table else None),
    )


def find_calibration(model: Path) -> Path | None:
    """The data or table that the conventions name.

    Raises:
        InputError: both are there.
    """
    for base in (model.parent, Path()):
        found = [base / "calibration" / f"{source_name(model)}{suffix}" for suffix in (".npz", ".json")]
        found = [path for path in found if kind_of(path, "calibration data") is not None]
        if len(found) == 2:
            raise InputError(
                f"both {found[0]} and {found[1]} exist",
                "one holds data to calibrate on, the other a finished calibration table",
                "choose one with --calib, or remove the other",
            )
        if found:
            return found[0]
    return None


def _missing_calibration(spec: BuildSpec, specs: Sequence[TensorSpec]) -> InputError:
    model = source_name(spec.source)
    names = "; ".join(item.describe() for item in specs)
    return InputError(
        f"--{spec.precision.quantization} needs calibration data, and there is none",
        f"looked for calibration/{model}.npz and calibration/{model}.json beside the model and in the "
        "working directory; scales are never made up",
        f"save a hundred or more real samples with numpy.savez, one array per input, first axis = samples ({names}), "
        f"as calibration/{model}.npz or give them with --calib",
    )


def batch_range(profile: Profile, data: Dataset | None = None) -> BatchRange:
    """Sizes of the first axis of the first input that has one; 1 where the data's feeds are run whole."""
    if data is not None and data.has_whole_feeds:
        return BatchRange(1, 1, 1)
    for shape in profile.inputs.values():
        if shape.opt:
            return BatchRange(max(1, shape.min[0]), max(1, shape.opt[0]), max(1, shape.max[0]))
    return BatchRange(1, 1, 1)


def fit_to_profiles(dataset: Dataset, profiles: ProfileSet, batch: BatchRange) -> Dataset:
    """The dataset cut into batches that the engine takes.

    Raises:
        InputError: a sample lies outside every profile, or there are too few for the smallest batch.
    """
    dataset = dataclasses.replace(dataset, smallest_batch=batch.min)
    ran = 0
    for part in dataset.batches(batch.opt):
        ran += len(part)
        shapes = {name: feed.shape for name, feed in part.feeds.items()}
        fitting = [
            p for p in profiles.profiles if all(p.inputs[name].contains(shape) for name, shape in shapes.items())
        ]
        if any(_holds_values(p, part) for p in fitting):
            continue
        if fitting:
            raise _values_outside(dataset, fitting[0], part)
        outside = [name for name in shapes if not profiles.first.inputs[name].contains(shapes[name])]
        span = profiles.first.inputs[outside[0]]
        raise InputError(
            f"data {dataset.source} lies outside the optimisation profile",
            f"input '{outside[0]}' has shape {list(shapes[outside[0]])}; profile '{profiles.first.name}' spans "
            f"{list(span.min)} to {list(span.max)}",
            "widen the profile, or crop the data",
        )
    if ran == 0:
        raise InputError(
            f"data {dataset.source} has too few samples",
            f"it has {len(dataset)}; the smallest batch of the profile is {batch.min}",
            "give more samples, or lower the profile's min",
        )
    return dataset


def _holds_values(profile: Profile, batch: Batch) -> bool:
    """Whether the values of shape-tensor inputs lie inside the profile's."""
    return all(
        span.contains(tuple(int(value) for value in batch.feeds[name].ravel())) for name, span in profile.values.items()
    )


def _values_outside(dataset: Dataset, profile: Profile, batch: Batch) -> InputError:
    name = next(
        name
        for name, span in profile.values.items()
        if not span.contains(tuple(int(value) for value in batch.feeds[name].ravel()))
    )
    span = profile.values[name]
    return InputError(
        f"data {dataset.source} lies outside the optimisation profile",
        f"input '{name}' has the values {batch.feeds[name].ravel().tolist()}; profile '{profile.name}' spans "
        f"{list(span.min)} to {list(span.max)}",
        "widen 'values:' in the profile, or leave those samples out",
    )


def _split(
    data: Dataset | None, evaluation: Dataset | None, spec: BuildSpec, warn: Callable[[str], None]
) -> tuple[Dataset | None, Dataset | None]:
    """Calibration and evaluation samples."""
    if data is None or spec.verify == "off":
        return data, evaluation
    if evaluation is not None:
        shared = len(data.sample_hashes() & evaluation.sample_hashes())
        if shared:
            warn(f"{shared} samples are in both the calibration and the evaluation data; accuracy may look too good")
        return data, evaluation
    calibration, evaluation = split_held_out(data)
    if evaluation is data and spec.precision.quantization:
        warn(f"only {len(data)} samples: too few to hold any out, so calibration and verification share them")
    return calibration, evaluation


def split_held_out(data: Dataset) -> tuple[Dataset, Dataset]:
    """Samples to calibrate on, and the last fifth (at least 8) to verify with; all of them twice where they are few."""
    held_out = max(MIN_HELD_OUT, data.smallest_batch, len(data) // 5)
    if len(data) - held_out < data.smallest_batch:
        return data, data
    return data.view(0, len(data) - held_out), data.view(len(data) - held_out, len(data))
