"""What an engine is built for: a backend and the compute capabilities it has to run on.

One TensorRT-RTX engine serves several compute capabilities and holds the code of the lowest one. sm_75 together with
others would give every card Turing's code, so it gets an engine of its own.
"""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum

from trtforge.errors import InputError, UnavailableError


class BackendName(StrEnum):
    """Names of the engine builders, as in `--backend` and in the manifest."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


# TensorRT-RTX 1.7.1, trt.ComputeCapability (CURRENT and NONE aside).
RTX_COMPUTE_CAPABILITIES = (75, 80, 86, 89, 120, 121)
# What an RTX engine supports when no target is set (TensorRT-RTX documentation, portable engines).
RTX_PORTABLE = (80, 86, 89, 120)
# Data-centre parts that exist but that TensorRT-RTX has no member for.
RTX_WITHOUT = {90: "H100, H200", 100: "B200", 103: "B300"}
TURING = 75
# The lowest compute capability that TensorRT-RTX 1.7.1 builds a quantization for, where that is not every one, and why.
_LOWEST = {
    "fp8": (89, "tensor cores multiply FP8 from sm_89 on, and the builder refuses it for the others"),
    "int4": (80, "the builder refuses INT4 weights for Turing"),
}
_INSTEAD = {"fp8": "--int8", "int4": "--int8-weights"}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Backend and compute capabilities, e.g. `Target(BackendName.TENSORRT_RTX, (86, 89))`.

    Attributes:
        backend: the engine builder.
        compute_capabilities: sorted, without duplicates; 86 is compute capability 8.6. For TensorRT the machine's own.
        explicit: False when the user named none and the backend's portable default is used.
    """

    backend: BackendName
    compute_capabilities: tuple[int, ...]
    explicit: bool = True

    @property
    def names(self) -> list[str]:
        """The targets as `sm_86`."""
        return [f"sm_{cc}" for cc in self.compute_capabilities]


def rtx_target_from_option(gpu: str | None) -> Target:
    """The TensorRT-RTX target for `--gpu`, e.g. `"sm_86,sm_89"`; None gives the portable default.

    Raises:
        InputError: a name that is no compute capability, or sm_75 together with others.
        UnavailableError: a compute capability that TensorRT-RTX has no code for.
    """
    if gpu is None:
        return Target(BackendName.TENSORRT_RTX, RTX_PORTABLE, explicit=False)
    allowed = ", ".join(f"sm_{cc}" for cc in RTX_COMPUTE_CAPABILITIES)
    found = _compute_capabilities(gpu, f"tensorrt-rtx builds for {allowed}")
    for cc in sorted(found):
        if cc in RTX_WITHOUT:
            raise UnavailableError(
                f"tensorrt-rtx cannot build for sm_{cc} ({RTX_WITHOUT[cc]})",
                f"it has code for {allowed} only",
                "build with --backend tensorrt on a machine with this GPU",
            )
        if cc not in RTX_COMPUTE_CAPABILITIES:
            raise InputError(
                f"--gpu sm_{cc} is unknown",
                f"tensorrt-rtx builds for {allowed}",
                "give a comma-separated list such as --gpu sm_86,sm_89",
            )
    if TURING in found and len(found) > 1:
        raise InputError(
            "sm_75 cannot share an engine with other compute capabilities",
            "an engine holds the code of its lowest target, so every other card would run Turing's code",
            "build one artifact for --gpu sm_75 and one for the rest",
        )
    return Target(BackendName.TENSORRT_RTX, tuple(sorted(found)))


def tensorrt_target_from_option(gpu: str | None, present: int) -> Target:
    """The TensorRT target for `--gpu`: the GPU that is present, which the option may name but not change.

    Args:
        gpu: e.g. "sm_90".
        present: the GPU's compute capability, 90 for 9.0.

    Raises:
        InputError: a name that is no compute capability.
        UnavailableError: another one than the GPU's.
    """
    target = Target(BackendName.TENSORRT, (present,))
    if gpu is None:
        return dataclasses.replace(target, explicit=False)
    if _compute_capabilities(gpu, f"tensorrt builds for the GPU of this machine, {target.names[0]}") != {present}:
        raise UnavailableError(
            f"--gpu {gpu} cannot be built here with tensorrt",
            f"it measures kernels on the GPU of this machine, {target.names[0]}, and builds for that",
            "leave --gpu out, build on a machine with that GPU, or use --backend tensorrt-rtx",
        )
    return target


def _compute_capabilities(gpu: str, allowed: str) -> set[int]:
    """The numbers in `"sm_86,sm_89"`.

    Raises:
        InputError: a name that is no compute capability; `allowed` is the reason it gives.
    """
    found: set[int] = set()
    for name in gpu.split(","):
        match = re.fullmatch(r"sm_([1-9]\d{1,2})", name.strip(), re.ASCII)
        if match is None:
            raise InputError(
                f"--gpu {name.strip()!r} is not a compute capability",
                allowed,
                "give a comma-separated list such as --gpu sm_86,sm_89",
            )
        found.add(int(match.group(1)))
    return found


def check_quantization(target: Target, quantization: str | None) -> None:
    """Refuse a target that cannot run a quantization.

    With no target set TensorRT-RTX builds FP8 without a word, for what it calls sm_80 and newer; named one by one it
    refuses those below sm_89.

    Args:
        target: what the engine has to run on.
        quantization: "int8", "fp8", "int4", "int8-weights" or None.

    Raises:
        InputError: some of its compute capabilities are too old.
    """
    lowest, why = _LOWEST.get(quantization or "", (0, ""))
    old = [name for cc, name in zip(target.compute_capabilities, target.names, strict=True) if cc < lowest]
    if not old:
        return
    if target.backend is BackendName.TENSORRT:
        raise InputError(
            f"--{quantization} cannot be built for {old[0]}, the GPU of this machine",
            why,
            f"build with {_INSTEAD[quantization or '']}, or on a newer GPU",
        )
    able = [cc for cc in target.compute_capabilities if cc >= lowest] or [cc for cc in RTX_PORTABLE if cc >= lowest]
    default = "" if target.explicit else f" (without --gpu an engine is for {', '.join(target.names)})"
    gpus = ",".join(f"sm_{cc}" for cc in able)
    raise InputError(
        f"--{quantization} cannot be built for {', '.join(old)}",
        f"{why}{default}",
        f"give --gpu {gpus}, and build with {_INSTEAD[quantization or '']} for the other GPUs",
    )
