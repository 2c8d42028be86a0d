"""Path → `Checkpoint`: looks at what is there and picks the reader. Reads no tensor itself."""

from pathlib import Path

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import BadMagicError, FileFormatError, SourceNotFoundError, readable
from checkpoints.gguf_file import GgufFile
from checkpoints.orbax_tree import is_orbax
from checkpoints.safetensors_folder import SafetensorsFolder, has_safetensors


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, a safetensors file, or a folder that holds either.

    Raises:
        CheckpointError: The subclass says what is wrong.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise SourceNotFoundError(f"no file or folder {path} exists; check the path")
    if path.name.endswith(".safetensors.index.json"):
        return SafetensorsFolder(path.parent)
    with readable(path), open(path, "rb") as file:
        start = file.read(9)
    if start.startswith(b"GGUF") or path.suffix == ".gguf":
        return GgufFile(path)
    if start[8:] == b"{" or path.suffix == ".safetensors":
        return SafetensorsFolder(path)
    raise BadMagicError(
        f"{path} is neither a GGUF nor a safetensors file (it starts with {start[:4]!r}); "
        "convert the model to one of these formats"
    )


def _open_folder(folder: Path) -> Checkpoint:
    if is_orbax(folder):
        raise FileFormatError(
            f"{folder} is an Orbax folder of jaxinfer's own tree; read it with restore_tree"
        )
    if has_safetensors(folder):
        return SafetensorsFolder(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufFile(ggufs[0])
    if ggufs:
        raise SourceNotFoundError(
            f"expected one GGUF file in {folder}, got {len(ggufs)}: "
            f"{', '.join(p.name for p in ggufs)}; name the file itself"
        )
    pickles = [p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))]
    hint = (
        f"its pickled weights ({', '.join(pickles[:3])}) are not read, because a pickle can run "
        "code; convert them to safetensors"
        if pickles
        else "expected *.safetensors, one *.gguf, or a folder written by `jaxinfer convert`"
    )
    raise SourceNotFoundError(f"{folder} holds no model: {hint}")
