"""Small models for a real Triton server, each with one behaviour that a load test must see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trtforge.loadtest.address import Address, parse_address
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

# y = 2 x, wrong for every fourth request of `faulty`; the slow ones take a tenth of a second for each batch. `picky`
# takes eight elements at most; `flaky` fails the first of each three requests, with other words each time.
_MODEL = """
import json
import time
import uuid

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        self.count = 0

    def execute(self, requests):
        if self.name in ("slow", "crowded"):
            time.sleep(0.1)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb.get_input_tensor_by_name(request, "x").as_numpy()
        self.count += 1
        if self.name == "picky" and x.size > 8:
            return pb.InferenceResponse(error=pb.TritonError("too many elements"))
        if self.name == "flaky" and self.count % 3 == 1:
            return pb.InferenceResponse(error=pb.TritonError(f"no {uuid.uuid4()}"))
        y = x * (3 if self.name == "faulty" and self.count % 4 == 0 else 2)
        return pb.InferenceResponse([pb.Tensor("y", y)])
"""
_STREAM = """
import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for token in range(int(pb.get_input_tensor_by_name(request, "count").as_numpy()[0])):
                time.sleep(0.01)
                sender.send(pb.InferenceResponse([pb.Tensor("token", np.array([token], np.int32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_WORDS = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb.get_input_tensor_by_name(request, "text").as_numpy()
            counts = np.array([[len(text.split()) for text in row] for row in texts], np.int32)
            answers.append(pb.InferenceResponse([pb.Tensor("words", counts)]))
        return answers
"""
_ARRAYS = """
input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [-1] }]
"""
_MODELS = {
    "double": (_MODEL, f"max_batch_size: 8 {_ARRAYS} dynamic_batching {{ }}"),
    "faulty": (_MODEL, f"max_batch_size: 8 {_ARRAYS}"),
    "flaky": (_MODEL, f"max_batch_size: 8 {_ARRAYS}"),
    "picky": (_MODEL, f"max_batch_size: 8 {_ARRAYS}"),
    "slow": (_MODEL, f"max_batch_size: 1 {_ARRAYS}"),
    "crowded": (
        _MODEL,
        f"max_batch_size: 1 {_ARRAYS} dynamic_batching {{ default_queue_policy {{ max_queue_size: 1 }} }}",
    ),
    "stream": (
        _STREAM,
        """max_batch_size: 0 model_transaction_policy { decoupled: true }
        input [{ name: "count" data_type: TYPE_INT32 dims: [1] }]
        output [{ name: "token" data_type: TYPE_INT32 dims: [1] }]""",
    ),
    "words": (
        _WORDS,
        """max_batch_size: 8
        input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
        output [{ name: "words" data_type: TYPE_INT32 dims: [1] }]""",
    ),
}


@contextlib.contextmanager
def serve(install: TritonInstall, folder: Path, *names: str) -> Iterator[TritonServer]:
    """A real server with some of the models, by default all."""
    for name in names or _MODELS:
        code, config = _MODELS[name]
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        instances = "instance_group [{ kind: KIND_CPU count: 1 }]"
        (version.parent / "config.pbtxt").write_text(f'name: "{name}" backend: "python" {instances} {config}')
    with TritonServer(install, folder / "models", log=folder / "triton.log") as server:
        server.wait_ready()
        yield server


def address_of(server: TritonServer, protocol: str = "http") -> Address:
    """Where a load test finds it."""
    return parse_address(f"{protocol}://{server.grpc if protocol == 'grpc' else server.http}", None, server.metrics)
