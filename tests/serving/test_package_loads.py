"""Packages of every kind of batch load in the real server, warm up, and answer as ONNX Runtime does.

TensorRT-RTX builds the artifacts; ONNX Runtime serves their graphs.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from packaging_cases import ABSENT, DYNAMIC, FIXED, PROFILES, QUANTIZED, SCALAR, SHAPES, build_case

from trtforge.packaging import PackageResult, PackageSpec, package
from trtforge.reference import ReferenceModel
from trtforge.serving.model_file import ModelFile, load_model_file
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.request_values import POINTS, profile_point, request_values
from trtforge.serving.triton.client import RequestError, TritonClient
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

CASES = {
    "dynamic": DYNAMIC,
    "fixed": FIXED,
    "absent": ABSENT,
    "profiles": PROFILES,
    "shapes": SHAPES,
    "scalar": SCALAR,
    "quantized": QUANTIZED,
}
BATCHES = {"dynamic": 8, "fixed": 0, "absent": 0, "profiles": 4, "shapes": 0, "scalar": 0, "quantized": 8}
# Both run one ONNX Runtime graph on one CPU; sums of at most 32 terms differ by their order alone.
ULPS = 32 * np.finfo(np.float32).eps


@dataclasses.dataclass(frozen=True)
class Served:
    """The repository, and the server that loaded it."""

    repository: Path
    result: PackageResult
    server: TritonServer
    client: TritonClient

    def model(self, name: str) -> ModelFile:
        return load_model_file(self.repository / name / "1/model.json")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, triton_install: TritonInstall) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("loads")
    artifacts = tuple(build_case(folder, case, name).directory for name, case in CASES.items())
    # A delay in which the requests of a test meet, however busy the machine is.
    options = ServingOptions(queue_delay_us=2_000_000, threads=1)
    result = package(PackageSpec(artifacts=artifacts, repository=folder / "models", cpu=True, options=options))
    with TritonServer(triton_install, folder / "models", log=folder / "triton.log") as server:
        server.wait_ready()
        with TritonClient(server.http) as client:
            yield Served(folder / "models", result, server, client)


def test_every_package_loads(served: Served) -> None:
    assert {model.entry.name: model.entry.max_batch_size for model in served.result.models} == BATCHES
    assert {state.name: state.state for state in served.client.models()} == dict.fromkeys(CASES, "READY")
    assert [name for name in CASES if served.model(name).as_written] == ["quantized"]


@pytest.mark.parametrize("name", CASES)
def test_the_server_keeps_names_and_order(served: Served, name: str) -> None:
    model, metadata = served.model(name), served.client.metadata(name)
    for key, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        assert [port["name"] for port in metadata[key]] == [port.name for port in ports]
    sizes = {port["name"]: [int(size) for size in port["shape"]] for port in metadata["inputs"]}
    assert sizes == {port.name: list(port.shape or (1,)) for port in model.inputs}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_onnx_runtime(served: Served, name: str) -> None:
    model = served.model(name)
    with ReferenceModel(served.repository / name / "1/model.onnx", as_written=model.as_written) as reference:
        for profile in model.profiles:
            for point in POINTS:
                feeds = request_values(model, *profile_point(profile, point))
                if model.max_batch_size:
                    feeds = {key: feed[: model.max_batch_size] for key, feed in feeds.items()}
                # A scalar is one element for the server.
                answer = served.client.infer(name, {key: np.atleast_1d(feed) for key, feed in feeds.items()})
                for key, expected in reference.run(feeds).items():
                    np.testing.assert_allclose(answer[key].reshape(expected.shape), expected, rtol=ULPS, atol=ULPS)


def test_requests_beyond_the_largest_batch_are_refused(served: Served) -> None:
    with pytest.raises(RequestError, match="refused"):
        served.client.infer("dynamic", {"x": np.zeros((9, 4), np.float32)})


def test_requests_are_joined_up_to_the_largest_batch(served: Served) -> None:
    values = np.random.default_rng(1).standard_normal((16, 1, 4), np.float32)

    def ask(value: np.ndarray) -> np.ndarray:
        with TritonClient(served.server.http) as client:
            return client.infer("dynamic", {"x": value}, outputs=["y"])["y"]

    with ThreadPoolExecutor(16) as pool:
        answers = np.concatenate(list(pool.map(ask, values)))
    with ReferenceModel(served.repository / "dynamic/1/model.onnx") as reference:
        expected = reference.run({"x": values.reshape(16, 4)}, ["y"])["y"]
    np.testing.assert_allclose(answers, expected, rtol=ULPS, atol=ULPS)
    sizes = {int(entry["batch_size"]) for entry in served.client.statistics("dynamic")["batch_stats"]}
    assert max(sizes) > 1
    assert max(sizes) <= 8


# Prints what it is asked and answers as the model with several profiles would.
PRINTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        shapes = {tuple(tensor.shape()) for request in requests for tensor in request.inputs()}
        print("asked", len(requests), *sorted(shapes), flush=True)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, shape[1], 4), np.float32))])
            for shape in [tuple(request.inputs()[0].shape()) for request in requests]
        ]
"""


def test_the_server_warms_a_model_up_at_every_point_before_it_is_ready(
    served: Served, triton_install: TritonInstall, tmp_path: Path
) -> None:
    shutil.copytree(served.repository / "profiles", tmp_path / "models/profiles")
    (tmp_path / "models/profiles/1/model.py").write_text(PRINTING)
    with TritonServer(triton_install, tmp_path / "models", log=tmp_path / "triton.log") as server:
        server.wait_ready()
        log = (tmp_path / "triton.log").read_text()
    asked = [line for line in log.splitlines() if line.startswith("asked")]
    # Requests of one sample each, as many as the point's batch within the largest batch of 4.
    expected = [(1, 1), (4, 8), (4, 16), (1, 16), (2, 24), (4, 32)]
    assert asked == [f"asked {batch} (1, {length})" for batch, length in expected]
