"""Write a GGUF file of a known model's shape with random weights, which any engine can be timed on.

    .venv/bin/python benchmarks/random_model.py llama-3.2-1b.gguf
    .venv/bin/python benchmarks/random_model.py tiny.gguf --layers 2 --vocab 50000 --type f32

The vocabulary is that of the default model, filled up to the shape's size. Only speed can be
measured: what comes out means nothing. Weights repeat every 16 million, which no cache holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

import checkpoints

# Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 16, 32, 8, 64
VOCAB, CONTEXT, THETA, EPS = 128_256, 8192, 500_000.0, 1e-5

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    args = parser.parse_args()
    kind, file_type = TYPES[args.type]
    writer = gguf.GGUFWriter(args.file, "llama", use_temp_file=False)
    writer.add_name(args.file.stem)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(args.vocab)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    _add_vocabulary(writer, args.vocab)
    shapes = _shapes(args.layers, args.vocab)
    for name, shape in shapes.items():
        stored = kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        nbytes = int(np.prod(shape)) // _block(stored)[0] * _block(stored)[1]
        rows = shape if stored in _NATIVE else gguf.quant_shape_to_byte_shape(shape, stored)
        dtype = _NATIVE.get(stored, np.uint8)
        writer.add_tensor_info(name, rows, dtype, nbytes, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = np.random.default_rng(0).normal(scale=0.02, size=2**24).astype(np.float32)
    for shape in shapes.values():
        # One at a time: the whole model need not fit into memory.
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(gguf.quants.quantize(np.resize(noise, shape), kind))
    writer.close()
    print(f"wrote {args.file}, {args.file.stat().st_size / 1e9:.2f} GB")


_NATIVE = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
}


def _block(kind: gguf.GGMLQuantizationType) -> tuple[int, int]:
    """Return how many numbers a block of a type has, and its bytes."""
    return gguf.GGML_QUANT_SIZES[kind]


def _shapes(layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape; the head is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Copy the default model's, and fill it up with tokens that no text has."""
    fields = gguf.GGUFReader(checkpoints.resolve_source(None)).fields

    def read(name: str):
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens, types = read("tokens")[:size], read("token_type")[:size]
    missing = size - len(tokens)
    tokens += [f"<unused_{i}>" for i in range(missing)]
    types += [gguf.TokenType.UNUSED] * missing
    writer.add_tokenizer_model(read("model"))
    writer.add_tokenizer_pre(read("pre"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(read("merges"))
    writer.add_bos_token_id(read("bos_token_id"))
    writer.add_eos_token_id(read("eos_token_id"))


if __name__ == "__main__":
    main()
