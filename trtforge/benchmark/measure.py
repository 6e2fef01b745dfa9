"""Measure one case: every implementation is compared with the reference first, and timed only where it is right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trtforge.benchmark.arrays import Arrays, HostArrays, TorchArrays
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.device import Device, torch_is_here
from trtforge.benchmark.implementations import MODES, Implementation, Mode, PluginBlock
from trtforge.benchmark.kernels import STRATEGIES, BlockKernels
from trtforge.benchmark.operands import Operands, make_operands
from trtforge.benchmark.reference import Reference, Verdict, calibrated
from trtforge.benchmark.results import PLUGIN, CaseResult, Measurement
from trtforge.benchmark.tensorrt_peers import TENSORRT_PEERS, TensorRtBlock
from trtforge.benchmark.timing import ColdTimer
from trtforge.benchmark.torch_peers import TORCH_PEERS, TorchBlock
from trtforge.errors import InputError, TrtForgeError, UnavailableError

PLUGIN_NAMES = (PLUGIN, *(f"plugin ({name})" for name in STRATEGIES if name != "auto"))
# In the order in which they are measured.
NAMES = (*PLUGIN_NAMES, *TORCH_PEERS, *TENSORRT_PEERS)
_MAX_FAILURE = 200  # characters of an error's text


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What measurements are made with.

    Attributes:
        device: the GPU.
        kernels: the plugin's.
        timer: None checks results and times nothing.
        plugin_library: for TensorRT; None leaves that peer out.
    """

    device: Device
    kernels: BlockKernels
    timer: ColdTimer | None
    plugin_library: Path | None = None


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, in the order in which they are measured.

    Raises:
        InputError: one is not known.
    """
    for name in names:
        if name not in NAMES:
            raise InputError(f"there is no implementation {name!r}", f"known: {', '.join(NAMES)}", "choose of these")
    return tuple(name for name in NAMES if name in names)


def measure_case(bench: Bench, case: BlockCase, names: Sequence[str]) -> CaseResult:
    """Compare and time implementations of one case, one after the other on the same operands.

    Raises:
        UnavailableError: a kernel failed in a way after which the GPU answers no more.
    """
    arrays: Arrays = TorchArrays("cuda") if torch_is_here() else HostArrays()
    operands = calibrated(case, make_operands(case), arrays)
    references: dict[bool, Reference] = {}
    measured: list[Measurement] = []
    for name in names:
        measured += _measure(bench, case, operands, name, references, arrays)
        _require_device(bench.device, case, name)
        bench.device.free()
    return CaseResult(case, tuple(measured))


def _measure(
    bench: Bench,
    case: BlockCase,
    operands: Operands,
    name: str,
    references: dict[bool, Reference],
    arrays: Arrays,
) -> Iterator[Measurement]:
    """Measure an implementation in both modes. What fails is a result like any other."""
    try:
        implementation = _makers(bench, case, operands)[name]()
    except Exception as err:
        yield from (Measurement(name, mode, failure=_reason(err)) for mode in MODES)
        return
    is_quantized = implementation.is_quantized or case.dtype != "int8"
    for mode in MODES:
        try:
            call = implementation.prepare(mode)
            call()
            bench.device.synchronize()
            if is_quantized not in references:
                references[is_quantized] = Reference(case, operands, arrays, is_quantized)
            verdict = references[is_quantized].judge(_on(arrays, implementation.output()), implementation.rms_limit)
            samples = bench.timer.samples_us(call) if verdict.is_right and bench.timer else ()
        except Exception as err:
            yield Measurement(name, mode, failure=_reason(err))
            continue
        yield _measurement(name, mode, samples, verdict)


def _measurement(name: str, mode: Mode, samples: tuple[float, ...], verdict: Verdict) -> Measurement:
    failure = None if verdict.is_right else f"wrong result: {verdict.describe()}"
    return Measurement(name, mode, samples, verdict.rms_ratio, verdict.max_ratio, failure, not verdict.is_right)


def _makers(bench: Bench, case: BlockCase, operands: Operands) -> Mapping[str, Callable[[], Implementation]]:
    device = bench.device
    makers: dict[str, Callable[[], Implementation]] = {}
    for name, strategy in zip(PLUGIN_NAMES, STRATEGIES, strict=True):
        makers[name] = functools.partial(PluginBlock, bench.kernels, device, case, operands, strategy)
    for name in TORCH_PEERS:
        makers[name] = functools.partial(TorchBlock, name, case, operands, "cuda", device.stream.ptr)
    for name in TENSORRT_PEERS:
        makers[name] = functools.partial(TensorRtBlock, name, case, operands, device, bench.plugin_library)
    return makers


def _on(arrays: Arrays, y: object) -> object:
    """An output where the reference is: without torch, both are on the host."""
    return y.get() if isinstance(arrays, HostArrays) and hasattr(y, "get") else y


def _require_device(device: Device, case: BlockCase, name: str) -> None:
    """An illegal access makes every later call fail: no result after it would mean anything."""
    try:
        device.synchronize()
    except Exception as err:
        fix = "run this case alone under compute-sanitizer"
        raise UnavailableError(f"the GPU failed in {name} on {case.key}", _reason(err), fix) from err


def _reason(error: Exception) -> str:
    """One line of an error."""
    if isinstance(error, TrtForgeError):
        return " ".join(f"{error.what}: {error.why}".split())[:_MAX_FAILURE]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_FAILURE]}"
