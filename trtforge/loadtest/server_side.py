"""What the server says of a measurement: its own statistics of each model, and its Prometheus metrics over time.

All times are in milliseconds.
"""

from __future__ import annotations

from typing import Annotated

import pydantic

from trtforge.textfile import FileModel

Count = Annotated[int, pydantic.Field(ge=0)]


class ModelWork(FileModel):
    """What the server's own statistics say of one model over a measurement, without the warm-up.

    Attributes:
        name: of the model; a text front and the models behind it are one entry each.
        inferences: samples that it ran.
        executions: batches that it ran; inferences / executions is the mean batch size.
        failures: requests that it refused or failed.
        queue_ms, compute_input_ms, compute_ms, compute_output_ms: mean per request; None where nothing ran.
        request_ms: the mean time from receiving a request to its full answer, by the server's own clock.
        batch_sizes: executions by batch size, which is the key.
        cache_hits: requests that the response cache answered.
    """

    name: str
    inferences: Count
    executions: Count
    failures: Count
    queue_ms: float | None
    compute_input_ms: float | None
    compute_ms: float | None
    compute_output_ms: float | None
    request_ms: float | None
    batch_sizes: dict[str, Count]
    cache_hits: Count


class GpuUse(FileModel):
    """One GPU; what the server does not tell is None."""

    utilization: float | None
    memory_bytes: float | None
    power_w: float | None


class ServerSecond(FileModel):
    """The server's Prometheus metrics over one second, summed over the models that take part.

    Attributes:
        second: as in `Second`.
        requests: that succeeded.
        failures: that failed.
        mean_batch: inferences / executions; None where nothing ran.
        queue_ms, compute_ms: mean per request; None where nothing was answered.
        pending: requests that wait in the queue at its end; None where the server does not say.
        cpu: utilisation of the server machine, 0 to 1; None where it is not measured.
        gpus: by the GPU's id.
    """

    second: int
    requests: Count
    failures: Count
    mean_batch: float | None
    queue_ms: float | None
    compute_ms: float | None
    pending: float | None
    cpu: float | None
    gpus: dict[str, GpuUse]


class Tokens(FileModel):
    """What a text front counted over a measurement.

    Attributes:
        real: tokens of the texts.
        padded: tokens that the models computed, padding included.
    """

    real: Count
    padded: Count

    @property
    def padding_share(self) -> float | None:
        """Share of padding among all tokens computed."""
        return 1 - self.real / self.padded if self.padded else None


class ServerSide(FileModel):
    """What the server says of a measurement.

    Attributes:
        models: see `ModelWork`, the model under test first; empty where the server has no statistics.
        seconds: from the metrics port; empty where it could not be read.
        tokens: None without a text front.
        missing: why something is not there, for people; empty where all is.
    """

    models: tuple[ModelWork, ...]
    seconds: tuple[ServerSecond, ...]
    tokens: Tokens | None
    missing: str
