"""Figures as text. Shares and cosines are rounded down, so that no figure looks better than it is.

An output at 0.969996 with a budget of 0.97 prints 0.96999, not 0.97000.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Decimal

from trtforge.manifest import PlanTensor
from trtforge.parity import OutputParity
from trtforge.report.markup import Html, el, join

# Spellings of element types in ONNX, numpy and TensorRT's plan.
_TYPE_NAMES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
}
# Operands shown per kernel.
MAX_OPERANDS = 6
_UPPER_CASE_TYPES = ("int8", "int4", "fp8", "fp4")


def cosine(value: float) -> str:
    """Five decimals, rounded down."""
    return _rounded_down(Decimal(repr(value)), "0.00001")


def percent(share: float) -> str:
    """A share of 1 with two decimals, rounded down; what is there but too small to print is `< 0.01 %`."""
    text = _rounded_down(Decimal(repr(share)) * 100, "0.01")
    return "< 0.01 %" if share > 0 and text == "0.00" else f"{text} %"


def significant(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def decibel(output: OutputParity) -> str:
    """SQNR; "exact" when nothing differs."""
    if output.sqnr_db is not None:
        return f"{output.sqnr_db:.1f} dB"
    return "exact" if output.max_abs_error == 0 and not output.nan else "-"


def size(num_bytes: int) -> str:
    """Bytes in units of 1,000, three digits."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1e3, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 999.5:
            value, unit = value / 1e3, larger
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def seconds(value: float) -> str:
    """Seconds with three digits."""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def count(number: int, noun: str) -> str:
    """`1 kernel`, `12 kernels`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def type_name(dtype: str) -> str:
    """One spelling per element type: `fp16` for Half and float16, `INT8` for Int8."""
    lower = dtype.lower()
    known = _TYPE_NAMES.get(lower, lower)
    return known.upper() if known in _UPPER_CASE_TYPES else known


def type_class(dtype: str) -> str:
    """The style sheet's class for an element type."""
    known = type_name(dtype).lower()
    return f"t-{known}" if known in ("int8", "fp16", "bf16", "fp32", "fp8", "int4") else "t-other"


def type_chip(dtype: str) -> Html:
    """An element type in its colour."""
    return el("span", type_name(dtype), class_=f"chip {type_class(dtype)}")


def shape(dims: tuple[int | str | None, ...] | None) -> str:
    """`[-1, 197, 768]`; `?` where the model names nothing."""
    if dims is None:
        return "unknown rank"
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def main_operands(tensors: Sequence[PlanTensor]) -> list[PlanTensor]:
    """The operands that say what a kernel works on: those with two dims over 1, else all.

    What is left out are literals, alpha and beta, biases and per-channel scales: a GEMM of two INT8 matrices has fp32
    ones too.
    """
    return [tensor for tensor in tensors if sum(dim != 1 for dim in tensor.shape) > 1] or list(tensors)


def operands(tensors: Sequence[PlanTensor]) -> Html:
    """Types and shapes of a kernel's main operands; their names show on hover."""
    shown = main_operands(tensors)[:MAX_OPERANDS]
    lines = [
        el("div", type_chip(tensor.dtype), " ", shape(tensor.shape), class_="operand", title=tensor.name)
        for tensor in shown
    ]
    if len(tensors) > len(shown):
        lines.append(el("div", f"+ {len(tensors) - len(shown)} more", class_="operand"))
    return join(lines)


def _rounded_down(value: Decimal, step: str) -> str:
    return str(value.quantize(Decimal(step), ROUND_FLOOR))
