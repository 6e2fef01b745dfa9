"""What is made of an implementation that is right, wrong, or fails. Times and devices here are stand-ins."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from trtforge.benchmark import measure
from trtforge.benchmark.arrays import HostArrays, bits_from_values
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.measure import NAMES, Bench, check_names, measure_case
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.reference import K_RMS, Reference, calibrated
from trtforge.errors import BuildError, InputError, UnavailableError

CASE = BlockCase(2, 9, 64, 2, 80)
SAMPLES = (3.0, 4.0)


class Given:
    """An implementation that gives y, and whose call does `work`."""

    rms_limit = K_RMS

    def __init__(self, y: Any, work: Callable[[], None] = lambda: None, is_quantized: bool = True) -> None:
        self.y = y
        self.work = work
        self.is_quantized = is_quantized

    def prepare(self, mode: str) -> Callable[[], None]:
        if mode == "graph":
            raise RuntimeError("no graph\nhere")
        return self.work

    def output(self) -> Any:
        return self.y


def exact_bits(case: BlockCase, is_quantized: bool = True) -> Any:
    operands = calibrated(case, make_operands(case), HostArrays())
    return bits_from_values(Reference(case, operands, HostArrays(), is_quantized).exact, "fp16")


def run(monkeypatch: pytest.MonkeyPatch, makers: dict[str, Callable[[], Any]], case: BlockCase = CASE) -> Any:
    """Measure with these implementations, a device that answers, and a timer that does not time."""
    monkeypatch.setattr(measure, "_makers", lambda *_: makers)
    monkeypatch.setattr(measure, "torch_is_here", lambda: False)
    device = types.SimpleNamespace(synchronize=lambda: None, free=lambda: None)
    timer = types.SimpleNamespace(samples_us=lambda call: SAMPLES)
    bench: Any = Bench(device, None, timer)  # type: ignore[arg-type]
    return measure_case(bench, case, tuple(makers)).measurements


def test_a_right_result_is_timed_and_a_mode_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    call, graph = run(monkeypatch, {"plugin": lambda: Given(exact_bits(CASE))})
    assert (call.mode, call.samples_us, call.failure, call.is_wrong) == ("call", SAMPLES, None, False)
    assert call.rms_ratio < 1
    assert (graph.mode, graph.samples_us, graph.failure) == ("graph", (), "RuntimeError: no graph here")
    assert not graph.is_wrong


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    y = exact_bits(CASE)
    y[1, 2] = 0
    call, _ = run(monkeypatch, {"plugin": lambda: Given(y)})
    assert call.is_wrong
    assert call.samples_us == ()
    assert call.failure.startswith("wrong result: error")


def test_what_cannot_be_made_fails_in_both_modes_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise UnavailableError("torch is not here", "it is not installed")

    def refuse_to_build() -> Any:
        raise BuildError("TensorRT does not take the block", "no such\noperator", "leave this peer out")

    makers = {"eager": refuse, "tensorrt": refuse_to_build, "plugin": lambda: Given(exact_bits(CASE))}
    measured = run(monkeypatch, makers)
    assert [m.failure for m in measured[:2]] == ["torch is not here: it is not installed"] * 2
    assert [m.failure for m in measured[2:4]] == ["TensorRT does not take the block: no such operator"] * 2
    assert measured[4].samples_us == SAMPLES


def test_peers_of_an_int8_block_are_compared_with_a_block_that_is_not_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BlockCase(2, 9, 64, 2, 80, "int8")
    float_y, int8_y = exact_bits(case, is_quantized=False), exact_bits(case)
    makers = {
        "plugin": lambda: Given(int8_y),
        "eager": lambda: Given(float_y, is_quantized=False),
        "sdpa": lambda: Given(int8_y, is_quantized=False),
    }
    measured = dict(zip(makers, run(monkeypatch, makers, case)[::2], strict=True))
    assert measured["plugin"].samples_us and measured["eager"].samples_us
    assert measured["sdpa"].is_wrong


def test_a_gpu_that_answers_no_more_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_makers", lambda *_: {"plugin": lambda: Given(exact_bits(CASE), broken)})
    monkeypatch.setattr(measure, "torch_is_here", lambda: False)

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    device = types.SimpleNamespace(synchronize=broken, free=lambda: None)
    with pytest.raises(UnavailableError) as caught:
        measure_case(Bench(device, None, None), CASE, ("plugin",))  # type: ignore[arg-type]
    assert "the GPU failed in plugin on b2-s9" in caught.value.what
    assert "illegal memory access" in caught.value.why


def test_names_are_measured_in_one_order_and_unknown_ones_refused() -> None:
    assert check_names(("compile", "eager", "plugin")) == ("plugin", "eager", "compile")
    assert check_names(NAMES) == NAMES
    with pytest.raises(InputError, match="there is no implementation 'cudnn'"):
        check_names(("plugin", "cudnn"))
