"""Whatever bytes a GGUF file holds, opening it works or is one of our named errors."""

import struct
import tracemalloc

import numpy as np
import pytest

from checkpoints import (
    BadMagicError,
    CheckpointError,
    CorruptFileError,
    DuplicateTensorError,
    MissingFileError,
    TruncatedFileError,
    UnknownTensorError,
    UnsupportedDtypeError,
    UnsupportedVersionError,
    open_checkpoint,
)
from tests.unit.checkpoints import tiny_models as tiny


def header(version=3, tensors=0, keys=0, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def string(text):
    return struct.pack("<Q", len(text)) + text


def tensor_entry(name=b"token_embd.weight", dims=(32, 2), kind=0, offset=0):
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def opened(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", TruncatedFileError, "is empty"),
        (b"<html>not found</html>", BadMagicError, "got b'<htm'"),
        (b"GG", BadMagicError, "got b'GG'"),
        (b"GGUF", TruncatedFileError, "inside its header"),
        (header(version=1), UnsupportedVersionError, "version 1"),
        (header(version=99), UnsupportedVersionError, "version 99"),
        (header(version=3 << 24), UnsupportedVersionError, "big-endian"),
        (header(magic=b"tjgg"), UnsupportedVersionError, "before GGUF"),
        (header(tensors=2**62), TruncatedFileError, "fetch the file again"),
        (header(keys=2**63), TruncatedFileError, "fetch the file again"),
        (header(keys=1) + struct.pack("<Q", 2**60) + b"x" * 9, TruncatedFileError, "metadata key"),
        (header(keys=1) + string(b"k") + struct.pack("<I", 77), CorruptFileError, "type 77"),
        (
            header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**61),
            TruncatedFileError,
            "fetch the file again",
        ),
        (
            header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 5, 2**61),
            TruncatedFileError,
            "fetch the file again",
        ),
        (
            header(keys=1) + string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9,
            CorruptFileError,
            "nests",
        ),
        (
            header(keys=2) + (string(b"k") + struct.pack("<IB", 7, 1)) * 2,
            CorruptFileError,
            "occurs twice",
        ),
        (header(tensors=2) + tensor_entry() * 2 + bytes(999), DuplicateTensorError, "token_embd"),
        (header(tensors=1) + tensor_entry(dims=(1,) * 9), CorruptFileError, "9 dimensions"),
        (header(tensors=1) + tensor_entry(kind=250), UnsupportedDtypeError, "type number 250"),
        (header(tensors=1) + tensor_entry(dims=(33, 2), kind=8), CorruptFileError, "rows of 33"),
        (header(tensors=1) + tensor_entry(dims=(2**40, 2**40)), TruncatedFileError, "tensor data"),
        (header(tensors=1) + tensor_entry(offset=2**63), TruncatedFileError, "tensor data"),
        (header(), CorruptFileError, "general.architecture"),
    ],
)
def test_each_fault_has_its_name(tmp_path, content, error, message):
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            opened(tmp_path, content)
        # No allocation follows a number in the file.
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_is_truncated(tmp_path):
    whole = tiny.write_llama_gguf(tmp_path / "whole.gguf").read_bytes()
    lengths = [*range(1, 2600, 13), len(whole) // 2, len(whole) - 64]
    for length in lengths:
        with pytest.raises((TruncatedFileError, BadMagicError)):
            opened(tmp_path, whole[:length])


def test_random_damage_never_raises_anything_else(tmp_path):
    whole = tiny.write_llama_gguf(tmp_path / "whole.gguf").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for position in rng.integers(0, 3400, rng.integers(1, 6)):
            damaged[position] = rng.integers(0, 256)
        try:
            checkpoint = opened(tmp_path, bytes(damaged))
            for name in checkpoint.names():
                checkpoint.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 100


WRONG_VALUES = ("x", True, -0.5, 0, 2**32 - 1, 1e30, 7, ["a"], [1, 2], [1])


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
def test_metadata_of_the_wrong_type_never_raises_anything_else(tmp_path, arch):
    tensors = tiny.gguf_llama_tensors(tiny.llama_weights())
    if arch != "llama":
        tensors = {"token_embd.weight": tensors["token_embd.weight"]}
    keys = [key for key in tiny.default_keys(arch) if not key.startswith("tokenizer.")] + [
        f"{arch}.attention.key_length",
        f"{arch}.attention.sliding_window",
        f"{arch}.attention.sliding_window_pattern",
        f"{arch}.rope.scaling.type",
        f"{arch}.rope.scaling.factor",
        f"{arch}.rope.scaling.original_context_length",
        "split.count",
        "general.alignment",
        "tokenizer.huggingface.json",
    ]
    for key in keys:
        for value in WRONG_VALUES:
            window = {f"{arch}.attention.sliding_window": 8}
            path = tiny.write_gguf(tmp_path / "x.gguf", tensors, arch, window | {key: value})
            try:
                checkpoint = open_checkpoint(path)
                for name in checkpoint.names():
                    checkpoint.read(name)
            except CheckpointError:
                pass


def test_a_part_of_a_split_model_says_how_to_join(tmp_path):
    keys = {"split.count": 3, "split.no": 1}
    with pytest.raises(MissingFileError, match="one of 3 parts.*llama-gguf-split --merge"):
        open_checkpoint(tiny.write_llama_gguf(tmp_path / "x.gguf", **keys))


def test_a_wrong_tensor_name_is_a_named_error(tmp_path):
    checkpoint = open_checkpoint(tiny.write_llama_gguf(tmp_path / "x.gguf"))
    for method in (checkpoint.read, checkpoint.info):
        with pytest.raises(UnknownTensorError, match="'nope'"):
            method("nope")
