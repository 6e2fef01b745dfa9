from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import ops
from rewrite_checks import normalised

from trtforge.graph.native import OnnxNative
from trtforge.graph.passes.casts import is_lossless

FLOAT, INT32, INT64, BOOL, HALF, DOUBLE, INT8 = 1, 6, 7, 9, 10, 11, 3


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def chain(source: str, *targets: int) -> str:
    names = ["x", *(f"a{index}" for index in range(len(targets)))]
    casts = " ".join(f"{new} = Cast<to = {to}>({old})" for old, new, to in zip(names, names[1:], targets, strict=False))
    last = names[-1]
    return (
        f"g ({source}[N] x) => (float[N] z, int64[N] k) {{ {casts} z = Cast<to = 1>({last}) k = Cast<to = 7>({last}) }}"
    )


VALUES = {
    "int32": np.array([-(2**31), -1, 0, 2**24 + 1, 2**31 - 1], np.int32),
    "float": np.array([-70000.0, -0.1, 0.0, 1e-8, 3.7], np.float32),
    "float16": np.array([-6.5, -0.1, 0.0, 6e-8, 65504.0], np.float16),
    "bool": np.array([True, False]),
    "int8": np.array([-128, 0, 127], np.int8),
}


@pytest.mark.parametrize(
    ("source", "targets", "left"),
    [
        ("int32", [INT64, INT32], 2),
        ("int32", [INT64, INT32, INT64, INT32, INT64], 2),
        ("float", [DOUBLE, FLOAT], 1),
        ("float", [FLOAT, FLOAT], 1),
        ("float16", [FLOAT, HALF], 2),
        ("bool", [INT32, BOOL, FLOAT, BOOL], 2),
        ("int8", [FLOAT, INT8], 2),
        # These round or cut, and stay.
        ("float", [HALF, FLOAT], 3),
        ("int32", [FLOAT, INT32], 4),
        ("int32", [BOOL, INT32], 3),
        ("float", [INT32, FLOAT], 3),
    ],
)
def test_only_casts_that_lose_nothing_go(native: OnnxNative, source: str, targets: list[int], left: int) -> None:
    graph, _ = normalised(chain(source, *targets), native, {"x": VALUES[source]})
    assert ops(graph).count("Cast") == left


def test_which_types_hold_which() -> None:
    assert is_lossless("int32", "int64") and not is_lossless("int64", "int32")
    assert is_lossless("uint8", "int16") and not is_lossless("uint8", "int8") and not is_lossless("int8", "uint8")
    assert is_lossless("int16", "float32") and not is_lossless("int32", "float32") and is_lossless("int32", "float64")
    assert is_lossless("uint8", "float16") and not is_lossless("int16", "float16") and is_lossless("uint8", "bfloat16")
    assert is_lossless("float16", "float32") and not is_lossless("bfloat16", "float16")
    assert is_lossless("bool", "bool") and is_lossless("bool", "int8") and not is_lossless("int8", "bool")
    assert not is_lossless("float8_e4m3fn", "float32") and not is_lossless("float32", "float8_e4m3fn")
