"""The NVIDIA GPUs of this machine, asked from the driver: no CUDA package is needed and no context is made."""

from __future__ import annotations

import ctypes
import dataclasses

from trtforge.errors import UnavailableError

_DRIVER = "libcuda.so.1"
_MAX_NAME = 256
# CUdevice_attribute in cuda.h.
_CC_MAJOR, _CC_MINOR = 75, 76


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as the driver has it, e.g. "NVIDIA H200".
        compute_capability: 90 is compute capability 9.0.
    """

    name: str
    compute_capability: int


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process can use, in CUDA's order, the first of which is CUDA's default.

    `CUDA_VISIBLE_DEVICES` counts, which `nvidia-smi` does not look at.

    Raises:
        UnavailableError: there is none; `why` says what is missing.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
        _check(driver, driver.cuInit(0))
        count = ctypes.c_int()
        _check(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
        gpus = tuple(_describe(driver, index) for index in range(count.value))
    except (OSError, AttributeError) as err:
        raise _no_gpu("no NVIDIA driver is installed", str(err)) from err
    if not gpus:
        raise _no_gpu("the NVIDIA driver finds no GPU", "see nvidia-smi, and CUDA_VISIBLE_DEVICES where it is set")
    return gpus


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_MAX_NAME)
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver, driver.cuDeviceGetName(name, _MAX_NAME, device))
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(major), _CC_MAJOR, device))
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(minor), _CC_MINOR, device))
    return Gpu(name.value.decode("utf-8", "replace"), 10 * major.value + minor.value)


def _check(driver: ctypes.CDLL, status: int) -> None:
    """Raise for a failed call of the driver, with its own words."""
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"no reason").decode("utf-8", "replace")
    raise _no_gpu("the NVIDIA driver finds no GPU", f"{reason} (CUDA error {status})")


def _no_gpu(why: str, detail: str) -> UnavailableError:
    return UnavailableError("this machine has no GPU to use", f"{why} ({detail})", "use a machine with an NVIDIA GPU")
