"""Whether arrays fit a model: their names, types, shapes and numbers of samples.

It takes only what a header states, so that a file can be refused before anything of it is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.errors import InputError
from trtforge.tensor import TensorSpec

LABELS = "labels"


def data_error(source: str | Path, why: str, fix: str) -> InputError:
    """The error for data that cannot be used."""
    return InputError(f"data {source} cannot be used", why, fix)


def check_names(found: Mapping[str, Any], names: set[str], source: str) -> None:
    """Refuse arrays that are not named after the model's inputs.

    Args:
        found: by name.
        names: of the model's inputs.
        source: how an error names the data.

    Raises:
        InputError: a name is missing or unknown.
    """
    missing, extra = sorted(names - set(found)), sorted(set(found) - names)
    if missing or extra:
        problems = [f"no array for input {', '.join(missing)}"] if missing else []
        problems += [f"unknown array {', '.join(extra)}"] if extra else []
        raise data_error(
            source,
            "; ".join(problems),
            f"name the arrays after the model's inputs: {', '.join(sorted(names))}"
            + ("" if LABELS in names else f" (and '{LABELS}' for classes)"),
        )


def has_sample_axis(shapes: Mapping[str, tuple[int, ...]], specs: Sequence[TensorSpec]) -> bool:
    """Whether the first axis of every array counts samples; else the arrays are one feed, which is run as it is.

    They are one feed where an input has no axis, where the model fixes the first size of some inputs only or names it
    otherwise elsewhere (a state [2, batch, 128] beside samples [batch, n]), and where the arrays' first sizes differ
    and the model does not say that they must not.

    Args:
        shapes: of the arrays, by input.
        specs: the model's inputs.
    """
    if any(not shapes[spec.name] for spec in specs):
        return False
    heads = [spec.shape[0] if spec.shape else None for spec in specs]
    fixed = {head for head in heads if isinstance(head, int)}
    names = {head for head in heads if isinstance(head, str)}
    inner = {dim for spec in specs for dim in (spec.shape or ())[1:]}
    if fixed and len(set(heads)) > 1:
        return False
    if len(names) > 1 and names & inner:
        return False
    return len({shapes[spec.name][0] for spec in specs}) == 1 or (len(names) == 1 and set(heads) == names)


def check_array(spec: TensorSpec, dtype: np.dtype, shape: tuple[int, ...], source: str, is_whole: bool = False) -> None:
    """Refuse an array whose type or shape does not fit an input of the model.

    Args:
        spec: the input.
        dtype: of the array.
        shape: of the array.
        source: how an error names the data.
        is_whole: the array is run as it is; else its first axis counts samples, of which there may be any number.

    Raises:
        InputError: another type, another number of axes, or another size on an axis that the model fixes.
    """
    if dtype.hasobject:
        raise data_error(source, f"input '{spec.name}' holds Python objects", f"give arrays of {spec.dtype}")
    if dtype.name != spec.dtype:
        # numpy's files have no bfloat16: they give raw bytes back.
        is_storable = spec.dtype != "bfloat16"
        fix = f"save it as {spec.dtype}" if is_storable else "give it by module:function: a file cannot hold bfloat16"
        raise data_error(source, f"input '{spec.name}' is {dtype.name}; the model takes {spec.dtype}", fix)
    if not shape and spec.shape != ():
        raise data_error(source, f"input '{spec.name}' has no axis of samples", "make samples its first axis")
    if spec.shape is None:
        return
    if len(shape) != len(spec.shape):
        raise data_error(
            source,
            f"input '{spec.name}' has {len(shape)} axes {list(shape)}; the model takes {spec.describe()}",
            "save it with the model's axes" + ("" if is_whole else ", samples first"),
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.shape, strict=True)):
        if (axis or is_whole) and isinstance(dim, int) and size != dim:
            raise data_error(
                source,
                f"axis {axis} of input '{spec.name}' has size {size}; the model takes {spec.describe()}",
                "save it in the model's shape",
            )


def check_counts(sizes: Mapping[str, int], labels: Any, source: str) -> None:
    """Refuse inputs of different length, no samples, and labels that are not one integer per sample.

    Args:
        sizes: samples by input name.
        labels: what has a dtype and a shape, or None.
        source: how an error names the data.

    Raises:
        InputError: one of them.
    """
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise data_error(source, f"the inputs have different numbers of samples: {listed}", "save them together")
    count = next(iter(sizes.values()), 0)
    if count == 0:
        raise data_error(source, "it holds no samples", "save at least one, better a hundred or more")
    check_labels(labels, count, source)


def check_labels(labels: Any, count: int, source: str) -> None:
    """Refuse labels that are not one integer per sample.

    Raises:
        InputError: they are not.
    """
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (count,)):
        raise data_error(
            source,
            f"'{LABELS}' is {labels.dtype.name} {list(labels.shape)}",
            f"save one integer class per sample: shape [{count}]",
        )
