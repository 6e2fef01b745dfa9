"""What a server says of the model under test: its inputs, its largest batch, and whether it streams answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trtforge.errors import InputError
from trtforge.serving.triton.client import RequestError, TritonClient

TEXT = "BYTES"
OPEN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInput:
    """One input.

    Attributes:
        datatype: in KServe's words, e.g. "FP32"; "BYTES" is text.
        dims: of one sample, without the batch axis that the server batches along; -1 where open.
        is_optional: a request may leave it out.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool

    def describe(self) -> str:
        """`input_ids INT64 [-1]`."""
        return f"{self.name} {self.datatype} [{', '.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The model under test.

    Attributes:
        platform: its backend.
        outputs: names.
        text_outputs: those of them that are text.
        max_batch: samples that one request may hold; 0 where the model has no batch axis of the server's; None where
            the server does not tell.
        is_decoupled: it may stream several answers to a request.
        config: as the server gives it; None where it gives none.
    """

    name: str
    platform: str
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...]
    text_outputs: tuple[str, ...]
    max_batch: int | None
    is_decoupled: bool
    config: Mapping[str, Any] | None

    @property
    def has_batch_axis(self) -> bool:
        """Whether the first axis of every input and output is the batch."""
        return self.max_batch != 0

    def describe_inputs(self) -> str:
        """Of all inputs, for an error."""
        return "; ".join(port.describe() for port in self.inputs)


def read_signature(client: TritonClient, model: str, version: str) -> Signature:
    """Ask a server for a model.

    Args:
        client: of the server.
        model: its name.
        version: that must be loaded; empty means the server's choice.

    Raises:
        InputError: the server has no such model or version, or it is not ready; names the models that it has.
        RequestError: no answer.
    """
    try:
        metadata = client.metadata(model)
    except RequestError as err:
        if err.kind != "refused":
            raise
        raise _unknown_model(client, model, err) from err
    versions = [str(known) for known in metadata.get("versions", [])]
    if version and versions and version not in versions:
        what = f"model {model!r} has no version {version!r} on {client.url}"
        raise InputError(what, f"loaded: {', '.join(versions)}", "correct `version` in the traffic file")
    config = _read_config(client, model)
    try:
        return signature_from_metadata(metadata, config)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        what = f"{client.url} does not speak KServe v2"
        why = f"its words about {model!r} cannot be read: {type(err).__name__} {err}"
        raise InputError(what, why, "check that the address is that of an inference server") from err


def signature_from_metadata(metadata: Mapping[str, Any], config: Mapping[str, Any] | None) -> Signature:
    """The signature in a server's metadata and configuration of a model.

    Without a configuration (KServe v2 has none, Triton adds it) the first axis counts as the batch where it is open in
    every input.
    """
    shapes = [tuple(int(dim) for dim in port["shape"]) for port in metadata["inputs"]]
    if config is None:
        is_batched = all(shape and shape[0] == OPEN for shape in shapes)
        max_batch = None if is_batched else 0
    else:
        max_batch = int(config.get("max_batch_size", 0))
        is_batched = max_batch > 0
    optional = {str(port["name"]) for port in (config or {}).get("input", []) if port.get("optional")}
    inputs = tuple(
        ModelInput(
            str(port["name"]), str(port["datatype"]), shape[1:] if is_batched else shape, str(port["name"]) in optional
        )
        for port, shape in zip(metadata["inputs"], shapes, strict=True)
    )
    outputs = {str(port["name"]): str(port["datatype"]) for port in metadata.get("outputs", [])}
    policy = (config or {}).get("model_transaction_policy") or {}
    return Signature(
        name=str(metadata["name"]),
        platform=str(metadata.get("platform") or (config or {}).get("backend", "")),
        inputs=inputs,
        outputs=tuple(outputs),
        text_outputs=tuple(name for name, datatype in outputs.items() if datatype == TEXT),
        max_batch=max_batch,
        is_decoupled=bool(policy.get("decoupled", False)),
        config=config,
    )


def _read_config(client: TritonClient, model: str) -> Mapping[str, Any] | None:
    try:
        return client.config(model)
    except RequestError as err:
        if err.kind != "refused":
            raise
        return None


def _unknown_model(client: TritonClient, model: str, error: RequestError) -> InputError:
    try:
        states = client.models()
    except RequestError:
        return InputError(f"{client.url} has no model {model!r}", error.why, "correct `model` in the traffic file")
    of_model = [state for state in states if state.name == model]
    if of_model:
        why = "; ".join(f"version {state.version}: {state.state} {state.reason}".strip() for state in of_model)
        return InputError(f"model {model!r} is not ready on {client.url}", why, "see the server's log")
    ready = sorted({state.name for state in states if state.state == "READY"})
    why = f"it has: {', '.join(ready)}" if ready else "it has no model that is ready"
    return InputError(f"{client.url} has no model {model!r}", why, "correct `model` in the traffic file")
