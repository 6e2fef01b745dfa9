"""trtforge: TensorRT engines that are small, fast and proven accurate, from one command."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtforge.acceptance import VerifySpec, verify_artifact
    from trtforge.api import build, calibrate, compare, quantize
    from trtforge.engine_options import EngineOptions
    from trtforge.errors import TrtForgeError
    from trtforge.fusing import find_fusions
    from trtforge.inspection import inspect_model
    from trtforge.limits import Limits
    from trtforge.linting import lint_model
    from trtforge.manifest import load_manifest
    from trtforge.pipeline import BuildResult
    from trtforge.profiling import describe_profile

__version__ = "0.1.0"
__all__ = [
    "BuildResult",
    "EngineOptions",
    "Limits",
    "TrtForgeError",
    "VerifySpec",
    "__version__",
    "build",
    "calibrate",
    "compare",
    "describe_profile",
    "find_fusions",
    "inspect_model",
    "lint_model",
    "load_manifest",
    "quantize",
    "verify_artifact",
]

# Where the public names live; they are imported when first used, so that `import trtforge` stays light.
_HOMES = {
    "BuildResult": "pipeline",
    "EngineOptions": "engine_options",
    "Limits": "limits",
    "TrtForgeError": "errors",
    "VerifySpec": "acceptance",
    "build": "api",
    "calibrate": "api",
    "compare": "api",
    "describe_profile": "profiling",
    "find_fusions": "fusing",
    "inspect_model": "inspection",
    "lint_model": "linting",
    "load_manifest": "manifest",
    "quantize": "api",
    "verify_artifact": "acceptance",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trtforge' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"trtforge.{_HOMES[name]}"), name)
