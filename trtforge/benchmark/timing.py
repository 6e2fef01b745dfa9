"""The one function that times. CUDA events around one call, with a cold L2 cache, every sample kept.

Before each sample a buffer of twice the L2 is written, as a layer finds the cache after the layers before it. That
write keeps the device busy while the host launches the call: launches that the host makes faster than the write takes
cost nothing, slower ones show as gaps, as they do in use. A call that is one CUDA graph shows device time alone.
"""

from __future__ import annotations

from collections.abc import Callable

from trtforge.benchmark.device import Device

_L2_MULTIPLE = 2
_MIN_FLUSH_BYTES = 64 << 20
_WARM_UP_CALLS = 3
_PILOT_CALLS = 3
MIN_SAMPLES = 20
MAX_SAMPLES = 200


class ColdTimer:
    """Times calls on a device's stream.

    Args:
        device: the GPU.
        seconds: for the samples of one measurement, beyond the least number.
    """

    def __init__(self, device: Device, seconds: float = 0.2) -> None:
        self.device = device
        self.seconds = seconds
        self.flush = device.empty((max(_L2_MULTIPLE * device.l2_bytes, _MIN_FLUSH_BYTES),), "uint8")

    def samples_us(self, call: Callable[[], None]) -> tuple[float, ...]:
        """Time a call that launches on the device's stream; microseconds of each sample."""
        for _ in range(_WARM_UP_CALLS):
            call()
        self.device.stream.synchronize()
        pilot_us = max(self._run(call, _PILOT_CALLS))
        return tuple(self._run(call, num_samples(self.seconds, pilot_us)))

    def _run(self, call: Callable[[], None], count: int) -> list[float]:
        cuda, stream = self.device.cupy.cuda, self.device.stream
        pairs = []
        for _ in range(count):
            cuda.runtime.memsetAsync(self.flush.data.ptr, 0, self.flush.nbytes, stream.ptr)
            start, end = cuda.Event(), cuda.Event()
            start.record(stream)
            call()
            end.record(stream)
            pairs.append((start, end))
        stream.synchronize()
        return [1e3 * float(cuda.get_elapsed_time(start, end)) for start, end in pairs]


def num_samples(seconds: float, pilot_us: float) -> int:
    """As many samples as fit in the time, but not few and not more than help."""
    return min(MAX_SAMPLES, max(MIN_SAMPLES, int(seconds * 1e6 / max(pilot_us, 1.0))))
