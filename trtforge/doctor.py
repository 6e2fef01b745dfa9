"""What this machine can do: every check runs the real part."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser

from trtforge import __version__
from trtforge.backends.base import Backend, BuildRequest
from trtforge.backends.registry import all_backends
from trtforge.errors import TrtForgeError, UnavailableError
from trtforge.gpu import find_gpus
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.reference import ReferenceModel
from trtforge.target import RTX_WITHOUT, BackendName

_PROBE = """
<ir_version: 10, opset_import: ["" : 23]>
probe (float[2, 16] x) => (float[2, 16] y) { y = Relu (x) }
"""


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
        *_check_backends(),
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


def _check_backends() -> Iterator[Check]:
    """Every engine builder: usable here, or why not. One is enough."""
    backends = all_backends()
    reasons = {backend.name: backend.unavailable() for backend in backends}
    for backend in backends:
        reason = reasons[backend.name]
        if reason is None:
            yield _attempt(backend.name, partial(_build_probe, backend))
        else:
            is_needed = backend.name is BackendName.TENSORRT_RTX and all(reasons.values())
            yield Check(backend.name, "failed" if is_needed else "missing", f"{reason.what}: {reason.why}", reason.fix)


def _build_probe(backend: Backend, model: Path) -> str:
    shape = ShapeRange((2, 16), (2, 16), (2, 16))
    profiles = ProfileSet((Profile("default", {"x": shape}),), "static")
    target = backend.target(None)
    with backend.start_worker(None) as worker:
        result = backend.build(BuildRequest(model, model.with_suffix(".engine"), profiles, target), worker)
    return f"{result.backend_version} builds an engine for {', '.join(target.names)} in {result.build_s:.1f} s"


def _find_gpu() -> Check:
    try:
        gpus = find_gpus()
    except UnavailableError as err:
        return Check("gpu", "missing", f"{err.why}; engines are built and verified without one")
    listed = "; ".join(f"{gpu.name}, sm_{gpu.compute_capability}" for gpu in gpus)
    needs_tensorrt = any(gpu.compute_capability in RTX_WITHOUT for gpu in gpus)
    return Check("gpu", "ok", listed, "its engines take --backend tensorrt" if needs_tensorrt else "")
