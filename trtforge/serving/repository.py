"""A Triton model repository: the folders of its models, and `trtforge.json`, which says which is which.

    REPO/trtforge.json
    REPO/<name>/config.pbtxt
    REPO/<name>/warmup/...
    REPO/<name>/1/model.json, the model, and its code where it has some

Triton takes every folder in REPO for a model, one that begins with a dot as well, and does not look at files. So models
are written beside REPO and each is moved into its place in one step; `trtforge.json` follows, also in one step. A job
that was killed between the two leaves a folder that its next run finds to be what it would write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import pydantic

from trtforge import __version__
from trtforge.errors import InputError, UnavailableError
from trtforge.hashing import sha256_of_file
from trtforge.manifest import MANIFEST_NAME
from trtforge.serving.model_config import ModelConfig
from trtforge.staging import (
    Staging,
    locked,
    make_parents,
    open_staging,
    put_in_place,
    replace_file,
    translate_write_errors,
)
from trtforge.textfile import FileModel, kind_of, parse_json, read_text, validate

REPOSITORY_NAME = "trtforge.json"
CONFIG_NAME = "config.pbtxt"
# Of the command line, that names a repository.
_OPTION = "--triton"

_Paths = TypeVar("_Paths", dict[str, str], tuple[str, ...])


class PackagedModel(FileModel):
    """One model of the repository.

    Attributes:
        name: its folder, and what clients call it.
        kind: what runs it; "text" is the front that turns strings into tokens.
        model: name of the source model.
        model_sha256: of the source model.
        artifact_sha256: `inputs_sha256` of the artifact's manifest.
        precision: as in the manifest.
        targets: compute capabilities that the engine was built for.
        backend_version: of what has to run it; empty where any version does.
        triton: the release whose container has that version; None where it does not matter.
        version: number of the folder that holds the model.
        gpus: numbers of the GPUs that it runs on; empty for every GPU, or for the CPU.
        bucket: length that texts are padded to; None for a model that takes whatever its profiles take.
        max_batch_size: as in `config.pbtxt`.
        files: SHA-256 of each file, by its path in the model's folder.
        local_files: paths of files that are made where the model is served, such as an engine that is built there.
    """

    name: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    kind: Literal["tensorrt", "tensorrt-rtx", "onnxruntime", "text"]
    model: str
    model_sha256: str
    artifact_sha256: str
    precision: str
    targets: tuple[str, ...]
    backend_version: str = ""
    triton: str | None = None
    version: Annotated[int, pydantic.Field(ge=1)] = 1
    gpus: tuple[int, ...] = ()
    bucket: int | None = None
    max_batch_size: Annotated[int, pydantic.Field(ge=0)]
    files: dict[str, str] = pydantic.Field(default_factory=dict)
    local_files: tuple[str, ...] = ()

    @pydantic.field_validator("files", "local_files")
    @classmethod
    def _check_paths(cls, value: _Paths) -> _Paths:
        for name in value:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} leads out of the model's folder")
        return value

    @property
    def needs_gpu(self) -> bool:
        """Whether it runs on a GPU only."""
        return self.kind in ("tensorrt", "tensorrt-rtx")


class RepositoryManifest(FileModel):
    """The content of `trtforge.json`; models by name."""

    schema_version: Literal[1] = 1
    trtforge_version: str
    models: tuple[PackagedModel, ...]

    def model(self, name: str) -> PackagedModel | None:
        """The model of this name."""
        return next((entry for entry in self.models if entry.name == name), None)

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=True) + "\n"


@dataclasses.dataclass(frozen=True, slots=True)
class FileSource:
    """A file that is copied.

    Attributes:
        path: where it is.
        sha256: what it has to hold.
    """

    path: Path
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is to be written.

    Attributes:
        entry: what `trtforge.json` says of it; `files` is filled in when it is written.
        config: its configuration.
        files: content by path in the model's folder, `config.pbtxt` aside. A source that several models name is stored
            once, as hard links where the file system has them.
        extends: version that the model is added to; the model of that version is replaced without `force`.
    """

    entry: PackagedModel
    config: ModelConfig
    files: Mapping[str, bytes | FileSource]
    extends: int | None = None

    def contents(self) -> dict[str, bytes | FileSource]:
        """Every file of the folder."""
        return {CONFIG_NAME: self.config.to_text().encode(), **self.files}

    def described(self) -> PackagedModel:
        """The entry with its files."""
        hashes = {
            path: content.sha256 if isinstance(content, FileSource) else hashlib.sha256(content).hexdigest()
            for path, content in self.contents().items()
        }
        return self.entry.model_copy(update={"files": dict(sorted(hashes.items()))})


def load_repository(repository: Path) -> RepositoryManifest:
    """What trtforge wrote into a repository.

    Raises:
        InputError: there is nothing, or a file that does not hold.
    """
    path = repository / REPOSITORY_NAME
    if kind_of(path, "repository") != "file":
        raise InputError(
            f"{repository} is no repository of trtforge",
            f"it has no {REPOSITORY_NAME}",
            f"write one with `trtforge package ARTIFACT --triton {repository}`",
        )
    return validate(RepositoryManifest, parse_json(read_text(path, "repository"), str(path)), str(path))


def write_models(repository: Path, folders: Sequence[ModelFolder], force: bool = False) -> tuple[str, ...]:
    """Write models into a repository, and say which; those that are there with the same content are left.

    Args:
        repository: made where it is missing.
        folders: the models.
        force: replace models of the same name; never a folder that trtforge did not write.

    Returns:
        Names of the models that were written, in the order of the folders.

    Raises:
        InputError: a name is taken, or the place is no folder.
        UnavailableError: the place cannot be written.
    """
    repository = repository.absolute()
    names = [folder.entry.name for folder in folders]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(
            f"two models would be called {twice[0]!r}",
            "a repository has each name once",
            "package them one after the other, each with a --name of its own",
        )
    _check_place(repository)
    with contextlib.ExitStack() as stack:
        with translate_write_errors(repository, _OPTION):
            make_parents(repository, stack)
        with locked(repository):
            known = _known_models(repository)
            described = {folder.entry.name: folder.described() for folder in folders}
            changed = [
                folder for folder in folders if not _holds(repository / folder.entry.name, described[folder.entry.name])
            ]
            for folder in changed:
                _check_free(repository, folder, known.get(folder.entry.name), force)
            _put(repository, changed)
            models = tuple(sorted({**known, **described}.values(), key=lambda entry: entry.name))
            manifest = RepositoryManifest(trtforge_version=__version__, models=models)
            if changed or known != {entry.name: entry for entry in models}:
                replace_file(repository / REPOSITORY_NAME, manifest.to_json())
    return tuple(folder.entry.name for folder in changed)


def replace_config(repository: Path, name: str, text: str) -> None:
    """Put another `config.pbtxt` in the place of a model's, and record it.

    Raises:
        InputError: trtforge did not write the model.
        UnavailableError: the place cannot be written.
    """
    repository = repository.absolute()
    with locked(repository):
        manifest = load_repository(repository)
        entry = manifest.model(name)
        if entry is None:
            known = ", ".join(model.name for model in manifest.models)
            raise InputError(f"{repository} has no model {name!r}", f"trtforge wrote {known}", "give one of these")
        files = entry.files | {CONFIG_NAME: hashlib.sha256(text.encode()).hexdigest()}
        changed = entry.model_copy(update={"files": files})
        models = tuple(changed if model is entry else model for model in manifest.models)
        replace_file(repository / name / CONFIG_NAME, text)
        replace_file(repository / REPOSITORY_NAME, manifest.model_copy(update={"models": models}).to_json())


def damaged_models(repository: Path, manifest: RepositoryManifest) -> list[str]:
    """Names of models whose folder does not hold what was written."""
    return [entry.name for entry in manifest.models if not _holds(repository / entry.name, entry)]


def _check_place(repository: Path) -> None:
    if repository.is_symlink() or (repository.exists() and not repository.is_dir()):
        raise InputError(f"{repository} cannot become a repository", "it is not a folder", "give another --triton")
    if (repository / MANIFEST_NAME).exists():
        raise InputError(f"{repository} cannot become a repository", "it is an artifact", "give another --triton")
    if repository.is_mount():
        raise UnavailableError(
            f"{repository} cannot be written in one step",
            "it is where a file system is mounted, and models are made beside a repository and moved into it",
            f"give a folder in it: --triton {repository / 'models'}",
        )


def _known_models(repository: Path) -> dict[str, PackagedModel]:
    """The models that trtforge wrote, by name; those whose folder the user removed are forgotten."""
    if not (repository / REPOSITORY_NAME).exists():
        return {}
    return {entry.name: entry for entry in load_repository(repository).models if (repository / entry.name).is_dir()}


def _holds(folder: Path, entry: PackagedModel) -> bool:
    """Whether a model's folder holds these very files, and no others but what its code leaves there when it runs."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    own = {name for name in found if "__pycache__" not in Path(name).parts and name not in entry.local_files}
    return own == set(entry.files) and all(
        found[name].is_file() and sha256_of_file(found[name]) == sha256 for name, sha256 in entry.files.items()
    )


def _check_free(repository: Path, new: ModelFolder, known: PackagedModel | None, force: bool) -> None:
    """Refuse to replace a model unasked, and what trtforge did not write at all."""
    folder = repository / new.entry.name
    if not folder.exists() and not folder.is_symlink():
        return
    if known is None:
        raise InputError(
            f"{folder} was not written by trtforge, so it is not touched",
            f"it is not in {REPOSITORY_NAME}",
            "give another --name, or move it away",
        )
    is_damaged = not _holds(folder, known)
    if not force and (is_damaged or new.extends != known.version):
        raise InputError(
            f"{folder} holds {'files that were changed since' if is_damaged else 'another model or configuration'}",
            f"its files do not match {REPOSITORY_NAME}"
            if is_damaged
            else f"it was packaged from '{known.model}' ({known.precision}), or with other options",
            "give --force to replace it, or another --name",
        )


def _put(repository: Path, folders: Sequence[ModelFolder]) -> None:
    """Write all models beside the repository, then move each into its place."""
    with open_staging(repository, _OPTION) as staging:
        first: dict[FileSource, Path] = {}
        for folder in folders:
            for name, content in folder.contents().items():
                path = staging.directory / folder.entry.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    path.write_bytes(content)
                elif content in first:
                    _link(first[content], path)
                else:
                    _copy(content, path)
                    first[content] = path
        for folder in folders:
            name = folder.entry.name
            put_in_place(Staging(repository / name, staging.directory / name, staging.work))


def _link(first: Path, path: Path) -> None:
    """The same file again, as a hard link where the file system has them."""
    try:
        path.hardlink_to(first)
    except OSError:
        shutil.copyfile(first, path)


def _copy(source: FileSource, path: Path) -> None:
    digest = hashlib.sha256()
    with source.path.open("rb") as old, path.open("wb") as new:
        while chunk := old.read(2**20):
            digest.update(chunk)
            new.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise InputError(
            f"{source.path} changed since its hash was taken",
            "what is packaged has to be what was recorded",
            "try again; if it is an earlier version of the model, remove that version's folder",
        )
