from __future__ import annotations

import io
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data_cases import TOKENS, Specs, refusal, samples, save
from support import npy_bytes, zip_of

from trtforge.data import open_dataset
from trtforge.errors import InputError, UnavailableError
from trtforge.limits import Limits
from trtforge.npz import NpzFile
from trtforge.tensor import TensorSpec


class Trap:
    """Unpickling one of these writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["x", "labels", "other"])
def test_pickled_arrays_are_refused_and_never_run(tmp_path: Path, x_spec: Specs, name: str) -> None:
    trap = np.array([[Trap(tmp_path / "sprung")] * 4] * 2)
    path = zip_of(
        tmp_path / "d.npz", {"x.npy": npy_bytes(samples(2)), f"{name}.npy": npy_bytes(trap, allow_pickle=True)}
    )
    error = refusal(path, x_spec)
    assert error.why == f"array '{name}' is pickled"
    assert "never unpickles" in error.fix
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_named_npz_is_refused_and_never_run(tmp_path: Path, x_spec: Specs) -> None:
    np.save(tmp_path / "d.npy", np.array(Trap(tmp_path / "sprung")), allow_pickle=True)
    path = (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    assert "it is no .npz file" in refusal(path, x_spec).why
    assert not (tmp_path / "sprung").exists()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, x_spec: Specs) -> None:
    with (
        zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as stream,
    ):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (4 * 2**20, 4)})
        stream.write(header.getvalue())
        for _ in range(64):
            stream.write(bytes(2**20))
    path = tmp_path / "d.npz"
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    error = refusal(path, x_spec, Limits(data_bytes=2**25))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "the limit is 33554432" in error.why
    assert "--limit data_bytes=" in error.fix
    assert peak < 2**21


def test_size_limit_counts_all_arrays_together(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", ids=np.zeros((8, 64), np.int64), mask=np.zeros((8, 64), np.int64))
    unpacked = 2 * (128 + 8 * 64 * 8)
    assert len(open_dataset(path, TOKENS, Limits(data_bytes=unpacked))) == 8
    assert f"unpacks to {unpacked} bytes" in refusal(path, TOKENS, Limits(data_bytes=unpacked - 1)).why


def test_an_entry_that_unpacks_to_more_than_it_states_is_refused(tmp_path: Path, x_spec: Specs) -> None:
    """The zip file says 128 + 16 bytes in both of its places; the deflated stream holds a megabyte more."""
    honest = npy_bytes(samples(1))
    path = zip_of(tmp_path / "d.npz", {"x.npy": honest + bytes(2**20)}, zipfile.ZIP_DEFLATED)
    stated = (len(honest) + 2**20).to_bytes(4, "little")
    assert path.read_bytes().count(stated) == 2
    path.write_bytes(path.read_bytes().replace(stated, len(honest).to_bytes(4, "little")))
    tracemalloc.start()
    assert "damaged" in refusal(path, x_spec).why
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**19


def test_an_entry_that_unpacks_to_less_than_it_states_is_refused(tmp_path: Path, x_spec: Specs) -> None:
    """The array's header and the zip file agree on 10 samples; the deflated stream ends properly after 3."""
    whole = npy_bytes(samples(10))
    part = whole[: len(whole) - 7 * 16]
    path = zip_of(tmp_path / "d.npz", {"x.npy": part}, zipfile.ZIP_DEFLATED)
    stated = len(part).to_bytes(4, "little")
    assert path.read_bytes().count(stated) == 2
    path.write_bytes(path.read_bytes().replace(stated, len(whole).to_bytes(4, "little")))
    assert "it ends after 48 of 128 bytes" in refusal(path, x_spec).why


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_far_behind_the_header_is_refused(tmp_path: Path, compression: int) -> None:
    specs = (TensorSpec("x", "int32", ("batch", 4)),)
    array = np.random.default_rng(1).integers(0, 100, (100_000, 4), np.int32)
    path = zip_of(tmp_path / "d.npz", {"x.npy": npy_bytes(array)}, compression)
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) * 3 // 4
    damaged[middle : middle + 4096] = np.random.default_rng(2).bytes(4096)
    path.write_bytes(damaged)
    assert "damaged" in refusal(path, specs).why


@pytest.mark.parametrize("keep", [0, 1, 30, 100, -30, -1])
def test_a_truncated_npz_is_refused(tmp_path: Path, x_spec: Specs, keep: int) -> None:
    path = save(tmp_path / "d.npz", x=samples(10))
    path.write_bytes(path.read_bytes()[:keep])
    assert "it is no .npz file" in refusal(path, x_spec).why


def test_a_file_that_is_no_zip_is_refused(tmp_path: Path, x_spec: Specs) -> None:
    (tmp_path / "d.npz").write_bytes(b"hello" * 100)
    error = refusal(tmp_path / "d.npz", x_spec)
    assert "it is no .npz file" in error.why
    assert error.fix == "save it with numpy.savez"


def test_a_zip_without_arrays_lacks_the_inputs(tmp_path: Path, x_spec: Specs) -> None:
    assert "no array for input x" in refusal(zip_of(tmp_path / "d.npz", {"readme.txt": b"hi"}), x_spec).why


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_flipped_bytes_are_refused_or_read_but_nothing_else(tmp_path: Path, x_spec: Specs, compression: int) -> None:
    random = np.random.default_rng(compression)
    array = random.normal(size=(40, 4)).astype(np.float32)
    good = zip_of(tmp_path / "d.npz", {"x.npy": npy_bytes(array)}, compression).read_bytes()
    refused = 0
    for position in random.integers(0, len(good), 150):
        bad = bytearray(good)
        bad[position] ^= 1 << int(random.integers(8))
        (tmp_path / "d.npz").write_bytes(bad)
        try:
            open_dataset(tmp_path / "d.npz", x_spec)
        except InputError as err:
            assert "cannot be used" in err.what
            refused += 1
    assert refused > 100


def npy_with_header(header: bytes, data: bytes) -> bytes:
    padded = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + data


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4)}", "states shape [1000000000, 4] float32"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)}", "but holds 32 bytes"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4)}", "but holds 32 bytes"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -4)}", "states shape [-2, -4]"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4.0)}", "is damaged"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': 8}", "is damaged"),
        (b"{'descr': '<f4', 'fortran_order': 1, 'shape': (2, 4)}", "is damaged"),
        (b"{'descr': '<f4', 'shape': (2, 4)}", "is damaged"),
        (b"{'descr': 'zz', 'fortran_order': False, 'shape': (2, 4)}", "is damaged"),
        (b"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1, 4)}", "the model takes float32"),
        (b"__import__('os').system('true')", "is damaged"),
        (b"(" * 9000, "is damaged"),
        (b"-" * 9000 + b"1", "is damaged"),
        (b"{'a': ", "is damaged"),
        (b"\x00\xff", "is damaged"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4)}" + b" " * 20_000, "is damaged"),
    ],
)
def test_a_header_that_lies_or_is_no_header_is_refused(tmp_path: Path, x_spec: Specs, header: bytes, why: str) -> None:
    path = zip_of(tmp_path / "d.npz", {"x.npy": npy_with_header(header, bytes(32))})
    assert why in refusal(path, x_spec).why


def test_an_unknown_npy_format_is_refused(tmp_path: Path, x_spec: Specs) -> None:
    path = zip_of(tmp_path / "d.npz", {"x.npy": b"\x93NUMPY\x09\x00" + npy_bytes(samples(2))[8:]})
    assert "npy format 9.0 is not read" in refusal(path, x_spec).why


def test_paths_inside_the_zip_are_names_and_nothing_is_extracted(tmp_path: Path, x_spec: Specs) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = zip_of(folder / "d.npz", {"x.npy": npy_bytes(samples(1)), "../evil.npy": npy_bytes(samples(1))})
    assert "unknown array ../evil" in refusal(path, x_spec).why
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("shape", [(5, 3), (7, 2, 3, 4), (9000, 300), (1, 6), (4, 0, 2)])
def test_samples_of_a_fortran_ordered_array_arrive_whole(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    path = zip_of(tmp_path / "d.npz", {"x.npy": npy_bytes(np.asfortranarray(array)), "y.npy": npy_bytes(array)})
    parts = list(NpzFile(path, Limits()).read(["x", "y"], 4))
    assert [len(part["x"]) for part in parts] == [len(part["y"]) for part in parts]
    assert (np.concatenate([part["x"] for part in parts]) == array).all()
    assert (np.concatenate([part["y"] for part in parts]) == array).all()


def test_a_full_temporary_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zip_of(tmp_path / "d.npz", {"x.npy": npy_bytes(np.asfortranarray(np.ones((64, 64))))})
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/none")
    with pytest.raises(UnavailableError, match="cannot be sorted into samples") as caught:
        list(NpzFile(path, Limits()).read(["x"], 4))
    assert "Fortran order; Not a directory in /dev/null/none" in caught.value.why
