"""Where Q/DQ pairs go: the decision as data, in graph order.

Some nodes gain from INT8 only in company: the two products of an attention fuse only when both, and the projection
that reads them, are quantized; a residual Add reads INT8 only where every other reader does. Such a node is a
`Dependent`: it goes back to float with any of the nodes it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationSite:
    """An activation input that is quantized: one scale for the whole tensor."""

    node: str
    input_index: int
    tensor: str


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSite:
    """A weight input that is quantized.

    Attributes:
        axis: the axis that keeps one scale per index; None is one scale for the tensor.
    """

    node: str
    input_index: int
    tensor: str
    axis: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ReusedSite:
    """An activation input that reads a pair the model came with.

    Attributes:
        tensor: what the node reads now, a float tensor that another node reads through Q/DQ.
        dequantized: the output of that DequantizeLinear.
    """

    node: str
    input_index: int
    tensor: str
    dequantized: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeptFloat:
    """A node that could be thought to run in INT8 and does not."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeptQuantized:
    """A node whose Q/DQ the model came with, and what was made of it."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Dependent:
    """A node that is quantized only while all of `needs` are."""

    node: str
    needs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where Q/DQ goes, in graph order.

    Attributes:
        activations: inputs that get a pair.
        weights: inputs that become int8 initializers.
        kept_float: candidates that stay float, and why.
        kept_quantized: nodes that came with Q/DQ, kept as it is or completed.
        reused: inputs that are connected to a pair that is there already.
        shared: groups of quantized activations that get one scale.
        dependents: nodes that are quantized only together with others.
    """

    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]
    kept_float: tuple[KeptFloat, ...]
    kept_quantized: tuple[KeptQuantized, ...] = ()
    reused: tuple[ReusedSite, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    dependents: tuple[Dependent, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The activations to calibrate, each once."""
        return tuple(dict.fromkeys(site.tensor for site in self.activations))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that get Q/DQ, each once; those that need no calibration come last."""
        calibrated = [site.node for site in self.activations]
        others = [*(site.node for site in self.weights), *(site.node for site in self.reused)]
        return tuple(dict.fromkeys([*calibrated, *others]))

    def without(self, reasons: Mapping[str, str]) -> Placement:
        """The placement with some of its nodes left float, and with them the nodes that depend on these.

        Args:
            reasons: why, by node name.
        """
        present = set(self.nodes)
        dropped = {node: reasons[node] for node in self.nodes if node in reasons} | self._orphans(present, reasons)
        activations = tuple(site for site in self.activations if site.node not in dropped)
        return dataclasses.replace(
            self,
            activations=activations,
            weights=tuple(site for site in self.weights if site.node not in dropped),
            reused=tuple(site for site in self.reused if site.node not in dropped),
            kept_float=self.kept_float + tuple(KeptFloat(node, reason) for node, reason in dropped.items()),
            shared=shared_among(self.shared, {site.tensor for site in activations}),
            dependents=tuple(entry for entry in self.dependents if entry.node not in dropped),
        )

    def _orphans(self, present: Collection[str], reasons: Mapping[str, str]) -> dict[str, str]:
        """The dependents that lose a node they need, and why."""
        float_nodes = set(reasons)
        orphans: dict[str, str] = {}
        has_changed = True
        while has_changed:
            has_changed = False
            for entry in self.dependents:
                lost = next((node for node in entry.needs if node in float_nodes), None)
                if lost is not None and entry.node in present and entry.node not in float_nodes:
                    orphans[entry.node] = f"it is quantized only together with {lost!r}, which stays float"
                    float_nodes.add(entry.node)
                    has_changed = True
        return orphans


def shared_among(groups: Collection[tuple[str, ...]], tensors: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The groups reduced to the given tensors; a group of one is none."""
    reduced = (tuple(name for name in group if name in tensors) for group in groups)
    return tuple(group for group in reduced if len(group) > 1)


def share_amax(placement: Placement, amax: Mapping[str, float]) -> dict[str, float]:
    """amax by tensor, with the largest of a group for each of its members.

    Args:
        placement: whose `shared` groups count.
        amax: of every tensor of the placement; other entries pass through.
    """
    result = dict(amax)
    for group in placement.shared:
        largest = max(amax[name] for name in group)
        result.update(dict.fromkeys(group, largest))
    return result
