"""Safetensors weights of one model as a `Checkpoint`: one file, or shards with an index.

Builds no model.
"""

from pathlib import Path

import numpy as np

from checkpoints.checkpoint import TensorInfo
from checkpoints.errors import (
    CorruptFileError,
    DuplicateTensorError,
    MissingFileError,
    SourceNotFoundError,
    UnknownTensorError,
)
from checkpoints.folder_files import (
    read_config,
    read_generation_config,
    read_json,
    read_text_assets,
)
from checkpoints.safetensors_file import SafetensorsFile

_INDEX_SUFFIX = ".safetensors.index.json"
# Other layouts and partial weights that repositories keep beside the model.
_IGNORED = ("consolidated", "adapter_model")


class SafetensorsFolder:
    """A `Checkpoint` over safetensors. See the protocol for the contract of its methods."""

    def __init__(self, path: Path):
        """Open a folder, or one file whose folder holds `config.json`.

        Raises:
            CheckpointError: The subclass says what is wrong.
        """
        self.path = path
        folder = path if path.is_dir() else path.parent
        files, index = ([path], None) if not path.is_dir() else _weight_files(folder)
        self.config = read_config(folder)
        self.generation_config = read_generation_config(folder)
        self.text = read_text_assets(folder)
        self._files = {file.name: SafetensorsFile(file) for file in files}
        self._location = _by_index(folder, index, self._files) if index else _union(self._files)

    def names(self) -> list[str]:
        """Names of all tensors, as stored."""
        return list(self._location)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of one tensor."""
        return self._file_of(name).tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor."""
        return self._file_of(name).read(name)

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        for file in self._files.values():
            file.close()

    def _file_of(self, name: str) -> SafetensorsFile:
        if name not in self._location:
            raise UnknownTensorError(f"{self.path} has no tensor {name!r}; see names()")
        return self._files[self._location[name]]


def has_safetensors(folder: Path) -> bool:
    """Whether `folder` holds safetensors weights or an index of them."""
    return any(folder.glob("*.safetensors")) or any(folder.glob(f"*{_INDEX_SUFFIX}"))


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to open and, if there is one, the index's map from tensor to file name."""
    indices = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if indices:
        preferred = folder / f"model{_INDEX_SUFFIX}"
        index = _read_index(preferred if preferred in indices else indices[0])
        shards = [folder / name for name in sorted(set(index.values()))]
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise MissingFileError(
                f"{folder}: the index names {len(shards)} shards, {len(missing)} of them are "
                f"missing: {', '.join(missing)}; fetch them too"
            )
        return shards, index
    single = folder / "model.safetensors"
    if single.is_file():
        return [single], None
    found = sorted(folder.glob("*.safetensors"))
    files = [file for file in found if not file.name.startswith(_IGNORED)] or found
    if not files:
        raise SourceNotFoundError(f"{folder} holds no .safetensors file; check the path")
    return files, None


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(
            f"{path}: expected a non-empty object weight_map, got {weight_map!r:.80}; "
            "fetch the file again"
        )
    for name, file in weight_map.items():
        # A shard lies beside its index: anything else would read files the user never named.
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CorruptFileError(
                f"{path}: tensor {name!r} is said to be in {file!r}, expected a plain file name"
            )
    return weight_map


def _by_index(
    folder: Path, index: dict[str, str], files: dict[str, SafetensorsFile]
) -> dict[str, str]:
    absent = [f"{n} ({file})" for n, file in index.items() if n not in files[file].tensors]
    if absent:
        raise CorruptFileError(
            f"{folder}: {len(absent)} tensors are not in the shard that the index names: "
            f"{', '.join(absent[:20])}{' …' if len(absent) > 20 else ''}; "
            "index and shards belong to different models, fetch both again"
        )
    return index


def _union(files: dict[str, SafetensorsFile]) -> dict[str, str]:
    location: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if name in location:
                raise DuplicateTensorError(
                    f"tensor {name!r} is in {location[name]} and in {file_name}; "
                    "keep only the files of one model, or add their index"
                )
            location[name] = file_name
    return location
