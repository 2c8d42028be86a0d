"""Bytes on disk → HF-named numpy arrays, an HF-style config and the tokenizer's sources.

Reads GGUF and safetensors, saves and restores our own sharded tree with Orbax, fetches from the
Hugging Face hub. Knows no model and imports no `jaxinfer`.
"""

from checkpoints.checkpoint import Checkpoint, TensorInfo, TextAssets
from checkpoints.errors import (
    BadMagicError,
    CheckpointError,
    CorruptFileError,
    DefaultModelMissingError,
    DestinationExistsError,
    DownloadError,
    DuplicateTensorError,
    FileFormatError,
    MissingFileError,
    NoSpaceError,
    SourceNotFoundError,
    TreeMismatchError,
    TruncatedFileError,
    UnknownArchitectureError,
    UnknownTensorError,
    UnreadableFileError,
    UnsupportedDtypeError,
    UnsupportedVersionError,
    WriteError,
)
from checkpoints.folder_files import read_text_assets
from checkpoints.opening import open_checkpoint
from checkpoints.orbax_tree import is_orbax, read_infos, read_metadata, restore_tree, save_tree
from checkpoints.source import (
    DEFAULT_NAME,
    InstalledModel,
    default_model_path,
    installed_models,
    resolve_source,
)

__all__ = [
    "DEFAULT_NAME",
    "BadMagicError",
    "Checkpoint",
    "CheckpointError",
    "CorruptFileError",
    "DefaultModelMissingError",
    "DestinationExistsError",
    "DownloadError",
    "DuplicateTensorError",
    "FileFormatError",
    "InstalledModel",
    "MissingFileError",
    "NoSpaceError",
    "SourceNotFoundError",
    "TensorInfo",
    "TextAssets",
    "TreeMismatchError",
    "TruncatedFileError",
    "UnknownArchitectureError",
    "UnknownTensorError",
    "UnreadableFileError",
    "UnsupportedDtypeError",
    "UnsupportedVersionError",
    "WriteError",
    "default_model_path",
    "installed_models",
    "is_orbax",
    "open_checkpoint",
    "read_infos",
    "read_metadata",
    "read_text_assets",
    "resolve_source",
    "restore_tree",
    "save_tree",
]
