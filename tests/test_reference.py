from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import save_onnx

from trtforge import reference
from trtforge.errors import InputError
from trtforge.reference import CPU, CUDA, ReferenceModel, choose_providers

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_outputs_have_the_models_names_and_values(mlp: Path) -> None:
    w = weights_of(mlp)
    with ReferenceModel(mlp) as model:
        assert model.outputs == ["scores"]
        for batch in (X, X[:1]):
            result = model.run({"x": batch})
            np.testing.assert_allclose(result["scores"], np.maximum(batch @ w["w1"], 0) @ w["w2"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("external", [False, True])
def test_taps_return_inner_tensors_once_and_leave_nothing_beside_the_model(tmp_path: Path, external: bool) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    w = np.arange(8, dtype=np.float32).reshape(4, 2)
    path = save_onnx(
        folder / "m.onnx",
        "g (float[b, 4] x) => (float[b, 2] y) { h = MatMul(x, w)  y = Relu(h) }",
        external=external,
        w=w,
    )
    before = sorted(file.name for file in folder.iterdir())
    folder.chmod(0o555)
    with ReferenceModel(path, taps=["h", "h", "y"]) as model:
        assert model.outputs == ["y", "h"]
        result = model.run({"x": X})
        assert sorted(file.name for file in folder.iterdir()) == before
    folder.chmod(0o755)
    np.testing.assert_allclose(result["h"], X @ w, rtol=1e-5)
    np.testing.assert_allclose(result["y"], np.maximum(X @ w, 0), rtol=1e-5)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_as_written_switches_graph_optimisation_off(tmp_path: Path) -> None:
    """Optimised, these nodes become one LayerNormalization, which rounds otherwise where the mean is large."""
    path = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, 64] x) => (float[b, 64] y) {
            m = ReduceMean(x, axes)
            c = Sub(x, m)
            q = Pow(c, two)
            v = ReduceMean(q, axes)
            e = Add(v, epsilon)
            s = Sqrt(e)
            n = Div(c, s)
            g = Mul(n, gamma)
            y = Add(g, beta)
        }""",
        axes=np.array([-1]),
        two=np.float32(2),
        epsilon=np.float32(1e-5),
        gamma=np.ones(64, np.float32),
        beta=np.zeros(64, np.float32),
    )
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32) + 1e4
    with ReferenceModel(path, as_written=True) as model:
        written = model.run({"x": x})["y"]
    with ReferenceModel(path) as model:
        optimised = model.run({"x": x})["y"]
    assert not np.array_equal(written, optimised)
    np.testing.assert_allclose(written, optimised, atol=0.01)


def test_a_model_that_onnx_runtime_cannot_load_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "m.onnx", "g (float[b] x) => (float[b] y) { y = NoSuchOp(x) }")
    with pytest.raises(InputError, match=r"ONNX Runtime cannot load m\.onnx") as caught:
        ReferenceModel(path)
    assert "NoSuchOp" in caught.value.why
    assert "\n" not in caught.value.why


def test_a_tap_that_the_model_does_not_have_is_refused(mlp: Path) -> None:
    with pytest.raises(InputError, match="cannot load") as caught:
        ReferenceModel(mlp, taps=["nothing"])
    assert "nothing" in caught.value.why


def test_a_run_on_a_wrong_shape_is_refused_and_the_model_lives_on(mlp: Path) -> None:
    with ReferenceModel(mlp) as model:
        with pytest.raises(InputError, match=r"cannot run the model on x \[3, 5\]") as caught:
            model.run({"x": np.zeros((3, 5), np.float32)})
        assert "Expected: 4" in caught.value.why
        with pytest.raises(InputError, match=r"cannot run the model on z \[3, 4\]"):
            model.run({"z": X})
        with pytest.raises(InputError, match=r"cannot run the model on x \[3, 4\]"):
            model.run({"x": X.astype(np.float64)})
        assert model.run({"x": X})["scores"].shape == (3, 3)


def test_a_failing_node_is_named(tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx", "g (float[b, c] x) => (float[p, q] y) { [stem] y = Reshape(x, s) }", s=np.array([2, 3])
    )
    with ReferenceModel(path) as model, pytest.raises(InputError, match="cannot run") as caught:
        model.run({"x": X})
    assert "stem" in caught.value.why


def test_onnxruntime_reports_to_nobody(mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its telemetry first makes a session file in the temporary folder and a database below the home folder.
    for variable in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for variable in ("CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(variable, raising=False)
    with ReferenceModel(mlp) as model:
        model.run({"x": X})
    assert [path for folder in ("TMPDIR", "HOME", "XDG_CACHE_HOME") for path in (tmp_path / folder).iterdir()] == []


@pytest.mark.parametrize("folder", [True, False])
def test_paths_need_not_be_utf8(mlp: Path, tmp_path: Path, folder: bool) -> None:
    odd = os.fsdecode(b"odd\xff")
    path = tmp_path / odd / "mlp.onnx" if folder else tmp_path / odd
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mlp.read_bytes())
    with ReferenceModel(path) as model, ReferenceModel(mlp) as plain:
        assert model.outputs == plain.outputs


@pytest.mark.parametrize(
    ("available", "use_gpu", "chosen"),
    [
        ([CPU], True, [CPU]),
        (["AzureExecutionProvider", CPU], True, [CPU]),
        (["TensorrtExecutionProvider", CUDA, CPU], True, [CUDA, CPU]),
        (["TensorrtExecutionProvider", CUDA, CPU], False, [CPU]),
    ],
)
def test_cuda_is_chosen_only_where_it_is_there_and_wanted(
    available: list[str], use_gpu: bool, chosen: list[str]
) -> None:
    providers = choose_providers(available, use_gpu)
    assert [entry if isinstance(entry, str) else entry[0] for entry in providers] == chosen


def test_cuda_computes_fp32_without_tf32() -> None:
    assert choose_providers([CUDA, CPU], True)[0] == (CUDA, {"use_tf32": "0"})


def test_a_model_says_what_runs_it(mlp: Path) -> None:
    with ReferenceModel(mlp, use_gpu=True) as model:
        assert (model.provider, model.gpu_failure) == (CPU, "")
        assert model.version


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_cuda_provider_that_does_not_start_is_given_up_with_its_reason(
    mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the provider is not even there: ONNX Runtime warns and goes on, as where CUDA's libraries are missing."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(reference, "_session", None)
    monkeypatch.chdir(mlp.parent)
    request = {"path": str(mlp), "taps": [], "as_written": False, "use_gpu": True, "exact_integers": False}
    answer, _ = reference.SERVICE["load"](request, {}, lambda _: None)
    assert answer["provider"] == CPU
    assert answer["gpu_failure"]
    assert reference.SERVICE["run"]({"outputs": None}, {"x": X}, lambda _: None)[1]["scores"].shape == (3, 3)


def test_graphs_as_written_never_ask_for_a_gpu(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    class Recorder:
        def __init__(self, *_: object, **__: object) -> None: ...

        def call(self, _: str, meta: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
            requests.append(meta)
            return {"outputs": [], "provider": CPU, "version": "", "gpu_failure": ""}, {}

        def close(self) -> None: ...

    monkeypatch.setattr(reference, "Child", Recorder)
    with ReferenceModel(mlp, as_written=True, use_gpu=True) as model:
        model.load(mlp)
    assert [request["use_gpu"] for request in requests] == [False, False]


def test_exact_integers_do_not_saturate(tmp_path: Path) -> None:
    """Pairs of products add up to 64770, beyond the 16 bits in which CPUs without VNNI add them."""
    path = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, 64] x) => (int32[b, 8] y) {
            q, s, z = DynamicQuantizeLinear(x)
            y = MatMulInteger(q, w, z)
        }""",
        w=np.full((64, 8), 127, np.int8),
    )
    x = np.ones((2, 64), np.float32)
    with ReferenceModel(path, as_written=True, exact_integers=True) as model:
        assert (model.run({"x": x})["y"] == 64 * 255 * 127).all()


def test_exact_integers_that_cannot_be_had_are_done_without(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    class Refuser:
        def __init__(self, *_: object, **__: object) -> None: ...

        def call(self, _: str, meta: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
            loads.append(meta["exact_integers"])
            if meta["exact_integers"]:
                raise InputError("refused", "no such kernel", "none")
            return {"outputs": ["scores"], "provider": CPU, "version": "", "gpu_failure": ""}, {}

        def close(self) -> None: ...

    monkeypatch.setattr(reference, "Child", Refuser)
    with ReferenceModel(mlp, as_written=True, exact_integers=True):
        assert loads == [True, False]
