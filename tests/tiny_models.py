"""Random language models of a few thousand parameters, built here; nothing is downloaded."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

FAMILIES = ("llama", "qwen2", "gpt2")
VOCABULARY = 40
LETTERS = ("<pad>", "<end>", *"0123456789+-=?. abcdefghijklmnopqrstuvwxyz")
"""The tokens of the model folder, by id."""


def _built(family: str, vocabulary: int) -> Any:
    pytest.importorskip("transformers")
    library: Any = import_module("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = library.GPT2Config(
            vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4
        )
        return library.GPT2LMHeadModel(config)
    config_class, model_class = {
        "llama": (library.LlamaConfig, library.LlamaForCausalLM),
        "qwen2": (library.Qwen2Config, library.Qwen2ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=family == "qwen2",
    )
    return model_class(config)


@cache
def tiny(family: str) -> Any:
    """In float64, without dropout. A test leaves its parameters as they are."""
    return _built(family, VOCABULARY).double().eval()


def write_tiny(folder: Path, *, end_token: str | None = "<end>") -> Path:
    """A tiny Llama with a tokenizer of single characters, as an ordinary model folder."""
    pytest.importorskip("transformers")
    library: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    speech = library.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end_token, pad_token="<pad>", unk_token="?")
    folder.mkdir(parents=True, exist_ok=True)
    speech.save_pretrained(folder)
    _built("llama", len(LETTERS)).save_pretrained(folder)
    return folder
