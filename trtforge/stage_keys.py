"""What the result of each stage depends on, as JSON: equal keys mean equal results.

Paths and times are never part of a key. Files count by their content, earlier stages by their own keys, trtforge by its
source text, because a working copy changes without changing its version; and the processor counts, because sums in
other orders differ in their last bits. What the user's own code computes (`--metric`) has no key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.data import Dataset
from trtforge.describe import describe_profiles, package_versions
from trtforge.graph.save import skeleton_from_graph
from trtforge.hashing import fingerprint
from trtforge.inputs import BuildInputs
from trtforge.manifest import ParityInfo
from trtforge.profile_choice import CALIBRATION_BATCH
from trtforge.spec import BuildSpec
from trtforge.stages import Prepared

if TYPE_CHECKING:
    from trtforge.backends.base import Backend, BuildRequest
    from trtforge.quantization.calibrate import Pass
    from trtforge.quantization.sites import Placement

_PROCESSOR = ("model name", "flags", "Features", "CPU part")


def stage_key(stage: str, depends_on: Any) -> str:
    """The key of a stage's result.

    Args:
        stage: name of the stage.
        depends_on: everything else, as JSON.
    """
    return fingerprint([_surroundings(), stage, depends_on])


def graph_sha256(graph: gs.Graph) -> str:
    """Of a graph as it is written, without writing it."""
    skeleton = skeleton_from_graph(graph)
    digest = hashlib.sha256(skeleton.model.SerializeToString(deterministic=True))
    for name, values in skeleton.weights.items():
        digest.update(f"\0{name}\0".encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def calibration_inputs(
    spec: BuildSpec, inputs: BuildInputs, placement: Placement, *, decides_weights: bool
) -> dict[str, Any]:
    """What ranges and rounded weights depend on, besides the graph."""
    return {
        "precision": spec.precision.name,
        "recipe": inputs.recipe.model_dump(mode="json"),
        "placement": dataclasses.asdict(placement),
        "table": None if inputs.table is None else inputs.table.model_dump(mode="json"),
        "data": _samples(inputs.calibration),
        "batch": inputs.batch.clamp(CALIBRATION_BATCH),
        "decides weights": decides_weights,
    }


def overflow_inputs(work: Pass) -> dict[str, Any]:
    """What the tensors beyond float16's range depend on, besides the graph."""
    return {"tensors": list(work.channel_axes), "data": _samples(work.dataset), "batch": work.batch_size}


def verification_inputs(spec: BuildSpec, inputs: BuildInputs, prepared: Prepared, model_sha256: str) -> dict[str, Any]:
    """What the scores of a graph depend on, besides the graph."""
    return {
        "source": model_sha256,
        "data": _samples(inputs.evaluation),
        "batch": [inputs.batch.min, inputs.batch.opt],
        "budget": spec.cosine_budget,
        "verify": spec.verify,
        "weighted nodes": sorted(prepared.gemm_flops),
    }


def search_inputs(
    spec: BuildSpec, inputs: BuildInputs, prepared: Prepared, parity: ParityInfo | None
) -> dict[str, Any]:
    """What the nodes that stay float depend on, besides the graph and its quantization."""
    return {
        "precision": spec.precision.name,
        "data": [_samples(inputs.calibration), _samples(inputs.evaluation)],
        "batch": [inputs.batch.min, inputs.batch.opt, inputs.batch.clamp(CALIBRATION_BATCH)],
        "budget": spec.cosine_budget,
        "parity": None if parity is None else parity.model_dump(mode="json"),
        "flops": [prepared.gemm_flops, prepared.attention_flops],
    }


def engine_inputs(backend: Backend, request: BuildRequest) -> dict[str, Any]:
    """What an engine depends on, besides the graph."""
    return {
        "backend": [backend.name, backend.version()],
        "target": dataclasses.asdict(request.target),
        "profiles": [info.model_dump(mode="json") for info in describe_profiles(request.profiles)],
        "tf32": request.tf32,
        "options": request.options.identity(),
        "whole attention": list(request.whole_attention),
    }


def _samples(dataset: Dataset | None) -> list[Any] | None:
    """The content of a dataset, and which of its batches are left out."""
    return None if dataset is None else [dataset.sha256, dataset.smallest_batch]


@functools.cache
def _surroundings() -> str:
    """The code that runs, and what it runs on."""
    return fingerprint([_source_sha256(), package_versions(), platform.python_version(), _machine()])


def _source_sha256() -> str:
    """Of trtforge's own source files."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _machine() -> list[Any]:
    """Processor, the number of its cores that may be used, and the GPUs with their driver."""
    described = {line for line in _text("/proc/cpuinfo").splitlines() if line.startswith(_PROCESSOR)}
    found = [_text(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    gpus = [line for text in found for line in text.splitlines() if line.startswith("Model:")]
    return [
        platform.machine(),
        sorted(described),
        len(os.sched_getaffinity(0)),
        _text("/proc/driver/nvidia/version"),
        gpus,
    ]


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
