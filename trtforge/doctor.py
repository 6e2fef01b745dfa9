"""What this machine can do: every check runs the real part."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser

from trtforge import __version__
from trtforge.backends.base import BuildRequest
from trtforge.backends.registry import select_backend
from trtforge.errors import TrtForgeError
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.reference import ReferenceModel
from trtforge.target import rtx_target_from_option

_PROBE = """
<ir_version: 10, opset_import: ["" : 23]>
probe (float[2, 16] x) => (float[2, 16] y) { y = Relu (x) }
"""
_NVIDIA_SMI_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was checked.
        state: "ok", "missing" (a part that is optional here) or "failed".
        detail: what was found.
        fix: how to get it; empty when there is nothing to do.
    """

    name: str
    state: Literal["ok", "missing", "failed"]
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The check as JSON values."""
        return dataclasses.asdict(self)


def examine() -> list[Check]:
    """Run every check; none of them raises."""
    return [
        Check("python", "ok", platform.python_version()),
        Check("trtforge", "ok", __version__),
        _attempt("onnxruntime", _run_probe),
        _attempt("tensorrt-rtx", _build_probe),
        _find_gpu(),
    ]


def _attempt(name: str, probe: Callable[[Path], str]) -> Check:
    """The outcome of a probe that runs in a scratch folder on a tiny model."""
    with tempfile.TemporaryDirectory(prefix="trtforge-") as folder:
        model = Path(folder) / "probe.onnx"
        onnx.save(onnx.parser.parse_model(_PROBE), str(model))
        try:
            return Check(name, "ok", probe(model))
        except TrtForgeError as err:
            return Check(name, "failed", f"{err.what}: {err.why}" if err.why else err.what, err.fix)


def _run_probe(model: Path) -> str:
    with ReferenceModel(model) as session:
        session.run({"x": np.ones((2, 16), np.float32)})
    return f"{metadata.version('onnxruntime')} runs a model"


def _build_probe(model: Path) -> str:
    backend = select_backend("tensorrt-rtx")
    shape = ShapeRange((2, 16), (2, 16), (2, 16))
    profiles = ProfileSet((Profile("default", {"x": shape}),), "static")
    request = BuildRequest(model, model.with_suffix(".engine"), profiles, rtx_target_from_option(None))
    with backend.start_worker(None) as worker:
        result = backend.build(request, worker)
    return f"{result.backend_version} builds an engine in {result.build_s:.1f} s"


def _find_gpu() -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check("gpu", "missing", "no NVIDIA driver here; engines are built and verified without one")
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (subprocess.SubprocessError, OSError) as err:
        return Check("gpu", "missing", f"nvidia-smi does not answer: {err}", "check the driver")
    return Check("gpu", "ok", "; ".join(found.stdout.strip().splitlines()))
