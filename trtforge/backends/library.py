"""The builder's Python module, in the build process only, as `trt`: both builders have one API.

`POLYGRAPHY_USE_TENSORRT_RTX` chooses, for Polygraphy as well. The parts that only one of them has are behind `IS_RTX`.
"""

from __future__ import annotations

from polygraphy.config import USE_TENSORRT_RTX as IS_RTX

from trtforge.errors import UnavailableError

try:
    if IS_RTX:
        import tensorrt_rtx as trt
    else:
        import tensorrt as trt
except (ImportError, OSError) as err:
    name, extra = ("TensorRT-RTX", "rtx") if IS_RTX else ("TensorRT", "tensorrt")
    raise UnavailableError(
        f"{name} is installed but cannot be loaded", str(err), f"pip install --force-reinstall 'trtforge[{extra}]'"
    ) from err

__all__ = ["IS_RTX", "trt"]
