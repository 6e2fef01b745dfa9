"""A client of the KServe v2 protocol, over HTTP or gRPC: what models there are, their statistics, and their answers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from trtforge.errors import InputError, TrtForgeError, missing_extra

Protocol = Literal["http", "grpc"]
Failure = Literal["unreachable", "timeout", "refused"]
# Bytes of one gRPC message; its own default is 4 MiB.
_MAX_MESSAGE_BYTES = 2**31 - 1
# Modules whose exceptions, or their bases, are about a connection.
_CONNECTION_MODULES = ("geventhttpclient", "gevent", "http")
# What Triton puts before its words about a request without a name.
_NO_REQUEST_ID = "[request id: <id_unknown>] "


class RequestError(TrtForgeError):
    """A server did not answer a request, or refused it.

    Args:
        kind: "unreachable" without a connection or when it broke, "timeout", or "refused" with the server's words.
    """

    def __init__(self, kind: Failure, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True)
class ModelState:
    """A model in a server's repository.

    Attributes:
        state: e.g. "READY"; empty where the server never loaded it.
        reason: why it is not ready.
    """

    name: str
    version: str
    state: str
    reason: str


class TritonClient:
    """A connection to a server; use it as a context manager.

    Over HTTP it belongs to the thread that made it. Over gRPC threads may share it.

    Args:
        url: host and port, e.g. `127.0.0.1:8000`.
        protocol: the port's.
        timeout_s: for one answer.

    Raises:
        UnavailableError: the extra `serving` is not installed.
    """

    def __init__(self, url: str, protocol: Protocol = "http", timeout_s: float = 60.0) -> None:
        self.url = url
        self._protocol = protocol
        self._timeout_s = timeout_s
        # Over HTTP the connection has the limit, over gRPC each call.
        self._limit = {"client_timeout": timeout_s} if protocol == "grpc" else {}
        try:
            self._api = importlib.import_module(f"tritonclient.{protocol}")
        except ModuleNotFoundError as err:
            raise missing_extra(err.name or "tritonclient", "serving") from err
        if protocol == "http":
            self._client = self._api.InferenceServerClient(url, connection_timeout=timeout_s, network_timeout=timeout_s)
        else:
            # Over HTTP no proxy is asked either: one for the web does not reach a server of the own network.
            options = [("grpc.enable_http_proxy", 0)]
            options += [(f"grpc.max_{way}_message_length", _MAX_MESSAGE_BYTES) for way in ("send", "receive")]
            self._client = self._api.InferenceServerClient(url, channel_args=options)

    def models(self) -> list[ModelState]:
        """Every model of the server's repository, by name and version."""
        index = self._ask("the list of models", self._client.get_model_repository_index)
        entries = index if isinstance(index, list) else index.get("models", [])
        keys = [field.name for field in dataclasses.fields(ModelState)]
        return [ModelState(**{key: str(entry.get(key, "")) for key in keys}) for entry in entries]

    def server(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        answer: dict[str, Any] = self._ask("the server's metadata", self._client.get_server_metadata)
        return answer

    def metadata(self, model: str) -> dict[str, Any]:
        """Inputs and outputs of a model: name, datatype and shape, -1 where dynamic, with the batch axis."""
        answer: dict[str, Any] = self._ask(f"the metadata of {model}", self._client.get_model_metadata, model)
        return answer

    def config(self, model: str) -> dict[str, Any]:
        """The configuration that a model runs with."""
        answer = self._ask(f"the configuration of {model}", self._client.get_model_config, model)
        config: dict[str, Any] = answer.get("config", answer)
        return config

    def statistics(self, model: str) -> dict[str, Any]:
        """What the server counted for a model's newest version, under the names of the KServe statistics extension.

        `batch_stats` has the number of executions by batch size, `inference_stats` the nanoseconds in queue, compute.
        """
        answer = self._ask(f"the statistics of {model}", self._client.get_inference_statistics, model)
        newest: dict[str, Any] = max(answer["model_stats"], key=lambda entry: int(entry["version"]))
        return newest

    def infer(
        self,
        model: str,
        feeds: Mapping[str, np.ndarray],
        outputs: Sequence[str] | None = None,
        *,
        version: str = "",
    ) -> dict[str, np.ndarray]:
        """Outputs by name.

        Args:
            model: its name.
            feeds: inputs by name, with the batch axis; text as arrays of str, bytes or object.
            outputs: names of those wanted; None means all.
            version: of the model; empty means the server's choice.

        Raises:
            RequestError: there was no answer, or the model or the server refused the request.
            InputError: a type that the protocol has not.
        """
        inputs = [self._input_from_array(name, array) for name, array in feeds.items()]
        wanted = None if outputs is None else [self._api.InferRequestedOutput(name) for name in outputs]
        with self._translated(f"a request to {model}"):
            result = self._client.infer(model, inputs, model_version=version, outputs=wanted, **self._limit)
        response = result.get_response()
        if self._protocol == "http":
            names = [str(output["name"]) for output in response.get("outputs", [])]
        else:
            names = [str(output.name) for output in response.outputs]
        return {name: result.as_numpy(name) for name in names}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _input_from_array(self, name: str, array: np.ndarray) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        array = array.astype(object) if array.dtype.kind in "US" else array
        datatype = np_to_triton_dtype(array.dtype)
        if datatype is None:
            raise InputError(
                f"input {name} has the type {array.dtype}", "KServe v2 has no such type", "convert it before sending"
            )
        return self._api.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)

    def _ask(self, what: str, method: Callable[..., Any], *arguments: str) -> Any:
        with self._translated(what):
            answer = method(*arguments, **self._limit)
        return answer if self._protocol == "http" else _dict_from_message(answer)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turn what the two libraries raise into a RequestError."""
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except InferenceServerException as err:
            words = " ".join(str(err.message()).replace(_NO_REQUEST_ID, "").split())
            status = str(err.status() or "")
            # Triton says UNAVAILABLE as well, of a queue that is full, and puts the request's name before it.
            if status == "StatusCode.UNAVAILABLE" and _NO_REQUEST_ID not in str(err.message()):
                raise self._unreachable(what, words) from err
            if status in ("StatusCode.DEADLINE_EXCEEDED", "499"):
                raise self._late(what) from err
            raise RequestError("refused", f"{self.url} refused {what}", words, "see the server's log") from err
        except TimeoutError as err:
            raise self._late(what) from err
        except OSError as err:
            raise self._unreachable(what, err.strerror or str(err)) from err
        except Exception as err:
            # geventhttpclient's and http.client's own kinds, for a connection that ends within an answer.
            if not any(kind.__module__.startswith(_CONNECTION_MODULES) for kind in type(err).__mro__):
                raise
            raise self._unreachable(what, str(err) or type(err).__name__) from err

    def _unreachable(self, what: str, words: str) -> RequestError:
        fix = "check that the server runs and that the address is that of its " + self._protocol + " port"
        return RequestError("unreachable", f"{self.url} did not answer {what}", words, fix)

    def _late(self, what: str) -> RequestError:
        why = f"it took longer than {self._timeout_s:g} s"
        return RequestError("timeout", f"{self.url} did not answer {what}", why, "give it more time, or less work")


def _dict_from_message(message: Any) -> dict[str, Any]:
    """A protobuf message as the JSON of the HTTP protocol has it: numbers as numbers, zeros too, enums by name."""
    fields = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _plain_value(field, getattr(message, field.name)) for field in fields}


def _plain_value(field: Any, value: Any) -> Any:
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        entry = field.message_type.fields_by_name["value"]
        return {str(key): _plain_item(entry, item) for key, item in value.items()}
    return [_plain_item(field, item) for item in value] if field.is_repeated else _plain_item(field, value)


def _plain_item(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _dict_from_message(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name
