"""The GPU that is measured: its stream and memory (through cupy), what it is, and in which state."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtforge.benchmark.kernels import DeviceSize
from trtforge.benchmark.roofline import Peaks, known_peaks
from trtforge.errors import UnavailableError, missing_extra
from trtforge.gpu import find_gpus
from trtforge.hashing import sha256_of_file

_STATE = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,pstate"
# A product that fills every card, and a copy that no cache holds.
_PEAK_SIDE = 8192
_PEAK_BYTES = 1 << 30
_PEAK_REPEATS = 20


class Device:
    """The first GPU, with a stream of its own.

    Raises:
        UnavailableError: there is no GPU, or cupy is not installed or does not start.
    """

    def __init__(self) -> None:
        self.name = find_gpus()[0].name
        try:
            self.cupy: Any = importlib.import_module("cupy")
        except ImportError as err:
            raise missing_extra("cupy", "tensorrt") from err
        runtime = self.cupy.cuda.runtime
        try:
            properties = runtime.getDeviceProperties(0)
            self.stream: Any = self.cupy.cuda.Stream(non_blocking=True)
        except Exception as err:
            fix = "check that cupy is built for this driver (cupy-cuda13x for CUDA 13)"
            raise UnavailableError("cupy cannot use the GPU", str(err), fix) from err
        capability = 10 * int(properties["major"]) + int(properties["minor"])
        self.size = DeviceSize(capability, int(properties["multiProcessorCount"]))
        self.l2_bytes = int(properties["l2CacheSize"])
        self.memory_bytes = int(properties["totalGlobalMem"])

    def upload(self, host: Any) -> Any:
        """A copy of a numpy array on the device, ready for every stream: cupy alone would go on while it is made."""
        copy = self.cupy.asarray(host)
        self.synchronize()
        return copy

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array whose content means nothing yet."""
        return self.cupy.empty(shape, dtype)

    def synchronize(self) -> None:
        """Wait for all that was launched.

        Raises:
            Exception: cupy's own, of a kernel that failed.
        """
        self.cupy.cuda.runtime.deviceSynchronize()

    def free(self) -> None:
        """Give memory of arrays that are gone back to the driver."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        if torch_is_here():
            importlib.import_module("torch").cuda.empty_cache()

    def peaks(self) -> Peaks | None:
        """From the data sheet, else measured; None where neither is possible."""
        known = known_peaks(self.name)
        return known if known is not None or not torch_is_here() else self._measured_peaks()

    def _measured_peaks(self) -> Peaks:
        torch: Any = importlib.import_module("torch")
        a = torch.randn(_PEAK_SIDE, _PEAK_SIDE, device="cuda", dtype=torch.float16)
        product_us = _time_us(torch, lambda: torch.mm(a, a))
        memory = torch.empty(_PEAK_BYTES, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(memory)
        copy_us = _time_us(torch, lambda: target.copy_(memory))
        return Peaks(
            2 * _PEAK_SIDE**3 / product_us / 1e6, None, 2 * _PEAK_BYTES / copy_us / 1e3, "measured: torch.mm, copy"
        )

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What a function launches on the device's stream, as one CUDA graph; returns what launches that."""
        launch()  # what a first launch loads cannot be captured
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            try:
                launch()
            finally:
                graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def poison(self, array: Any) -> None:
        """Fill an array with ones in every bit, NaN: an output that nothing writes must not look right."""
        self.cupy.cuda.runtime.memsetAsync(array.data.ptr, 0xFF, array.nbytes, self.stream.ptr)

    def conditions(self, library: Path, seconds: float) -> dict[str, Any]:
        """What must be the same where a run is continued or compared: card, versions, kernels, settings."""
        peaks = self.peaks()
        return {
            **self.describe(),
            "library_sha256": sha256_of_file(library),
            "peaks": None if peaks is None else peaks.to_dict(),
            "seconds_per_measurement": seconds,
            "cold_l2": True,
        }

    def describe(self) -> dict[str, Any]:
        """The card and what drives it, as JSON."""
        runtime = self.cupy.cuda.runtime
        return {
            "card": self.name,
            "compute_capability": self.size.compute_capability,
            "num_multiprocessors": self.size.num_multiprocessors,
            "l2_bytes": self.l2_bytes,
            "memory_bytes": self.memory_bytes,
            "cuda_driver": runtime.driverGetVersion(),
            "cuda_runtime_of_cupy": runtime.runtimeGetVersion(),
            "versions": package_versions(),
        }


def card_state() -> dict[str, str]:
    """Clocks, temperature and power limit now, from nvidia-smi; empty where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={_STATE}", "--format=csv,noheader", "--id=0"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_STATE.split(","), (value.strip() for value in printed.strip().split(",")), strict=False))


def torch_is_here() -> bool:
    """True where torch is installed and has the GPU."""
    try:
        return bool(importlib.import_module("torch").cuda.is_available())
    except ImportError:
        return False


def package_versions() -> dict[str, str]:
    """Of what takes part, where it is installed."""
    found = {}
    for name in ("numpy", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "tensorrt-cu13", "tensorrt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _time_us(torch: Any, call: Any) -> float:
    """The least of several runs: a peak is what the card reached once."""
    times = []
    for _ in range(_PEAK_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(min(times))
