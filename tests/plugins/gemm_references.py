"""Float64 references of the GEMM kernels, each with a bound on how far a right result may be from it.

u is float32's unit roundoff doubled, 2^-23 (a tensor core may truncate where the CPU rounds), and t the output type's:
2^-11 for half, 2^-8 for bf16.

A sum of K products in float32, in any order, is off by at most K u sum|a b|; bias and residual add u of what they
touch. The activations are Lipschitz with a constant below 1.13, so an error before them grows by no more; their own
evaluation in float32 costs a few u of |x| (erf, tanh and exp are within 4 ulp). The last rounding adds t |y| and, below
the normal numbers, half the smallest subnormal. Nothing is fitted to what the kernels give.
"""

from __future__ import annotations

import math

import numpy as np
from block_reference import ACTIVATIONS
from emulation_build import TYPES
from gemm_cases import Array, Case, Operands
from numpy.typing import NDArray

Double = NDArray[np.float64]

FLOAT_ROUNDING = 2.0**-23
OUTPUT_ROUNDING = {"half": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"half": 2.0**-24, "bf16": 2.0**-133}
LIPSCHITZ = 1.13
ACTIVATION_ROUNDINGS = 8


def finish(case: Case, operands: Operands, product: Double, error: Double) -> tuple[Double, Double]:
    """activation(product + bias) + residual, and its error in float32 where the product's is `error`."""
    value = product
    if "bias" in operands:
        value = value + operands["bias"].astype(np.float64)
        error = error + FLOAT_ROUNDING * np.abs(value)
    if case.activation != "none":
        error = LIPSCHITZ * error + ACTIVATION_ROUNDINGS * FLOAT_ROUNDING * np.abs(value)
        with np.errstate(all="ignore"):  # NaN and infinities are among the inputs
            value = ACTIVATIONS[case.activation](value)
    if "residual" in operands:
        value = value + operands["residual"].astype(np.float64)
        error = error + FLOAT_ROUNDING * np.abs(value)
    padding = ~case.valid_rows()
    value[padding], error[padding] = 0.0, 0.0
    return value, error


def gemm_reference(case: Case, operands: Operands) -> tuple[Double, Double]:
    """[m, n] before the last rounding, and the bound on its error."""
    a, b = operands["a"].astype(np.float64), operands["b"].astype(np.float64)
    magnitude = np.abs(a) @ np.abs(b)
    return finish(case, operands, a @ b, case.k * FLOAT_ROUNDING * magnitude)


def gemm_s8_reference(case: Case, operands: Operands) -> tuple[Double, Double]:
    """[m, n] before the last rounding, and the bound on its error: sums are exact, three roundings make them float."""
    a, b = operands["a"][:, : case.k].astype(np.int64), operands["b"].astype(np.int64)
    a_scale = np.float64(np.float32(case.settings["a_scale"]))
    product = (a @ b) * (a_scale * operands["b_scales"].astype(np.float64))
    return finish(case, operands, product, 3 * FLOAT_ROUNDING * np.abs(product))


def layernorm_reference(case: Case, operands: Operands) -> tuple[Double, Double]:
    """[m, n] before the last rounding, and the bound on its error.

    A sum over a row goes through at most `roundings` additions: a lane's own 8 ceil(H / 256), and 5 between lanes. So
    the mean is off by d = roundings u mean|x|, and so is every x - mean; the variance by d^2 + (roundings + 2) u of
    itself, and 1 / deviation by that and 4 u more.
    """
    x, gamma = operands["x"].astype(np.float64), operands["gamma"].astype(np.float64)
    epsilon = float(np.float32(case.settings["epsilon"]))
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True) + epsilon
    scaled = (x - mean) / np.sqrt(variance) * gamma
    value = scaled + (operands["beta"].astype(np.float64) if "beta" in operands else 0.0)
    roundings = 8 * math.ceil(case.n / 256) + 5
    mean_error = roundings * FLOAT_ROUNDING * np.abs(x).mean(axis=1, keepdims=True)
    relative = (roundings + 6) * FLOAT_ROUNDING + mean_error**2 / variance
    error = np.abs(gamma) * mean_error / np.sqrt(variance) + relative * np.abs(scaled) + FLOAT_ROUNDING * np.abs(value)
    padding = ~case.valid_rows()
    value[padding], error[padding] = 0.0, 0.0
    return value, error


def rounded_excess(case: Case, got: Array, value: Double, error: Double) -> float:
    """The largest error of `got`, in the case's type, over what is allowed: at most 1 where all is right.

    NaN has to be where the reference has it, and nowhere else; the same for infinities, which include what overflows
    the type.
    """
    with np.errstate(over="ignore"):
        nearest = value.astype(TYPES[case.type]).astype(np.float64)
    result = got.astype(np.float64)
    special = ~np.isfinite(nearest)
    if not np.array_equal(result[special], nearest[special], equal_nan=True):
        return np.inf
    allowed = OUTPUT_ROUNDING[case.type] * (np.abs(value) + error) + SMALLEST[case.type] / 2 + error
    excess = np.abs(result[~special] - value[~special]) / allowed[~special]
    # A NaN in `got` alone must not slip through a comparison.
    return float(np.max(np.where(np.isnan(excess), np.inf, excess), initial=0.0))


def quantized_excess(got: Array, value: Double, error: Double, scale: float) -> float:
    """The same for int8: half a step for the rounding, and the error in steps. NaN stands for 0."""
    single_scale = float(np.float32(scale))
    steps = np.where(np.isnan(value), 0.0, np.clip(value / single_scale, -128, 127))
    allowed = 0.5 + np.where(np.isnan(error), 0.0, error) / single_scale + FLOAT_ROUNDING * np.abs(steps)
    return float(np.max(np.abs(got.astype(np.float64) - steps) / allowed, initial=0.0))
