import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import (
    CheckpointError,
    CorruptFileError,
    DestinationExistsError,
    MissingFileError,
    NoSpaceError,
    TreeMismatchError,
    UnsupportedVersionError,
    WriteError,
    is_orbax,
    open_checkpoint,
    orbax_tree,
    read_infos,
    read_metadata,
    read_text_assets,
    restore_tree,
    save_tree,
)

ARRAYS = {
    "layers.0.attention.qkv": np.arange(48, dtype=np.float32).reshape(8, 6),
    "embed/odd name": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "scale": np.float32(3) * np.ones((), np.float32),
    "ids": np.arange(5, dtype=np.int32),
}
TARGETS = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in ARRAYS.items()}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "made" / "saved"
    save_tree(path, ARRAYS, {"config": {"a": 1}}, {"tokenizer.json": "{}"})
    return path


def only_child(folder: Path) -> str:
    (child,) = folder.iterdir()
    return child.name


def test_what_was_saved_comes_back(saved):
    restored = restore_tree(saved, TARGETS)
    assert restored.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert isinstance(restored[name], jax.Array)
        assert restored[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(restored[name]), array)
    assert read_metadata(saved) == {"config": {"a": 1}}
    assert read_infos(saved)["embed/odd name"].dtype == "bfloat16"
    assert read_text_assets(saved).tokenizer_json == "{}"
    assert is_orbax(saved)
    assert only_child(saved.parent) == "saved"


def test_restoring_casts_to_the_target(saved):
    targets = {name: jax.ShapeDtypeStruct(t.shape, jnp.bfloat16) for name, t in TARGETS.items()}
    restored = restore_tree(saved, targets)
    assert {array.dtype for array in restored.values()} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(
        np.asarray(restored["ids"]), ARRAYS["ids"].astype(ml_dtypes.bfloat16)
    )


def test_all_faults_are_listed_at_once(saved):
    targets = dict(TARGETS)
    del targets["ids"], targets["scale"]
    targets["new"] = jax.ShapeDtypeStruct((1,), jnp.float32)
    targets["embed/odd name"] = jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)
    with pytest.raises(TreeMismatchError) as caught:
        restore_tree(saved, targets)
    error = caught.value
    assert error.missing == ["new"]
    assert error.unexpected == ["scale", "ids"]
    assert error.misshapen == {"embed/odd name": ((3, 2), (2, 3))}
    for part in ("missing new", "unexpected scale", "unexpected ids", "expected [3, 2]"):
        assert part in str(error)


SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from checkpoints import restore_tree, save_tree
mesh = jax.make_mesh((2,), ("x",))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
array = np.arange(32, dtype=np.float32).reshape(8, 4)
path = Path(sys.argv[1])
save_tree(path, {"w": jax.device_put(array, rows), "b": array[0]})
# Another sharding than the one it was saved with.
restored = restore_tree(path, {
    "w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=columns),
    "b": jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P())),
})
assert restored["w"].sharding == columns, restored["w"].sharding
assert {s.data.shape for s in restored["w"].addressable_shards} == {(8, 2)}
assert np.array_equal(restored["w"], array) and np.array_equal(restored["b"], array[0])
assert len(restored["b"].sharding.device_set) == 2
print("fine")
"""


def test_arrays_go_from_one_sharding_into_another(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.stdout == "fine\n", run.stderr


def test_an_existing_destination_is_never_touched(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").write_text("x")
    with pytest.raises(DestinationExistsError, match="exists already"):
        save_tree(tmp_path / "m", ARRAYS)
    assert only_child(tmp_path / "m") == "precious"


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_orbax(*_args, **_kwargs):
    # How Orbax's C++ layer words it.
    raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes: No space left on device")


@pytest.mark.parametrize("failure", [full_disk, full_disk_in_orbax])
@pytest.mark.parametrize("step", ["arrays", "text"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, failure, step):
    if step == "arrays":
        monkeypatch.setattr(orbax_tree, "_write_arrays", failure)
    else:
        monkeypatch.setattr(Path, "write_text", failure)
    with pytest.raises(NoSpaceError, match="the disk ran full"):
        save_tree(tmp_path / "m", ARRAYS, text_files={"tokenizer.json": "{}"})
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpaceError, match=r"needs .* MB, but only"):
        save_tree(tmp_path / "m", ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rename_leaves_nothing_behind(tmp_path, monkeypatch):
    def refused(*_args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(WriteError, match="Permission denied"):
        save_tree(tmp_path / "m", ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(folder, _arrays):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_tree, "_write_arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tree(tmp_path / "m", ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_damaged_folders_are_named_errors(saved):
    manifest = saved / "jaxinfer.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(UnsupportedVersionError, match="got 'jaxinfer-orbax' version 99"):
        read_metadata(saved)
    manifest.write_text(json.dumps(content | {"arrays": {"x": 3}}))
    with pytest.raises(CorruptFileError, match="damaged"):
        restore_tree(saved, TARGETS)
    manifest.write_text(json.dumps(content))
    for file in (saved / "arrays").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptFileError, match="is damaged"):
        restore_tree(saved, TARGETS)
    shutil.rmtree(saved / "arrays")
    with pytest.raises(MissingFileError, match="has no folder arrays"):
        restore_tree(saved, TARGETS)
    manifest.unlink()
    assert not is_orbax(saved)
    with pytest.raises(MissingFileError, match=r"has no jaxinfer\.json"):
        read_metadata(saved)


def test_an_orbax_folder_is_no_checkpoint_of_hf_names(saved):
    with pytest.raises(CheckpointError, match="restore_tree"):
        open_checkpoint(saved)
