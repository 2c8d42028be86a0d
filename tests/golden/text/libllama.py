"""llama.cpp's own tokenizer, as a reference: its shared library, loaded for the vocabulary only.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    # then: generate.py --libllama package/bins/linux-x64

The parameter record differs between releases of llama.cpp; this is the one of that package.
"""

from __future__ import annotations

import ctypes
from pathlib import Path


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("others", ctypes.c_char * 72),
        ("vocab_only", ctypes.c_bool),
        ("flags", ctypes.c_char * 7),
    )


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Vocabulary:
    """The tokenizer of one GGUF file, which may hold no tensors at all."""

    def __init__(self, library_folder: Path, path: Path):
        self._log: list[str] = []
        self._callback = _LogCallback(lambda _, text, __: self._log.append(text.decode()))
        for name in ("libggml-base.so", "libggml.v0.5.0.so"):
            ctypes.CDLL(str(library_folder / name), mode=ctypes.RTLD_GLOBAL)
        lib = self._lib = ctypes.CDLL(str(library_folder / "libllama.v0.5.0.so"))
        lib.llama_log_set.argtypes = [_LogCallback, ctypes.c_void_p]
        lib.llama_log_set(self._callback, None)
        lib.llama_model_default_params.restype = _ModelParams
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        lib.llama_tokenize.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ]
        params = lib.llama_model_default_params()
        params.vocab_only = True
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError("".join(self._log[-4:]))
        self._vocab = lib.llama_model_get_vocab(model)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, room, add_special, True)
        if count < 0:
            raise RuntimeError(f"{text!r:.40} needs {-count} tokens")
        return list(ids[:count])
