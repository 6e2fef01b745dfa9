"""The traffic file of a load test (YAML): what is sent, how it arrives, and what is a right answer.

model: minilm
inputs:                                   # generated; what is left out comes from the server's metadata
  input_ids: {min: 1000, max: 29000}
  attention_mask: {min: 1, max: 1}
lengths:                                  # of every open dimension
  - {min: 8, max: 32, weight: 3}
  - {min: 33, max: 128, weight: 1}
batch: [1, 4]                             # each a step of its own; {1: 9, 4: 1} mixes them by weight
load: {users: [1, 4, 16], rates: [50]}    # closed loop; open loop
duration_s: 60
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from trtforge.errors import InputError
from trtforge.hashing import fingerprint
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import FileModel, parse_yaml, read_text, validate

Weight = Annotated[float, pydantic.Field(gt=0)]
Size = Annotated[int, pydantic.Field(gt=0)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=86_400)]
_MAX_LOADS = 64
# Pairs of length bucket and batch size within a step; the counts of each take 0.2 MB.
_MAX_CELLS = 256
_MAX_USERS = 10_000
# Requests per second: far above what one process sends.
_MAX_RATE = 20_000
Users = Annotated[int, pydantic.Field(gt=0, le=_MAX_USERS)]
Rate = Annotated[float, pydantic.Field(gt=0, le=_MAX_RATE)]
# Of the traffic, what may differ between runs whose requests are alike.
_NOT_REQUESTS = {"model", "version", "load", "duration_s", "warmup_s", "repeats", "protocol", "max_in_flight"}


class LengthBucket(FileModel):
    """Lengths from `min` to `max`, equally likely; the bucket's share of the requests is its weight."""

    min: Size
    max: Size
    weight: Weight = 1.0

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @property
    def name(self) -> str:
        """`8-32`; `8` for a single length."""
        return f"{self.min}-{self.max}" if self.min != self.max else str(self.min)


class InputValues(FileModel):
    """How the values of one input are made.

    Attributes:
        min, max: of equally likely values; by default [0, 1) for floats, 0 to 1 for integers, either for bool.
        file: for text inputs: one text a line. Without it, texts are made of common English words.
        shape: of one sample, where the metadata leaves more than one dimension open: sizes and "length"; "batch" may
            stand first, for models that have the batch as a dimension of their own.
    """

    min: float | None = None
    max: float | None = None
    file: str | None = None
    shape: tuple[Size | Literal["length", "batch"], ...] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        if self.file is not None and (self.min is not None or self.max is not None):
            raise ValueError("a text file has no min and max")
        return self


class SampleFile(FileModel):
    """Real samples: an `.npz` with one array for each input, first axis = samples, of which requests take rows.

    Attributes:
        file: the file.
        weight: share of the requests.
        expect: an `.npz` with the right answers, row by row.
    """

    file: str
    weight: Weight = 1.0
    expect: str | None = None

    @property
    def name(self) -> str:
        """Its bucket's name: the file's, without folder and ending."""
        return Path(self.file).stem


DEFAULT_TOLERANCE = 0.01


class Expectation(FileModel):
    """What is a right answer.

    Attributes:
        model: an ONNX file that ONNX Runtime runs on every request beforehand.
        file: an `.npz` with the answers to the lines of the one text file, row by row.
        tolerance: of float outputs: norm of the difference over the norm of the expected output, per sample. Others
            must be equal; text is not compared.
    """

    model: str | None = None
    file: str | None = None
    tolerance: Annotated[float, pydantic.Field(gt=0, lt=1)] = DEFAULT_TOLERANCE

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.model is not None and self.file is not None:
            raise ValueError("model and file cannot be given together")
        return self


class Ramp(FileModel):
    """A load that grows or falls evenly over the duration."""

    start: Rate
    end: Rate


class Loads(FileModel):
    """The loads, each a step of its own.

    Attributes:
        users: closed loop: that many users, each with one request on its way at most; or a ramp.
        rates: open loop: Poisson arrivals, requests per second; or a ramp.
    """

    users: tuple[Users | Ramp, ...] = ()
    rates: tuple[Rate | Ramp, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= len(self.users) + len(self.rates) <= _MAX_LOADS:
            raise ValueError(f"it takes 1 to {_MAX_LOADS} loads, in users, rates or both")
        for loads in (self.users, self.rates):
            spans = [(load.start, load.end) if isinstance(load, Ramp) else (load, load) for load in loads]
            if len(set(spans)) != len(spans):
                raise ValueError("a load stands there twice: `repeats` measures a step several times")
        ends = [end for load in self.users if isinstance(load, Ramp) for end in (load.start, load.end)]
        if any(end != int(end) or end > _MAX_USERS for end in ends):
            raise ValueError(f"a ramp of users starts and ends at a whole number up to {_MAX_USERS}")
        return self


class ThinkTime(FileModel):
    """Seconds between an answer and the user's next request, equally likely from `min` to `max`."""

    min: Seconds
    max: Seconds

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Traffic(FileModel):
    """See the module's docstring.

    Attributes:
        model: its name on the server.
        version: of the model; by default the server chooses.
        protocol: "http" or "grpc".
        inputs: how values are made, by input.
        samples: real samples in the place of made ones.
        outputs: those to ask for; all by default.
        lengths: the length distribution; for text inputs a length counts words.
        batch: samples in a request: a number; a list, each a step of its own; or weights by size, mixed in each step.
        load: see `Loads`.
        think_s: think time of closed-loop users: seconds, or a range.
        duration_s: of each measurement.
        warmup_s: at the step's load before it, not counted.
        repeats: measurements of each step.
        timeout_s: after which a request has failed.
        max_in_flight: open loop: requests on their way at most; more wait, and their wait counts.
        distinct: different requests that are prepared and sent again and again.
        seed: decides the requests, their order, the arrivals and the think times.
        expect: what is a right answer; by default every answer without an error is.
    """

    model: Annotated[str, pydantic.Field(min_length=1)]
    version: str = ""
    protocol: Literal["http", "grpc"] = "http"
    inputs: dict[str, InputValues] = pydantic.Field(default_factory=dict)
    samples: tuple[SampleFile, ...] = ()
    outputs: tuple[str, ...] = ()
    lengths: tuple[LengthBucket, ...] = ()
    batch: Size | tuple[Size, ...] | dict[Size, Weight] = 1
    load: Loads = Loads(users=(1,))
    think_s: Seconds | ThinkTime = 0.0
    duration_s: Annotated[float, pydantic.Field(ge=1, le=86_400)] = 60.0
    warmup_s: Annotated[float, pydantic.Field(ge=0, le=3600)] = 5.0
    repeats: Annotated[int, pydantic.Field(ge=1, le=100)] = 1
    timeout_s: Annotated[float, pydantic.Field(gt=0, le=3600)] = 10.0
    max_in_flight: Annotated[int, pydantic.Field(ge=1, le=10_000)] = 256
    distinct: Annotated[int, pydantic.Field(ge=1, le=100_000)] = 256
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    expect: Expectation | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples and (self.inputs or self.lengths):
            raise ValueError("samples cannot be given together with inputs or lengths: real samples have their own")
        names = [bucket.name for bucket in self.lengths] or [sample.name for sample in self.samples]
        if len(set(names)) != len(names):
            raise ValueError(f"two length buckets or sample files have one name: {', '.join(names)}")
        if isinstance(self.batch, tuple | dict) and not self.batch:
            raise ValueError("batch holds no size")
        if len(self.batch_steps) > _MAX_LOADS:
            raise ValueError(f"batch lists {len(self.batch_steps)} sizes; it takes {_MAX_LOADS}")
        num_cells = max(1, len(names)) * max(1, len(self.batch_weights))
        if num_cells > _MAX_CELLS:
            raise ValueError(f"{num_cells} pairs of length bucket and batch size; it takes {_MAX_CELLS}")
        if len(set(self.batch_steps)) != len(self.batch_steps):
            raise ValueError("a batch size stands there twice: `repeats` measures a step several times")
        return self

    @property
    def batch_steps(self) -> tuple[int | None, ...]:
        """The batch size of each step; None for a mix."""
        if isinstance(self.batch, dict):
            return (None,)
        return self.batch if isinstance(self.batch, tuple) else (self.batch,)

    @property
    def batch_weights(self) -> dict[int, float]:
        """The weights of a mix; empty without one."""
        return dict(self.batch) if isinstance(self.batch, dict) else {}

    def files(self) -> Iterator[str]:
        """The files it names, as it names them."""
        yield from (values.file for values in self.inputs.values() if values.file is not None)
        for sample in self.samples:
            yield sample.file
            if sample.expect is not None:
                yield sample.expect
        if self.expect is not None:
            yield from (name for name in (self.expect.model, self.expect.file) if name is not None)

    def request_fingerprint(self, files: dict[str, str]) -> str:
        """Equal for traffic that sends the same requests, at whatever load and for how long.

        Args:
            files: SHA-256 by the name in the traffic.
        """
        content: Any = self.model_dump(mode="json", exclude=_NOT_REQUESTS)
        return fingerprint([content, files])


def load_traffic(path: Path, changes: dict[str, Any] | None = None, limits: Limits = DEFAULT_LIMITS) -> Traffic:
    """Read a traffic file.

    Args:
        path: the file.
        changes: values of the command line, which take the place of the file's.
        limits: bounds on the file.

    Raises:
        InputError: missing, not YAML, unknown keys, values that cannot be used.
    """
    source = f"traffic {path}"
    value = parse_yaml(read_text(path, "traffic", limits), source, limits)
    if not isinstance(value, dict):
        raise InputError(f"{source} does not hold a mapping", f"found {type(value).__name__}", "write `model: NAME`")
    return validate(Traffic, {**value, **(changes or {})}, source)
