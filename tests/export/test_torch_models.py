"""What runs in the child process, here in the test's own process: starting torch once is most of the time."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the export extra is not installed")
pytest.importorskip("onnxscript", reason="the export extra is not installed")

from torch import nn  # noqa: E402

from trtforge.errors import InputError  # noqa: E402
from trtforge.export import write  # noqa: E402
from trtforge.export.function import load_from_function, other_sizes  # noqa: E402
from trtforge.export.load_program import load_from_program  # noqa: E402
from trtforge.export.program import check_program  # noqa: E402
from trtforge.export.torch_model import TorchModel, resize  # noqa: E402
from trtforge.export.trace import trace  # noqa: E402
from trtforge.export_info import DimInfo  # noqa: E402


class Net(nn.Module):
    """image [batch, 3, height, width], gain [] -> a map and its mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)

    def forward(self, image: Any, gain: Any) -> tuple[Any, Any]:
        found = self.stem(image).relu() * gain
        return found, found.mean((2, 3))


class Baked(nn.Module):
    """Its rows are a number to Python."""

    def forward(self, x: Any, y: Any) -> Any:
        rows = int(x.shape[0])
        return x.view(rows, 2, -1).sum(1) * y.unsqueeze(1)


def use(monkeypatch: pytest.MonkeyPatch, result: Any, layout: Any = None) -> TorchModel:
    """The model of a function that returns `result`."""
    monkeypatch.setitem(sys.modules, "user_code_of_test", SimpleNamespace(make=lambda: result))
    return load_from_function("user_code_of_test:make", layout)


def test_names_and_dims_come_from_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = {"image": torch.randn(1, 3, 32, 48), "gain": torch.tensor(2.0)}
    made = SimpleNamespace(
        module=Net(),
        example_inputs=examples,
        dynamic_shapes={"image": {0: torch.export.Dim("rows"), 3: "width"}},
        output_names=["map", "pooled"],
    )
    model = use(monkeypatch, made)
    assert [(item.name, item.dims) for item in model.inputs] == [("image", ("rows", 3, 32, "width")), ("gain", ())]
    assert (model.sizes, model.fixed_sizes) == ({"rows": 2, "width": 48}, {"rows": 1, "width": 48})
    assert model.output_names == ["map", "pooled"]
    assert [tuple(value.shape) for value in model.inputs_at({"rows": 5, "width": 7}, 1)] == [(5, 3, 32, 7), ()]


def test_the_profile_file_wins_over_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = use(monkeypatch, (Net(), (torch.randn(1, 3, 32, 48), torch.tensor(1.0))), {"image": ("b", 3, 64, "w")})
    assert model.inputs[0].dims == ("b", 3, 64, "w")
    assert tuple(model.inputs_at(model.sizes, 0)[0].shape) == (2, 3, 64, 48)
    with pytest.raises(InputError, match="gives input 'image' 2 dims"):
        use(monkeypatch, (Net(), (torch.randn(1, 3, 32, 48), torch.tensor(1.0))), {"image": ("b", "w")})


def test_without_any_word_the_batch_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = use(monkeypatch, (Net(), (torch.randn(4, 3, 8, 8), torch.tensor(1.0))))
    assert [item.dims for item in model.inputs] == [("batch", 3, 8, 8), ()]
    assert model.output_names == ["output_0", "output_1"]


@pytest.mark.parametrize(
    ("result", "what", "why"),
    [
        (3, "cannot be used", "it returned a int"),
        (nn.ReLU(), "cannot be used", "without example inputs"),
        ((3, (torch.ones(2),)), "cannot be used", "its module is a int"),
        ((nn.ReLU(), ()), "has no example inputs", "tuple"),
        ((nn.ReLU(), ([1.0],)), "example input 0", "it is a list"),
        ((nn.ReLU(), {"input": None}), "example input input", "it is a NoneType"),
        ((nn.Linear(4, 2), (torch.ones(2, 3),)), "does not run on its own example inputs", "RuntimeError"),
        (
            SimpleNamespace(module=nn.ReLU(), example_inputs=(torch.ones(2),), input_names=["a", "b"]),
            "names 2 inputs",
            "it has 1",
        ),
        (
            SimpleNamespace(module=nn.ReLU(), example_inputs=(torch.ones(2),), output_names=[]),
            "names 0 outputs",
            "it returns 1",
        ),
        (
            SimpleNamespace(module=nn.ReLU(), example_inputs=(torch.ones(2),), dynamic_shapes={"input": {3: "z"}}),
            "names axis 3",
            "has 1 axes",
        ),
    ],
)
def test_what_a_function_returns_is_checked(monkeypatch: pytest.MonkeyPatch, result: Any, what: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        use(monkeypatch, result)
    assert what in caught.value.what
    assert why in caught.value.why


def test_a_function_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SystemExit(3)

    monkeypatch.setitem(sys.modules, "user_code_of_test", SimpleNamespace(make=fail))
    with pytest.raises(InputError, match="cannot be made") as caught:
        load_from_function("user_code_of_test:make", None)
    assert caught.value.why == "it failed with SystemExit: 3"


def test_a_baked_size_is_fixed_with_the_line_that_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = use(monkeypatch, (Baked(), (torch.randn(3, 4), torch.randn(3))))
    _, fixed = trace(model)
    assert [(entry.name, entry.size) for entry in fixed] == [("batch", 3)]
    assert "rows = int(x.shape[0])" in fixed[0].reason
    assert [item.dims for item in model.inputs] == [(3, 4), (3,)]


def test_a_model_that_takes_one_row_only_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class One(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.view(1, 12) * 2

    model = use(monkeypatch, (One(), (torch.randn(1, 3, 4),)))
    _, fixed = trace(model)
    assert [(entry.name, entry.size) for entry in fixed] == [("batch", 1)]
    assert "at another size it fails" in fixed[0].reason
    assert "return x.view(1, 12) * 2" in fixed[0].reason
    assert model.inputs[0].dims == (1, 3, 4)


def test_control_flow_on_values_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branch(nn.Module):
        def forward(self, x: Any) -> Any:
            if x.sum() > 0:
                return x + 1
            return x - 1

    model = use(monkeypatch, (Branch(), (torch.randn(2, 4),)))
    with pytest.raises(InputError, match=r"torch.export cannot trace Branch") as caught:
        trace(model)
    assert "if x.sum() > 0" in caught.value.why
    assert "torch.cond" in caught.value.fix


def test_an_operator_without_onnx_form_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j0(x)

    model = use(monkeypatch, (Odd(), (torch.randn(2, 4),)))
    program, _ = trace(model)
    with pytest.raises(InputError, match="bessel_j0") as caught:
        write.write_onnx(model, program, tmp_path / "m.onnx", 20)
    assert "no translation" in caught.value.why


def test_the_onnx_file_has_the_users_names_and_no_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = SimpleNamespace(
        module=Net(),
        example_inputs=(torch.randn(1, 3, 32, 48), torch.tensor(2.0)),
        dynamic_shapes={"image": {0: "batch", 2: "height"}},
        output_names=["map", "pooled"],
    )
    model = use(monkeypatch, made)
    program, fixed = trace(model)
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path in paths:
        write.write_onnx(model, program, path, 20)
    assert fixed == []
    assert write.dim_ranges(model, program) == {name: DimInfo(min=1, max=None) for name in ("batch", "height")}
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"/" + str(Path(__file__).parent).encode()[1:] not in paths[0].read_bytes()
    graph = onnx.load(str(paths[0])).graph
    assert [[d.dim_param or d.dim_value for d in port.type.tensor_type.shape.dim] for port in graph.input] == [
        ["batch", 3, "height", 48],
        [],
    ]
    assert {"stem.weight", "stem.bias"} <= {tensor.name for tensor in graph.initializer}
    assert "/stem/Conv" in [node.name for node in graph.node]
    inputs = model.inputs_at({"batch": 3, "height": 20}, 1)
    session = onnxruntime.InferenceSession(paths[0])
    actual = session.run(["map", "pooled"], {"image": inputs[0].numpy(), "gain": inputs[1].numpy()})
    for array, expected in zip(actual, model.run(inputs), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_large_weights_go_into_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(write, "EXTERNAL_BYTES", 1000)
    model = use(monkeypatch, (nn.Linear(64, 32), (torch.randn(2, 64),)))
    program, _ = trace(model)
    write.write_onnx(model, program, tmp_path / "m.onnx", 20)
    assert (tmp_path / "m.onnx.data").stat().st_size >= 64 * 32 * 4
    onnxruntime.InferenceSession(tmp_path / "m.onnx")


def test_a_program_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows")
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    program = torch.export.export(module.eval(), (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    path = tmp_path / "m.pt2"
    torch.export.save(program, path)
    check_program(path)
    model = load_from_program(path, None)
    assert [(item.name, item.dims) for item in model.inputs] == [("input", ("batch", 4))]
    write.write_onnx(model, model.program, tmp_path / "m.onnx", 20)
    x = torch.randn(5, 4)
    actual = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()})
    np.testing.assert_allclose(actual[0], module(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert load_from_program(path, {"input": ("n", 4)}).inputs[0].dims == ("n", 4)


class Blend(nn.Module):
    """Takes its inputs in every way that Python has."""

    def forward(self, x: Any, pair: Any = None, *, gain: Any = 1, kind: str = "") -> Any:
        return x * gain if pair is None else x * gain - pair[0] / pair[1]


def saved_program(path: Path, args: tuple[Any, ...], keywords: dict[str, Any]) -> Path:
    torch.export.save(torch.export.export(Blend(), args, keywords), path)
    check_program(path)
    return path


@pytest.mark.parametrize(
    ("args", "keywords", "names"),
    [
        ((torch.ones(2, 3),), {"gain": torch.ones(3)}, ["x", "gain"]),
        ((), {"gain": torch.ones(3), "x": torch.ones(2, 3)}, ["gain", "x"]),
        ((torch.ones(2, 3), (torch.ones(3), torch.ones(2, 3))), {}, ["x", "pair_0", "pair_1"]),
    ],
)
def test_a_program_is_called_as_it_was_traced(
    tmp_path: Path, args: tuple[Any, ...], keywords: dict[str, Any], names: list[str]
) -> None:
    model = load_from_program(saved_program(tmp_path / "m.pt2", args, keywords), None)
    assert [item.name for item in model.inputs] == names
    inputs = model.inputs_at({}, 1)
    by_name = dict(zip(names, inputs, strict=True))
    pair = (by_name["pair_0"], by_name["pair_1"]) if "pair_0" in by_name else None
    expected = Blend()(by_name["x"], pair, gain=by_name.get("gain", 1))
    assert torch.equal(model.run(inputs)[0], expected)
    write.write_onnx(model, model.program, tmp_path / "m.onnx", 20)
    feeds = {name: value.numpy() for name, value in by_name.items()}
    actual = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, feeds)
    np.testing.assert_allclose(actual[0], expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value", "key"), [(2, "gain"), ("relu", "kind"), ("x", "kind"), (None, "pair")])
def test_a_program_that_takes_more_than_tensors_is_refused(tmp_path: Path, value: Any, key: str) -> None:
    path = saved_program(tmp_path / "m.pt2", (torch.ones(2, 3),), {key: value})
    with pytest.raises(InputError, match=r"input 1 of the program .* is no tensor") as caught:
        load_from_program(path, None)
    assert caught.value.why == f"it was traced with {value!r}; an engine takes tensors only"


def test_a_program_that_does_not_run_is_told(tmp_path: Path) -> None:
    """Integers are ones, which this table of one row does not have."""
    program = torch.export.export(nn.Embedding(1, 3), (torch.zeros(2, dtype=torch.int64),))
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(InputError, match=r"m.pt2 does not run on input \[2\]") as caught:
        load_from_program(tmp_path / "m.pt2", None)
    assert caught.value.why.startswith("IndexError")


def test_sample_inputs_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(nn.ReLU(), (torch.randn(3, 4),)), path)
    seen: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **_: seen.append(args) or ((torch.ones(3, 4),), {}))
    load_from_program(path, None)
    assert seen == []


def test_values_are_like_the_examples() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = resize(torch.tensor([[1, 7, 9]]), (2, 5), generator)
    assert ids.tolist() == [[1, 7, 9, 1, 7]] * 2
    floats = resize(torch.full((2, 100), 5.0), (4, 50), generator)
    assert (floats.shape, round(float(floats.mean()))) == ((4, 50), 5)
    assert float(floats.std()) > 0.5


def test_second_sizes_keep_what_divides() -> None:
    assert other_sizes({"batch": 2, "height": 64}) == [
        {"height": 32, "batch": 1},
        {"height": 128, "batch": 1},
        {"height": 64, "batch": 1},
    ]
    assert other_sizes({}) == []
