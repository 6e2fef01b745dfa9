"""Reads the engine inspector's JSON of TensorRT 11: `{"Layers": [...], "I/O Tensors": [...]}`.

Not run here: it needs an engine loaded on a GPU. The fields are those of TensorRT's documentation (Engine Inspector;
Migrating IEngineInspector Usage from 10.x to 11.x), spelled as TensorRT-RTX 1.7.1, which shares the code, logs them. A
text that does not fit gives a plan marked unreadable, never an exception: a new release must not break builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from trtforge.backends.plan import EnginePlan, OriginalNames, PlanLayer, dtype_of
from trtforge.manifest import PlanTensor


class _Entry(pydantic.BaseModel):
    """Base of what is read: fields have the inspector's spelling, those that are not used are left out."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)


class _Operand(_Entry):
    name: str = pydantic.Field(alias="Name")
    dtype: str = pydantic.Field(alias="Datatype")
    shape: tuple[int, ...] = pydantic.Field(alias="Dimensions", default=())


class _Weights(_Entry):
    """The weights of a layer outside the compiled graph, which lists no constants."""

    dtype: str = pydantic.Field(alias="Type")
    count: int = pydantic.Field(alias="Count")


class _Layer(_Entry):
    name: str = pydantic.Field(alias="Name")
    type: str = pydantic.Field(alias="LayerType")
    inputs: tuple[_Operand, ...] = pydantic.Field(alias="Inputs", default=())
    constants: tuple[_Operand, ...] = pydantic.Field(alias="Constants", default=())
    outputs: tuple[_Operand, ...] = pydantic.Field(alias="Outputs", default=())
    weights: _Weights | None = pydantic.Field(alias="Weights", default=None)
    out_maps: int = pydantic.Field(alias="OutMaps", default=1)
    tactic: str = pydantic.Field(alias="TacticName", default="")
    metadata: str = pydantic.Field(alias="Metadata", default="")


class _Engine(_Entry):
    layers: tuple[_Layer, ...] = pydantic.Field(alias="Layers")


def parse_inspection(
    text: str, ports: Sequence[str], nodes: Mapping[str, str], tensors: Mapping[str, str]
) -> EnginePlan:
    """The plan that the inspector of an engine describes.

    Args:
        text: the JSON, of an engine built with detailed profiling verbosity.
        ports: names of the model's inputs and outputs, which the JSON has verbatim.
        nodes: short name -> original name of the nodes.
        tensors: the same for tensors.
    """
    try:
        engine = _Engine.model_validate_json(text)
    except pydantic.ValidationError as err:
        first: Any = err.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the text"
        return EnginePlan((), f"the engine inspector's JSON has an unknown format: {where}: {first['msg']}")
    names = OriginalNames(frozenset(ports), nodes, tensors)
    return EnginePlan(tuple(_read_layer(layer, names) for layer in engine.layers))


def _read_layer(layer: _Layer, names: OriginalNames) -> PlanLayer:
    name, main_nodes = names.of_row(layer.name)
    constants = tuple(_read_operand(operand, names) for operand in layer.constants)
    if layer.weights is not None and not constants:
        rows = max(1, layer.out_maps)
        shape = (rows, layer.weights.count // rows)
        constants = (PlanTensor(name="Weights", dtype=dtype_of(layer.weights.dtype), shape=shape),)
    return PlanLayer(
        name=name,
        type=layer.type,
        tactic=layer.tactic,
        inputs=tuple(_read_operand(operand, names) for operand in layer.inputs),
        constants=constants,
        outputs=tuple(_read_operand(operand, names) for operand in layer.outputs),
        onnx_nodes=names.in_metadata(layer.metadata),
        main_nodes=main_nodes,
    )


def _read_operand(operand: _Operand, names: OriginalNames) -> PlanTensor:
    name = operand.name if operand.name in names.ports else names.of_tensor(operand.name)
    return PlanTensor(name=name, dtype=dtype_of(operand.dtype), shape=operand.shape)
