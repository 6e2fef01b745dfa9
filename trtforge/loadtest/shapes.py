"""The shape of each input of a request, from the model's open dimensions and the traffic's lengths and batch sizes."""

from __future__ import annotations

from trtforge.errors import InputError
from trtforge.loadtest.signature import OPEN, TEXT, ModelInput, Signature
from trtforge.loadtest.traffic import InputValues, Traffic

_FIX = "correct the traffic file"


def request_shape(
    signature: Signature, port: ModelInput, values: InputValues, length: int | None, batch: int
) -> tuple[int, ...]:
    """The shape of an input in a request, with the batch axis.

    Args:
        signature: of the model.
        port: the input.
        values: what the traffic says of it.
        length: of this request; None where the traffic has no lengths.
        batch: samples in the request.

    Raises:
        InputError: a dimension is open and nothing fills it, or what fills it does not fit.
    """
    words = values.shape or _default_shape(signature, port)
    if "length" in words and length is None:
        why = f"the model takes {port.describe()}, and the traffic file has no lengths"
        fix = "add `lengths` to it, e.g. lengths: [{min: 8, max: 32}]"
        raise InputError(f"input {port.name!r} has an open dimension", why, fix)
    named = {"length": length, "batch": batch}
    sizes = tuple(named[word] if isinstance(word, str) else word for word in words)
    if len(sizes) != len(port.dims) or any(
        dim not in (OPEN, size) for dim, size in zip(port.dims, sizes, strict=False)
    ):
        why = f"the model takes {port.describe()}"
        raise InputError(f"shape {_listed(sizes)} of input {port.name!r} does not fit", why, _FIX)
    shape = tuple(size for size in sizes if size is not None)
    return (batch, *shape) if signature.has_batch_axis else shape


def check_batches(traffic: Traffic, signature: Signature) -> None:
    """Refuse batch sizes that the model does not take.

    Raises:
        InputError: beyond max_batch_size, or no axis to put them along.
    """
    largest = max(traffic.batch_weights or [size for size in traffic.batch_steps if size is not None])
    limit = signature.max_batch
    what = f"batch {largest} cannot be sent to model {signature.name!r}"
    if limit and largest > limit:
        raise InputError(what, f"its max_batch_size is {limit}", f"use at most {limit} in the traffic file")
    if limit == 0 and largest > 1 and traffic.samples:
        raise InputError(what, "the model has no batch axis: a sample is a request", "use batch 1")
    if limit == 0 and largest > 1:
        inputs = [(port, traffic.inputs.get(port.name, InputValues())) for port in signature.inputs]
        shapes = [values.shape or _default_shape(signature, port) for port, values in inputs]
        if not any("batch" in shape for shape in shapes):
            why = "its max_batch_size is 0, so that no axis is known to be the batch"
            raise InputError(
                what, why, "use batch 1, or name the axis in the traffic file: inputs.NAME.shape: [batch, 8]"
            )


def _default_shape(signature: Signature, port: ModelInput) -> tuple[int | str, ...]:
    """Sizes and "length" or "batch" where a dimension is open."""
    if port.datatype == TEXT:
        # A text is a sample: where the server does not batch, samples are counted along the first open dimension.
        fillers = iter(["batch"] if not signature.has_batch_axis else [])
        return tuple(next(fillers, 1) if dim == OPEN else dim for dim in port.dims)
    if port.dims.count(OPEN) > 1:
        example = ", ".join("length" if dim == OPEN else str(dim) for dim in port.dims)
        raise InputError(
            f"input {port.name!r} has several open dimensions",
            f"the model takes {port.describe()}",
            f"state sizes for some in the traffic file: inputs.{port.name}.shape: [{example}]",
        )
    return tuple("length" if dim == OPEN else dim for dim in port.dims)


def _listed(sizes: tuple[int | None, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
