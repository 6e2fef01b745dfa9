from __future__ import annotations

import numpy as np
import pytest
from quant_cases import normal
from support import npy_bytes, zip_of

from trtforge.errors import ChildDiedError, InputError, UnavailableError
from trtforge.quantization import checkpoint as module
from trtforge.quantization.checkpoint import Checkpoint, open_checkpoint
from trtforge.quantization.observation import Observation

IDENTITY = "a" * 64


def empty():
    return Observation({"x": -1})


@pytest.fixture
def seen():
    observation = empty()
    observation.update({"i": np.zeros(5)}, {"x": normal(5, 3)})
    return observation


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json.partial"


def load(path, identity=IDENTITY):
    warnings = []
    return Checkpoint(path).load(identity, empty, warnings.append), warnings


def test_what_was_saved_is_loaded(path, seen):
    Checkpoint(path).save(IDENTITY, seen.state())
    loaded, warnings = load(path)
    assert warnings == []
    assert all(np.array_equal(seen.state()[name], array) for name, array in loaded.state().items())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_file_the_observation_is_empty(path):
    loaded, warnings = load(path)
    assert (loaded.samples, warnings) == (0, [])


def test_the_state_of_another_calibration_is_ignored_with_a_warning(path, seen):
    Checkpoint(path).save("b" * 64, seen.state())
    loaded, warnings = load(path)
    assert loaded.samples == 0
    assert warnings == [
        f"{path} is ignored and removed: it belongs to another calibration (model, data, recipe, options or "
        "versions differ)"
    ]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_byte_of_an_array(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_an_array(path):
    with np.load(path) as file:
        kept = {name: file[name] for name in file.files if name != "0.histogram"}
    np.savez(path.open("wb"), **kept)


def pickle_an_array(path):
    zip_of(path, {"identity.npy": npy_bytes(np.array([{}], object), allow_pickle=True)})


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_byte_of_an_array,
        drop_an_array,
        pickle_an_array,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("{}"),
        lambda path: np.savez(path.open("wb"), x=np.zeros(2)),
        lambda path: np.savez(path.open("wb"), identity=np.frombuffer(IDENTITY.encode(), np.uint8)),
    ],
)
def test_a_damaged_file_is_removed_with_a_warning(path, seen, damage):
    Checkpoint(path).save(IDENTITY, seen.state())
    damage(path)
    loaded, warnings = load(path)
    assert loaded.samples == 0
    assert len(warnings) == 1
    assert not path.exists()
    assert f"{path} is ignored and removed: " in warnings[0]


def test_a_file_that_unpacks_to_more_than_any_state_is_ignored(path, seen, monkeypatch):
    Checkpoint(path).save(IDENTITY, seen.state())
    monkeypatch.setattr(module, "_LIMITS", module.DEFAULT_LIMITS.override(["data_bytes=1000"]))
    loaded, warnings = load(path)
    assert loaded.samples == 0
    assert "the limit is 1000" in warnings[0]


def test_it_is_due_only_after_a_while_and_longer_after_a_slow_save(path, seen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    checkpoint = Checkpoint(path)
    assert not checkpoint.is_due
    now[0] += 3.0
    assert checkpoint.is_due
    checkpoint.save(IDENTITY, seen.state())
    assert not checkpoint.is_due
    now[0] += 3.0
    times = iter([now[0], now[0] + 2.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    checkpoint.save(IDENTITY, seen.state())
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    now[0] += 41.0
    assert not checkpoint.is_due
    now[0] += 2.0
    assert checkpoint.is_due


def test_the_file_is_gone_after_the_work(path, seen):
    with open_checkpoint(path) as checkpoint:
        checkpoint.save(IDENTITY, seen.state())
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (KeyboardInterrupt(), True),
        (ChildDiedError("it died"), True),
        (InputError("bad input"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_the_file_is_kept_only_where_going_on_makes_sense(path, seen, error, is_kept):
    with pytest.raises(type(error)), open_checkpoint(path) as checkpoint:
        checkpoint.save(IDENTITY, seen.state())
        raise error
    assert path.exists() == is_kept


def test_what_a_killed_save_left_is_removed_too(path):
    path.with_name(f".{path.name}.new").write_bytes(b"half")
    with open_checkpoint(path):
        pass
    assert list(path.parent.iterdir()) == []


def test_a_folder_for_the_file_is_made_and_removed_when_empty(tmp_path, seen):
    path = tmp_path / "build" / "t.json.partial"
    with open_checkpoint(path) as checkpoint:
        checkpoint.save(IDENTITY, seen.state())
        assert path.exists()
    assert not path.parent.exists()


def test_a_folder_in_its_place_is_refused(path):
    path.mkdir()
    with pytest.raises(InputError, match="cannot be written") as caught, open_checkpoint(path):
        pass
    assert caught.value.why == "it is no regular file"


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UnavailableError, match="cannot be written"), open_checkpoint(tmp_path / ("x" * 300)):
        pass
