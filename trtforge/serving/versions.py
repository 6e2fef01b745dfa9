"""A new version of a model beside its earlier ones: the server moves to it without a gap, and can go back.

A model has one configuration for all its versions, so they have the same inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file
from trtforge.serving.model_file import MODEL_FILE_NAME, ModelFile, load_model_file
from trtforge.serving.repository import REPOSITORY_NAME, FileSource, ModelFolder, load_repository


def add_earlier_versions(folder: ModelFolder, model: ModelFile, repository: Path) -> ModelFolder:
    """The folder with the versions below its own that a repository holds.

    Args:
        folder: the new version.
        model: what its `model.json` says.
        repository: where it goes.

    Raises:
        InputError: an earlier version takes or gives something else.
    """
    if not (repository / REPOSITORY_NAME).exists():
        return folder
    entry, known = folder.entry, load_repository(repository).model(folder.entry.name)
    if known is None or known.kind != entry.kind:
        return folder
    base = repository / entry.name
    # An engine that was built here has no recorded hash.
    built = {name: sha256_of_file(base / name) for name in known.local_files if (base / name).is_file()}
    earlier = {
        name: FileSource(base / name, sha256)
        for name, sha256 in (known.files | built).items()
        if name.split("/")[0].isdigit() and int(name.split("/")[0]) < entry.version and (base / name).is_file()
    }
    for name in earlier:
        number, file = name.split("/", 1)
        if file == MODEL_FILE_NAME:
            _check_same(entry.name, number, load_model_file(base / name), model)
    extends = known.version if known.version < entry.version else None
    return dataclasses.replace(folder, files={**earlier, **folder.files}, extends=extends)


def _check_same(name: str, number: str, old: ModelFile, new: ModelFile) -> None:
    was, now = ((file.max_batch_size, file.inputs, file.outputs) for file in (old, new))
    if was != now:
        raise InputError(
            f"model '{name}' cannot get another version: it takes or gives something else than version {number}",
            "all versions of a model share one configuration",
            "give another --name, or remove the earlier version",
        )
