import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import (
    BadMagicError,
    CorruptFileError,
    DuplicateTensorError,
    MissingFileError,
    SourceNotFoundError,
    TruncatedFileError,
    UnknownTensorError,
    UnsupportedDtypeError,
    open_checkpoint,
)
from checkpoints.safetensors_file import DTYPES, SafetensorsFile
from tests.unit.checkpoints import tiny_models as tiny


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, dtype="F32", start=0, stop=None):
    stop = start + 4 * int(np.prod(shape)) if stop is None else stop
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_sharded_equals_single(tmp_path):
    single = open_checkpoint(tiny.write_llama_folder(tmp_path / "single"))
    sharded = open_checkpoint(tiny.write_llama_folder(tmp_path / "sharded", shards=3))
    assert sorted(sharded.names()) == sorted(single.names())
    for name in single.names():
        assert sharded.info(name) == single.info(name)
        np.testing.assert_array_equal(sharded.read(name), single.read(name))


@pytest.mark.parametrize("way", ["folder", "file", "index"])
def test_folder_file_and_index_open_the_same_model(tmp_path, way):
    folder = tiny.write_llama_folder(tmp_path / "m", shards=2 if way == "index" else 1)
    file = {
        "folder": folder,
        "file": folder / "model.safetensors",
        "index": folder / "model.safetensors.index.json",
    }[way]
    checkpoint = open_checkpoint(file)
    assert checkpoint.config == tiny.CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert checkpoint.text.tokenizer_json == '{"model": {}}'
    assert checkpoint.text.chat_template == "{{ messages }}"
    assert checkpoint.text.gguf_metadata is None
    weights = tiny.llama_weights()
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.read(name), weights[name])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_round_trips(tmp_path, dtype):
    values = np.arange(12).reshape(3, 4).astype(dtype)
    names = {v: k for k, v in DTYPES.items()}
    header = {"x": entry([3, 4], names[dtype], 0, values.nbytes)}
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(header, values.tobytes()))
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.tensors["x"].dtype == dtype.name
    assert file.read("x").dtype == dtype
    assert file.read("x").tobytes() == values.tobytes()


def test_bfloat16_written_by_the_reference_library_reads_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).normal(size=(7, 5)).astype(ml_dtypes.bfloat16)
    folder = tiny.write_llama_folder(tmp_path / "m")
    save_file({"x": values, "empty": np.zeros((0, 4), np.float32)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.info("x").dtype == "bfloat16"
    assert checkpoint.read("x").tobytes() == values.tobytes()
    assert checkpoint.read("empty").shape == (0, 4)


def test_arrays_outlive_the_checkpoint(tmp_path):
    checkpoint = open_checkpoint(tiny.write_llama_folder(tmp_path / "m"))
    array = checkpoint.read("model.norm.weight")
    checkpoint.close()
    np.testing.assert_array_equal(array, tiny.llama_weights()["model.norm.weight"])


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_reading_never_holds_more_than_the_largest_tensor(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m")
    tensor_bytes, count = 16 << 20, 8
    tensor = np.zeros(tensor_bytes, np.uint8)
    save_file({f"t{i}": tensor for i in range(count)}, folder / "model.safetensors")
    script = (
        "import resource, sys\n"
        "from checkpoints import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for name in checkpoint.names(): checkpoint.read(name).max()\n"
        "print(peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(run.stdout) * 1024 < 2 * tensor_bytes


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", TruncatedFileError, "is empty"),
        (b"1234", TruncatedFileError, "4 bytes"),
        (b"<html>error page</html>", BadMagicError, "not a safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", BadMagicError, "a length of 4611686018427387904"),
        (struct.pack("<Q", 5000) + b"{}", TruncatedFileError, "inside its header"),
        (safetensors_bytes(b"{nonsense"), CorruptFileError, "not JSON"),
        (safetensors_bytes(b"{\xff\xfe}"), CorruptFileError, "not JSON"),
        (safetensors_bytes(b"{" * 90_000), CorruptFileError, "not JSON"),
        (safetensors_bytes(b'{"a":1,"a":2}'), DuplicateTensorError, "'a' twice"),
        (safetensors_bytes({"a": 3}), CorruptFileError, "malformed entry"),
        (safetensors_bytes({"a": entry([-1, 2])}), CorruptFileError, "malformed entry"),
        (safetensors_bytes({"a": entry([2], "F4")}), UnsupportedDtypeError, "'F4'"),
        (safetensors_bytes({"a": entry([2], stop=99)}), CorruptFileError, "gives it 99"),
        (safetensors_bytes({"a": entry([2])}, b"1234567"), TruncatedFileError, "tensor data"),
        (safetensors_bytes({"a": entry([2**40])}), TruncatedFileError, "tensor data"),
    ],
)
def test_each_fault_of_a_file_has_its_name(tmp_path, content, error, message):
    folder = tiny.write_llama_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


def test_a_file_cut_anywhere_is_truncated(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(1, 3000, 17), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TruncatedFileError):
            open_checkpoint(folder)


def test_missing_shards_are_listed_all_at_once(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m", shards=4)
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00004-of-00004.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model-00002-of-00004.*model-00004-of-00004"):
        open_checkpoint(folder)


def test_tensors_absent_from_their_shard_are_listed_all_at_once(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(["x", "y"], "model-00001-of-00002.safetensors")
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=r"2 tensors.*x \(.*y \("):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../x"}, {"a": "/etc/x"}])
def test_a_damaged_index_is_a_named_error(tmp_path, weight_map):
    folder = tiny.write_llama_folder(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptFileError, match="expected"):
        open_checkpoint(folder)


def test_one_name_in_two_files_without_an_index_is_an_error(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(folder).names()) == len(tiny.llama_weights())
    save_file(tiny.llama_weights(), folder / "more.safetensors")
    with pytest.raises(DuplicateTensorError, match=r"model-0000.*more\.safetensors"):
        open_checkpoint(folder)


def test_missing_or_damaged_config(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CorruptFileError, match="expected a JSON object"):
        open_checkpoint(folder)
    (folder / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(CorruptFileError, match="UTF-8"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"no config\.json"):
        open_checkpoint(folder)


def test_a_wrong_tensor_name_is_a_named_error(tmp_path):
    with pytest.raises(UnknownTensorError, match="'nope'"):
        open_checkpoint(tiny.write_llama_folder(tmp_path / "m")).read("nope")


def test_the_chat_template_comes_from_the_newest_place(tmp_path):
    folder = tiny.write_llama_folder(tmp_path / "m")
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(folder).text.chat_template == "D"
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert open_checkpoint(folder).text.chat_template == "J"
    (folder / "chat_template.jinja").write_text("{{ newest }}")
    assert open_checkpoint(folder).text.chat_template == "{{ newest }}"


def test_what_is_no_checkpoint_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no file or folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(SourceNotFoundError, match="holds no model"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceNotFoundError, match=r"pytorch_model\.bin.*convert them"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadMagicError, match="neither a GGUF nor a safetensors"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_a_folder_with_one_gguf_opens_and_with_two_asks(tmp_path):
    tiny.write_llama_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).config["model_type"] == "llama"
    tiny.write_llama_gguf(tmp_path / "b.gguf")
    with pytest.raises(SourceNotFoundError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_the_content_decides_not_the_name(tmp_path):
    path = tiny.write_llama_gguf(tmp_path / "blob")
    assert open_checkpoint(path).config["model_type"] == "llama"
    impostor = tiny.write_llama_folder(tmp_path / "m") / "model.safetensors"
    with pytest.raises(BadMagicError, match="is not a GGUF file"):
        open_checkpoint(impostor.rename(tmp_path / "impostor.gguf"))
