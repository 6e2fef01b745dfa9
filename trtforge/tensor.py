"""The signature of a model's inputs and outputs, free of any framework's types."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: as in the source model.
        dtype: numpy name of the element type, or "bfloat16", "float8_e4m3fn" ... where numpy has none.
        shape: one entry per axis: a fixed size, a symbolic name, or None where the model names nothing;
            None as a whole when the model does not even state the rank.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    @property
    def is_dynamic(self) -> bool:
        """True when a size is open."""
        return self.shape is None or any(not isinstance(dim, int) for dim in self.shape)

    def describe(self) -> str:
        """`input_ids int64 [batch, seq]`."""
        dims = "unknown rank" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {self.dtype} [{dims}]"
