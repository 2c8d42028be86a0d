import gguf
import ml_dtypes
import numpy as np
import pytest

from checkpoints import CorruptFileError, UnknownArchitectureError, open_checkpoint
from checkpoints.errors import UnsupportedDtypeError
from checkpoints.ggml_blocks import decode
from checkpoints.gguf_architectures import ARCHITECTURES
from checkpoints.gguf_file import unpermute_rope
from tests.unit.checkpoints import tiny_models as tiny

Kind = gguf.GGMLQuantizationType


def _is_decodable(kind: Kind) -> bool:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


BLOCK_KINDS = [kind for kind, (block, _) in gguf.GGML_QUANT_SIZES.items() if block > 1]
DECODABLE = [kind for kind in BLOCK_KINDS if _is_decodable(kind)]


def test_f16_gguf_equals_f16_safetensors_through_the_same_names(tmp_path):
    from_gguf = open_checkpoint(tiny.write_llama_gguf(tmp_path / "tiny.gguf"))
    from_folder = open_checkpoint(tiny.write_llama_folder(tmp_path / "folder"))
    assert sorted(from_gguf.names()) == sorted(from_folder.names())
    for name in from_gguf.names():
        assert from_gguf.info(name) == from_folder.info(name)
        np.testing.assert_array_equal(from_gguf.read(name), from_folder.read(name))
    shared = tiny.CONFIG.keys()
    assert {key: from_gguf.config[key] for key in shared} == from_folder.config


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_block_type_reads_as_gguf_dequantizes_it(tmp_path, kind):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # More blocks than are decoded at a time, and a remainder.
    rows, blocks_per_row = 411, 5
    data = np.random.default_rng(kind.value).integers(
        0, 256, (rows, blocks_per_row * block_bytes), np.uint8
    )
    tensors = {"token_embd.weight": (data, kind)}
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "q.gguf", tensors))
    info = checkpoint.info("model.embed_tokens.weight")
    assert (info.shape, info.dtype) == ((rows, blocks_per_row * block_size), kind.name)
    with np.errstate(all="ignore"):  # random scales overflow
        got = checkpoint.read("model.embed_tokens.weight")
        expected = gguf.quants.dequantize(data, kind)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", sorted(set(BLOCK_KINDS) - set(DECODABLE)), ids=lambda k: k.name)
def test_a_block_type_that_gguf_cannot_decode_is_a_named_error(kind):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    with pytest.raises(UnsupportedDtypeError, match=kind.name):
        decode(np.zeros(block_bytes, np.uint8), kind.name, (1, block_size))


def test_plain_types_keep_their_dtype(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    bfloat16 = values.astype(ml_dtypes.bfloat16).view(np.uint8).reshape(4, 12)
    tensors = {
        "token_embd.weight": values,
        "output.weight": values.astype(np.float16),
        "output_norm.weight": (bfloat16, Kind.BF16),
    }
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "plain.gguf", tensors))
    for name, dtype in {
        "model.embed_tokens.weight": "float32",
        "lm_head.weight": "float16",
        "model.norm.weight": "bfloat16",
    }.items():
        assert checkpoint.info(name).dtype == checkpoint.read(name).dtype.name == dtype
        np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), values)


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("trailing", [(), (5,)], ids=["bias", "weight"])
def test_unpermute_undoes_the_converters_permutation(heads, trailing):
    rows = np.random.default_rng(1).normal(size=(heads * 8, *trailing))
    np.testing.assert_array_equal(unpermute_rope(tiny.permute_rope(rows, heads), heads), rows)
    np.testing.assert_array_equal(tiny.permute_rope(unpermute_rope(rows, heads), heads), rows)


def test_q_and_k_biases_are_unpermuted_too(tmp_path):
    bias = np.arange(tiny.HEADS * tiny.HEAD_DIM, dtype=np.float32)
    tensors = tiny.gguf_llama_tensors(tiny.llama_weights())
    tensors["blk.0.attn_q.bias"] = tiny.permute_rope(bias, tiny.HEADS)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "bias.gguf", tensors))
    assert checkpoint.config["attention_bias"] is True
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)


def test_only_llama_is_permuted(tmp_path):
    weights = np.random.default_rng(2).normal(size=(64, 8)).astype(np.float32)
    tensors = {"token_embd.weight": weights, "blk.0.attn_q.weight": weights}
    path = tiny.write_gguf(tmp_path / "qwen.gguf", tensors, arch="qwen2")
    np.testing.assert_array_equal(
        open_checkpoint(path).read("model.layers.0.self_attn.q_proj.weight"), weights
    )


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3"])
def test_gemma_norms_lose_the_one_that_the_converter_added(tmp_path, arch):
    weights = np.random.default_rng(3).normal(size=(8,)).astype(np.float32)
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32)}
    norms = [n for n in ARCHITECTURES[arch].layer_tensors if n.endswith("norm")]
    tensors |= {f"blk.0.{name}.weight": weights + np.float32(1) for name in norms}
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "gemma.gguf", tensors, arch=arch))
    read = [name for name in checkpoint.names() if name.endswith("norm.weight")]
    assert len(read) == len(norms)
    for name in read:
        np.testing.assert_array_equal(
            checkpoint.read(name), weights + np.float32(1) - np.float32(1)
        )
    np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layer_names_are_those_that_llama_cpp_converts_from(arch):
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    to_gguf = gguf.get_tensor_name_map(kind, 2)
    row = ARCHITECTURES[arch]
    for gguf_name, hf_name in row.layer_tensors.items():
        assert to_gguf.get_name(row.layer_prefix.format(i=1) + hf_name) == f"blk.1.{gguf_name}"


def test_lm_head_is_tied_exactly_when_the_file_has_no_output(tmp_path):
    tensors = tiny.gguf_llama_tensors(tiny.llama_weights())
    tied = open_checkpoint(tiny.write_gguf(tmp_path / "tied.gguf", tensors))
    assert tied.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tied.names()
    tensors["output.weight"] = np.zeros((tiny.VOCAB, tiny.HIDDEN), np.float16)
    untied = open_checkpoint(tiny.write_gguf(tmp_path / "untied.gguf", tensors))
    assert untied.config["tie_word_embeddings"] is False
    assert untied.info("lm_head.weight").shape == (tiny.VOCAB, tiny.HIDDEN)


def test_all_tokenizer_keys_are_handed_on(tmp_path):
    text = open_checkpoint(tiny.write_llama_gguf(tmp_path / "tiny.gguf")).text
    expected = {k: v for k, v in tiny.default_keys("llama").items() if k.startswith("tokenizer.")}
    assert text.gguf_metadata == expected
    assert text.chat_template == "{{ messages }}"
    assert text.tokenizer_json is None


def test_arrays_outlive_the_checkpoint(tmp_path):
    checkpoint = open_checkpoint(tiny.write_llama_gguf(tmp_path / "tiny.gguf"))
    array = checkpoint.read("model.norm.weight")
    checkpoint.close()
    np.testing.assert_array_equal(array, tiny.llama_weights()["model.norm.weight"])


def test_unknown_architecture_names_the_known_ones(tmp_path):
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32)}
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors, arch="wavenet")
    with pytest.raises(UnknownArchitectureError, match="'wavenet'.*llama, qwen2"):
        open_checkpoint(path)


def test_unplaced_tensors_are_listed_all_at_once(tmp_path):
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "blk.0.mystery.weight": np.ones(4, np.float32),
        "blk.7.ffn_gate_exps.weight": np.ones(4, np.float32),
    }
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors)
    with pytest.raises(UnknownArchitectureError, match=r"mystery.*ffn_gate_exps"):
        open_checkpoint(path)


def test_mixture_of_experts_is_refused_by_name(tmp_path):
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32)}
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors, "granite", {"granite.expert_count": 8})
    with pytest.raises(UnknownArchitectureError, match="mixture-of-experts"):
        open_checkpoint(path)


MIXTRAL_KEYS = {"llama.expert_count": 4, "llama.expert_used_count": 2}


def test_one_expert_is_read_out_of_the_stack(tmp_path):
    rng = np.random.default_rng(5)
    data = gguf.quants.quantize(rng.normal(size=(4, 6, 64)).astype(np.float32), Kind.Q8_0)
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "blk.0.ffn_gate_exps.weight": (data, Kind.Q8_0),
    }
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors, "llama", MIXTRAL_KEYS)
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    info = checkpoint.info(name)
    assert (info.shape, info.dtype, info.nbytes) == ((6, 64), "Q8_0", data[2].nbytes)
    np.testing.assert_array_equal(checkpoint.read(name), gguf.quants.dequantize(data, Kind.Q8_0)[2])


def test_experts_that_are_not_stacked_are_a_corrupt_file(tmp_path):
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "blk.0.ffn_gate_exps.weight": np.ones(4, np.float32),
    }
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors, "llama", MIXTRAL_KEYS)
    with pytest.raises(CorruptFileError, match=r"ffn_gate_exps.weight of shape \[4\]"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"gate": (2, 3, 4)}, "without blk.0.ffn_up_exps.weight"),
        ({"gate": (2, 12), "up": (2, 12)}, "dimensions"),
    ],
)
def test_parts_that_make_no_whole_are_a_corrupt_file(tmp_path, shapes, message):
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32)}
    for part, shape in shapes.items():
        tensors[f"blk.0.ffn_{part}_exps.weight"] = np.ones(shape, np.float32)
    keys = {"gpt-oss.expert_count": 2, "gpt-oss.expert_used_count": 1}
    path = tiny.write_gguf(tmp_path / "x.gguf", tensors, "gpt-oss", keys)
    with pytest.raises(CorruptFileError, match=message):
        open_checkpoint(path)


def test_parts_of_different_sizes_are_a_corrupt_file(tmp_path):
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32)}
    tensors["blk.0.ffn_gate_exps.weight"] = np.ones((2, 3, 4), np.float32)
    tensors["blk.0.ffn_up_exps.weight"] = np.ones((2, 5, 4), np.float32)
    keys = {"gpt-oss.expert_count": 2, "gpt-oss.expert_used_count": 1}
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", tensors, "gpt-oss", keys))
    with pytest.raises(CorruptFileError, match=r"cannot be made of shape \[2, 3, 4\], \[2, 5, 4\]"):
        checkpoint.read("model.layers.0.mlp.experts.gate_up_proj")
