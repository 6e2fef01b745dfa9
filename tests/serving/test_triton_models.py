"""The client and the models of the Python backend, on the real server: types, batches, ranges and refusals.

The artifacts are made up around their graphs, which ONNX Runtime serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import pytest
from packaging_cases import Case, make_artifact, one_profile, span, weights

from trtforge.errors import InputError
from trtforge.packaging import PackageSpec, package
from trtforge.reference import ReferenceModel
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.triton.client import RequestError, TritonClient
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import LOOPBACK, TritonServer

PROTOCOLS: tuple[Literal["http", "grpc"], ...] = ("http", "grpc")
TYPES = {
    "bool": "bool",
    "uint8": "uint8",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "float16": "float16",
    "float": "float32",
    "double": "float64",
}
# Every type that ONNX Runtime and the protocol share, handed through.
ALL_TYPES = Case(
    "types ("
    + ", ".join(f"{onnx}[batch,2] {onnx}_in" for onnx in TYPES)
    + ") => ("
    + ", ".join(f"{onnx}[batch,2] {onnx}_out" for onnx in TYPES)
    + ") {"
    + " ".join(f"{onnx}_out = Identity({onnx}_in)" for onnx in TYPES)
    + "}"
)
BFLOAT16 = Case(
    """bf (bfloat16[batch,3] x) => (bfloat16[batch,3] y, float[batch,3] z) {
        f = Cast<to = 1>(x)  z = Mul(f, f)  y = Cast<to = 16>(z)
    }"""
)
# ids choose among 10 rows; what lies beyond is the model's own error.
LOOK_UP = Case(
    "look (int64[batch,seq] ids) => (float[batch,seq,4] rows, int64[batch,seq] same) { "
    "rows = Gather(table, ids)  same = Identity(ids) }",
    {"table": weights(10, 4)},
)
# With its optimisation on, ONNX Runtime sums the products as integers.
QUANTIZED = Case(
    """quantized (float[batch,64] x) => (float[batch,16] y) {
        q = QuantizeLinear(x, s, zero)  d = DequantizeLinear(q, s, zero)
        dw = DequantizeLinear(w, sw, zero)  y = MatMul(d, dw)
    }""",
    {
        "s": np.float32(0.0123),
        "sw": np.float32(0.0321),
        "zero": np.int8(0),
        "w": np.random.default_rng(2).integers(-127, 128, (64, 16), np.int8),
    },
)
SLOW = """import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
SLOW_CONFIG = """name: "slow" backend: "python" instance_group [{kind: KIND_CPU}]
input [{name: "x" data_type: TYPE_FP32 dims: [-1]}] output [{name: "y" data_type: TYPE_FP32 dims: [-1]}]"""


@dataclasses.dataclass(frozen=True)
class Served:
    repository: Path
    server: TritonServer

    def client(self, protocol: Literal["http", "grpc"] = "http", timeout_s: float = 60.0) -> TritonClient:
        return TritonClient(getattr(self.server, protocol), protocol, timeout_s)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, triton_install: TritonInstall) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    rows = span((1, 2), (4, 2), (8, 2))
    cases = {
        "types": (ALL_TYPES, one_profile(**{f"{onnx}_in": rows for onnx in TYPES})),
        "bf": (BFLOAT16, one_profile(x=span((1, 3), (4, 3), (8, 3)))),
        "look": (LOOK_UP, one_profile(ids=span((1, 2), (4, 4), (8, 8)))),
        "patient": (LOOK_UP, one_profile(ids=span((1, 2), (4, 4), (8, 8)))),
        "quantized": (QUANTIZED, one_profile(x=span((1, 64), (4, 64), (8, 64)))),
    }
    for name, (case, profile) in cases.items():
        make_artifact(folder / name, case, profiles=(profile,))
        # A delay in which the requests of a test meet, however busy the machine is.
        options = ServingOptions(queue_delay_us=2_000_000 if name == "patient" else 100, threads=1)
        spec = PackageSpec(
            artifacts=(folder / name,), repository=folder / "models", name=name, cpu=True, options=options
        )
        package(spec)
    (folder / "models/slow/1").mkdir(parents=True)
    (folder / "models/slow/1/model.py").write_text(SLOW)
    (folder / "models/slow/config.pbtxt").write_text(SLOW_CONFIG)
    with TritonServer(triton_install, folder / "models", log=folder / "triton.log") as server:
        server.wait_ready()
        yield Served(folder / "models", server)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_type_arrives_as_it_was_sent(served: Served, protocol: Literal["http", "grpc"]) -> None:
    random = np.random.default_rng(3)
    feeds = {f"{onnx}_in": random.integers(0, 2, (3, 2)).astype(dtype) for onnx, dtype in TYPES.items()}
    with served.client(protocol) as client:
        answer = client.infer("types", feeds)
    assert list(answer) == [f"{onnx}_out" for onnx in TYPES]
    for onnx, dtype in TYPES.items():
        assert answer[f"{onnx}_out"].dtype == dtype
        np.testing.assert_array_equal(answer[f"{onnx}_out"], feeds[f"{onnx}_in"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bfloat16_passes_through_the_python_backend(served: Served, protocol: Literal["http", "grpc"]) -> None:
    x = np.array([[1.5, -2, 3], [0.25, 0, 7]], ml_dtypes.bfloat16)
    with served.client(protocol) as client:
        answer = client.infer("bf", {"x": x})
    assert answer["y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(answer["y"], x * x)
    np.testing.assert_array_equal(answer["z"], x.astype(np.float32) ** 2)


def test_the_protocols_say_the_same(served: Served) -> None:
    with served.client("http") as http, served.client("grpc") as grpc:
        assert {model.name: model.state for model in http.models()} == {m.name: m.state for m in grpc.models()}
        assert http.metadata("look") == grpc.metadata("look")
        http_config, grpc_config = http.config("look"), grpc.config("look")
        assert http_config["max_batch_size"] == grpc_config["max_batch_size"] == 8
        assert http_config["input"][0]["dims"] == [-1]
        assert int(grpc_config["input"][0]["dims"][0]) == -1
        client_side = http.statistics("look"), grpc.statistics("look")
    counts = [statistics["inference_stats"]["success"]["count"] for statistics in client_side]
    assert counts[0] == counts[1] >= 0


def test_only_the_outputs_that_are_wanted_come(served: Served) -> None:
    ids = np.zeros((1, 3), np.int64)
    with served.client() as client:
        assert list(client.infer("look", {"ids": ids}, outputs=["same"])) == ["same"]


def test_a_graph_with_qdq_is_computed_as_written(served: Served) -> None:
    x = np.random.default_rng(5).normal(size=(8, 64)).astype(np.float32)
    with (
        served.client() as client,
        ReferenceModel(served.repository / "quantized/1/model.onnx", as_written=True) as reference,
    ):
        np.testing.assert_array_equal(client.infer("quantized", {"x": x})["y"], reference.run({"x": x})["y"])


@pytest.mark.parametrize(("shape", "reason"), [((2, 1), "[2, 1]"), ((2, 9), "[2, 9]"), ((9, 4), "batch-size")])
def test_what_lies_outside_the_profile_is_refused(served: Served, shape: tuple[int, ...], reason: str) -> None:
    with served.client() as client, pytest.raises(RequestError) as caught:
        client.infer("look", {"ids": np.zeros(shape, np.int64)})
    assert caught.value.kind == "refused"
    assert reason in caught.value.why


@pytest.mark.parametrize("bad", [None, 5])
def test_a_bad_request_fails_alone(served: Served, bad: int | None) -> None:
    """Its neighbours of the same batch are answered, each with its own rows."""
    contents = [np.array([[index % 10, 7, index // 10]]) for index in range(16)]
    if bad is not None:
        contents[bad] = np.array([[0, 99, 0]])

    def ask(ids: np.ndarray) -> dict[str, np.ndarray] | RequestError:
        try:
            return client.infer("patient", {"ids": ids})
        except RequestError as err:
            return err

    with served.client("grpc") as client, ThreadPoolExecutor(16) as pool:
        before = joined(client, "patient")
        answers = list(pool.map(ask, contents))
        assert joined(client, "patient") > before
    for index, (ids, answer) in enumerate(zip(contents, answers, strict=True)):
        if index == bad:
            assert isinstance(answer, RequestError)
            assert "indices element out of data bounds" in answer.why
        else:
            assert isinstance(answer, dict), answer
            np.testing.assert_array_equal(answer["same"], ids)
            np.testing.assert_array_equal(answer["rows"], LOOK_UP.weights["table"][ids])


def joined(client: TritonClient, model: str) -> int:
    """Runs of more than one sample so far."""
    statistics = client.statistics(model)["batch_stats"]
    return sum(int(entry["compute_infer"]["count"]) for entry in statistics if int(entry["batch_size"]) > 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_answer_is_a_timeout(served: Served, protocol: Literal["http", "grpc"]) -> None:
    with served.client(protocol, timeout_s=0.3) as client, pytest.raises(RequestError) as caught:
        client.infer("slow", {"x": np.ones(2, np.float32)})
    assert caught.value.kind == "timeout"
    assert "0.3 s" in caught.value.why


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_is_not_there_is_unreachable(protocol: Literal["http", "grpc"]) -> None:
    # Port 1 is tcpmux, which nobody serves.
    with TritonClient(f"{LOOPBACK}:1", protocol, timeout_s=10) as client, pytest.raises(RequestError) as caught:
        client.models()
    assert caught.value.kind == "unreachable"
    assert f"its {protocol} port" in caught.value.fix


def test_a_model_that_is_not_there_is_refused(served: Served) -> None:
    with served.client() as client, pytest.raises(RequestError, match="nothing") as caught:
        client.infer("nothing", {"x": np.ones(2, np.float32)})
    assert caught.value.kind == "refused"


def test_a_type_that_the_protocol_lacks_is_refused(served: Served) -> None:
    with served.client() as client, pytest.raises(InputError, match="complex64"):
        client.infer("look", {"ids": np.ones((1, 2), np.complex64)})
