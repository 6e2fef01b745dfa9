"""Send requests over HTTP, gRPC or a gRPC stream, in the process that Locust runs in. Bodies are made beforehand.

HTTP is KServe v2 with its binary data extension. A request over a stream opens a stream of its own, sends one message
and closes its side; the answer is full when the server has closed the other side.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import gevent
import numpy as np

from trtforge.loadtest.request import Request, numpy_dtype
from trtforge.loadtest.results import ErrorKind

Wire = Any
# Bytes of one gRPC message; its own default is 4 MiB.
_MESSAGE_BYTES = 2**31 - 1
_HEAD_LENGTH = "Inference-Header-Content-Length"
_SERVICE = "/inference.GRPCInferenceService/"
# How Triton's own refusals begin; with the same status code, gRPC reports that there is no connection.
_ANSWER = "[request id: "
_NUMBER = re.compile(r"\d+(\.\d+)?")


class SendError(Exception):
    """A request without an answer.

    Args:
        kind: as in `ErrorCount`.
        example: what happened, in the words of whoever said it.
    """

    def __init__(self, kind: ErrorKind, example: str) -> None:
        super().__init__(example)
        self.kind = kind
        self.example = " ".join(example.split())[:500]

    @property
    def text(self) -> str:
        """The same for failures of one class: numbers are left out of the words."""
        return _NUMBER.sub("#", self.example)[:200]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        body: its message; the last one of a stream.
        num_bytes: of all messages.
        moments: when each streamed message arrived, seconds of time.monotonic(); empty without a stream.
    """

    body: Wire
    num_bytes: int
    moments: tuple[float, ...] = ()


class Sender(Protocol):
    """Sends requests to one model; may be used by any number of greenlets."""

    def prepare(self, request: Request) -> Wire:
        """A request's message."""

    def send(self, wire: Wire) -> Reply:
        """Send it and wait for the full answer; raises SendError."""

    def outputs(self, reply: Reply, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Outputs of an answer; those that it lacks are left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: host and port, and for HTTP the path before /v2.
        model, version: its name; an empty version is the server's choice.
        outputs: to ask for.
        timeout_s: after which a request has failed.
        is_streamed: the model may answer several times.
    """

    url: str
    model: str
    version: str
    outputs: tuple[str, ...]
    timeout_s: float
    is_streamed: bool


def open_sender(protocol: str, endpoint: Endpoint) -> Sender:
    """The sender for a protocol, "http" or "grpc"."""
    if protocol == "http":
        return HttpSender(endpoint)
    return StreamSender(endpoint) if endpoint.is_streamed else GrpcSender(endpoint)


class HttpSender:
    """One connection for each request on its way; the one used last is taken first."""

    def __init__(self, endpoint: Endpoint) -> None:
        url = urlsplit(f"http://{endpoint.url}")
        self._address = url.hostname, url.port or 80
        self._endpoint = endpoint
        version = f"/versions/{endpoint.version}" if endpoint.version else ""
        self._path = f"{url.path.rstrip('/')}/v2/models/{quote(endpoint.model, safe='')}{version}/infer"
        self._idle: list[Any] = []

    def prepare(self, request: Request) -> Wire:
        """Body and headers: JSON, then the data of each input."""
        inputs = [
            {
                "name": one.name,
                "datatype": one.datatype,
                "shape": one.shape,
                "parameters": {"binary_data_size": len(one.data)},
            }
            for one in request.inputs
        ]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in self._endpoint.outputs]
        head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        headers = {"Content-Type": "application/octet-stream", _HEAD_LENGTH: str(len(head))}
        return head + b"".join(one.data for one in request.inputs), headers

    def send(self, wire: Wire) -> Reply:
        """See `Sender`."""
        body, headers = wire
        client = self._idle.pop() if self._idle else self._connect()
        try:
            with gevent.Timeout(self._endpoint.timeout_s):
                response = client.post(self._path, body, headers=headers)
                content = bytes(response.read())
        except gevent.Timeout:
            client.close()
            raise SendError("timeout", f"no answer within {self._endpoint.timeout_s:g} s") from None
        except Exception as err:
            # geventhttpclient raises OSError and kinds of its own for a connection that ends within an answer.
            client.close()
            raise SendError("unreachable", getattr(err, "strerror", None) or str(err)) from err
        self._idle.append(client)
        if response.status_code != 200:
            raise SendError("server", f"HTTP {response.status_code}: {_error_of(content)}")
        return Reply((content, response.get(_HEAD_LENGTH)), len(content))

    def outputs(self, reply: Reply, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """See `Sender`."""
        content, head_length = reply.body
        place = int(head_length)
        found = {}
        for output in json.loads(content[:place])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            if output["name"] in names:
                found[output["name"]] = _array(output["datatype"], output["shape"], content[place : place + size])
            place += size
        return found

    def _connect(self) -> Any:
        from geventhttpclient import HTTPClient

        limit = self._endpoint.timeout_s
        return HTTPClient(*self._address, concurrency=1, connection_timeout=limit, network_timeout=limit)


class GrpcSender:
    """All requests share one channel, as they do in an application."""

    _method = "ModelInfer"

    def __init__(self, endpoint: Endpoint) -> None:
        import grpc
        from tritonclient.grpc import service_pb2

        self._grpc = grpc
        self._messages = service_pb2
        self._endpoint = endpoint
        # A proxy for the web, which gRPC would take for this machine too, does not reach a server of the own network.
        options = [("grpc.enable_http_proxy", 0)]
        options += [(f"grpc.max_{way}_message_length", _MESSAGE_BYTES) for way in ("send", "receive")]
        self._channel = grpc.insecure_channel(endpoint.url, options=options)
        # Without serializers messages go and come as bytes, and are read only where an answer is looked at.
        self._call = self._open(self._channel)

    def prepare(self, request: Request) -> Wire:
        """The message's bytes."""
        message = self._messages.ModelInferRequest(
            model_name=self._endpoint.model, model_version=self._endpoint.version
        )
        for tensor in request.inputs:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
        for name in self._endpoint.outputs:
            message.outputs.add(name=name)
        return message.SerializeToString()

    def send(self, wire: Wire) -> Reply:
        """See `Sender`."""
        try:
            body = self._call(wire, timeout=self._endpoint.timeout_s)
        except self._grpc.RpcError as err:
            raise self._failure(err) from err
        return Reply(body, len(body))

    def outputs(self, reply: Reply, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """See `Sender`."""
        return _outputs_of(self._messages.ModelInferResponse.FromString(reply.body), names)

    def _open(self, channel: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = channel.unary_unary(f"{_SERVICE}ModelInfer")
        return call

    def _failure(self, error: Any) -> SendError:
        code = error.code()
        if code is self._grpc.StatusCode.DEADLINE_EXCEEDED:
            return SendError("timeout", f"no answer within {self._endpoint.timeout_s:g} s")
        words = str(error.details())
        if code is self._grpc.StatusCode.UNAVAILABLE and not words.startswith(_ANSWER):
            return SendError("unreachable", words)
        return SendError("server", f"{code.name}: {words}")


class StreamSender(GrpcSender):
    """One stream for each request."""

    def send(self, wire: Wire) -> Reply:
        """See `Sender`."""
        moments: list[float] = []
        num_bytes = 0
        last = b""
        try:
            for last in self._call(iter([wire]), timeout=self._endpoint.timeout_s):
                moments.append(time.monotonic())
                num_bytes += len(last)
        except self._grpc.RpcError as err:
            raise self._failure(err) from err
        message = self._messages.ModelStreamInferResponse.FromString(last)
        if message.error_message:
            raise SendError("server", message.error_message)
        if not moments:
            raise SendError("server", "the stream ended without an answer")
        return Reply(message, num_bytes, tuple(moments))

    def outputs(self, reply: Reply, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Of the last message."""
        return _outputs_of(reply.body.infer_response, names)

    def _open(self, channel: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = channel.stream_stream(f"{_SERVICE}ModelStreamInfer")
        return call


def _outputs_of(message: Any, names: Sequence[str]) -> Mapping[str, np.ndarray]:
    pairs = zip(message.outputs, message.raw_output_contents, strict=True)
    return {one.name: _array(one.datatype, one.shape, data) for one, data in pairs if one.name in names}


def _array(datatype: str, shape: Sequence[int], data: bytes) -> np.ndarray:
    return np.frombuffer(data, numpy_dtype(datatype)).reshape(tuple(shape))


def _error_of(content: bytes) -> str:
    """The words of an error answer: {"error": "..."} from Triton."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
