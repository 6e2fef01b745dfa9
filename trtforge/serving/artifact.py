"""An artifact that is to be served: what it has to be before anything is made of it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trtforge.artifact import damaged_files
from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.manifest import MODEL_NAME, Manifest, ProfileInfo, load_manifest
from trtforge.serving.graph_facts import GraphFacts, read_facts
from trtforge.serving.repository import FileSource
from trtforge.target import BackendName
from trtforge.tensor import TensorSpec

# E.g. 1.7.1, 11.4.1.5 or 1.8.0.dev1: it becomes a line of a requirements file.
_VERSION = re.compile(r"\d+(\.\d+)*[A-Za-z0-9.+]*", re.ASCII)
# Of a dim: Triton keeps batch sizes in 32 bits, and no other dim is near.
_LARGEST_SIZE = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact that is to be served.

    Attributes:
        path: its folder.
        manifest: its manifest.
        facts: of its graph.
    """

    path: Path
    manifest: Manifest
    facts: GraphFacts

    def source(self, name: str) -> FileSource:
        """One of its files."""
        return FileSource(self.path / name, self.manifest.files[name].sha256)

    def graph_sources(self) -> dict[str, FileSource]:
        """The built graph, with its external data where it has some."""
        return {name: self.source(name) for name in self.manifest.files if name.startswith(MODEL_NAME)}


def open_artifact(
    path: Path, warn: Callable[[str], None], *, force: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Artifact:
    """An artifact whose files are what its manifest says.

    Args:
        path: its folder.
        warn: takes what the user has to know.
        force: take one that missed its accuracy budget.
        limits: bounds on untrusted input.

    Raises:
        InputError: it is none, it is damaged, it contradicts itself, or it missed its accuracy budget.
    """
    manifest = load_manifest(path, limits)
    damaged = damaged_files(path, manifest)
    if damaged:
        raise InputError(
            f"{path} is damaged: {', '.join(damaged)} is not what the manifest says",
            "the file is missing or was changed since the artifact was built",
            "build it again, or copy it again",
        )
    facts = read_facts(path / MODEL_NAME, limits)
    contradiction = find_contradiction(manifest, facts)
    if contradiction:
        raise InputError(
            f"the manifest of {path} does not hold: {contradiction}",
            "it was changed by hand, or is another artifact's",
            "build the artifact again",
        )
    parity = manifest.parity
    if parity.passed is False and not force:
        raise InputError(
            f"{path} missed its accuracy budget of {parity.budget}",
            f"compared with {parity.reference}; report.html shows by how much",
            "build it again so that it meets the budget, or give --force to serve it as it is",
        )
    if parity.passed is False:
        warn(f"{path} missed its accuracy budget and is packaged by --force")
    elif not parity.verified:
        warn(f"the accuracy of {path} was not verified" + (f" ({parity.note})" if parity.note else ""))
    return Artifact(path, manifest, facts)


def find_contradiction(manifest: Manifest, facts: GraphFacts) -> str:
    """What a manifest says that cannot be so; empty where it fits its graph.

    A model is configured by its manifest: one that was changed would make a model that does not load, or, where its
    words go into files that other programs read, something else altogether.
    """
    if manifest.backend.name not in list(BackendName):
        return f"nothing is known of a backend {manifest.backend.name!r}"
    if _VERSION.fullmatch(manifest.backend.version) is None:
        return f"{manifest.backend.version!r} is no version"
    for mode, specs in (("input", facts.inputs), ("output", facts.outputs)):
        ports = [port for port in manifest.io if port.mode == mode]
        stated = [TensorSpec(port.name, port.source_dtype or port.dtype, port.shape) for port in ports]
        if len(stated) != len(specs) or not all(map(_is_same, stated, specs)):
            shown = [", ".join(spec.describe() for spec in each) or "none" for each in (specs, stated)]
            return f"its {mode}s are {shown[0]} in the graph, not {shown[1]}"
    return next(filter(None, (_profile_contradiction(profile, facts.inputs) for profile in manifest.profiles)), "")


def _is_same(stated: TensorSpec, spec: TensorSpec) -> bool:
    """Whether two can be one tensor: names of dims may differ, and what one leaves open."""
    if (stated.name, stated.dtype) != (spec.name, spec.dtype):
        return False
    if stated.shape is None or spec.shape is None:
        return True
    return len(stated.shape) == len(spec.shape) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(stated.shape, spec.shape, strict=True)
    )


def _profile_contradiction(profile: ProfileInfo, inputs: Sequence[TensorSpec]) -> str:
    others = sorted((profile.inputs.keys() | profile.values.keys()) - {spec.name for spec in inputs})
    if others:
        return f"profile '{profile.name}' has a range for {others[0]!r}, which is no input"
    for spec in inputs:
        span, values = profile.inputs[spec.name], profile.values.get(spec.name)
        shape = spec.shape if spec.shape is not None else (None,) * len(span.min)
        if len(span.min) != len(shape):
            return f"input '{spec.name}' has {len(shape)} axes, and {len(span.min)} in profile '{profile.name}'"
        for axis, (low, high, size) in enumerate(zip(span.min, span.max, shape, strict=True)):
            allowed = (size, size) if isinstance(size, int) else (0, _LARGEST_SIZE)
            if low < allowed[0] or high > allowed[1]:
                is_fixed = "" if allowed[1] == _LARGEST_SIZE else f", and {size} in the graph"
                return f"axis {axis} of input '{spec.name}' is {low} to {high} in profile '{profile.name}'{is_fixed}"
        if values is not None and not len(values.min) == math.prod(span.min) == math.prod(span.max):
            return f"profile '{profile.name}' has {len(values.min)} values for input '{spec.name}' of {list(span.max)}"
    return ""
