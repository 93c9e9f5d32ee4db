"""Language models and tokenizers from a folder or by a Hugging Face id (the extra `hf`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from aggcli.config import RunConfig
from aggcli.errors import SettingError
from aggcli.policy import smollm2

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
"""The arithmetic of parameters and optimizer; bfloat16 is autocast over float32."""


HUB_SECONDS = 10
"""How long the hub has to answer."""


def need_extra(package: str, extra: str, what: str) -> None:
    """Raise `SettingError` where a package that an extra installs is not there."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise SettingError(f'{what} needs {package}; install it with pip install "aggcli[{extra}]"')


def load_model(name: str, config: RunConfig, device: torch.device) -> Any:
    """The model in a folder, or with a Hugging Face id, ready to be trained as the settings say. Raises `SettingError`."""
    need_extra("transformers", "hf", "--model")
    transformers: Any = import_module("transformers")

    training = config.training
    place, is_local = _place(name)
    with _in_one_line(name):
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            dtype=DTYPES[config.dtype or "float32"],
            local_files_only=is_local,
            use_safetensors=True,
            trust_remote_code=False,
        )
    module.eval().requires_grad_(True)
    module.generation_config = (
        transformers.GenerationConfig()
    )  # nothing of it but what aggcli asks for may shape what is sampled
    if training.lora_rank:
        _add_lora(module, training.lora_rank, half=config.dtype == "bfloat16")
    if training.gradient_checkpointing:
        _checkpoint_layers(module)
    module.to(device)
    if training.compile:
        getattr(module, module.base_model_prefix).compile(backend="inductor", dynamic=True)  # rows have many lengths
    return module


def _place(name: str) -> tuple[str, bool]:
    """Where the model is, and whether this machine has it already. Raises `SettingError` for a folder without a model, and for
    an id where neither the hub answers nor its cache has it."""
    folder = Path(name).expanduser()
    if name == smollm2.NAME and not folder.exists():
        return str(smollm2.smollm2_folder()), True
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SettingError(f"--model {name}: is no model folder: it has no config.json")
        return str(folder), True
    if folder.exists():
        raise SettingError(f"--model {name}: is a file; give the folder that holds config.json and the weights")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise SettingError(f"--model {name}: there is no such folder")
    return name, _is_only_cached(name)


def _is_only_cached(name: str) -> bool:
    """Whether the hub does not answer, and its cache on this machine has the model. Raises `SettingError` where it has not."""
    hub: Any = import_module("huggingface_hub")
    try:
        hub.HfApi().model_info(name, timeout=HUB_SECONDS)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
        return False  # it answers, or the name is none: transformers says it better
    except Exception as error:  # of whatever library it asks by
        if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
            return True
        reason = " ".join(str(error).split())
        raise SettingError(
            f"--model {name}: there is no such folder, and the hub of Hugging Face does not answer ({reason[:150]})"
        ) from None
    return False


@contextlib.contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """What transformers says of a model that it cannot load, in one line and without its warnings."""
    loggers, bars = (
        [logging.getLogger(it) for it in ("transformers", "huggingface_hub")],
        import_module("transformers.utils.logging"),
    )
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    except Exception as error:  # it lets through whatever its libraries raise on a damaged file
        said = " ".join(str(error).split()).replace(name, "it")
        raise SettingError(f"--model {name}: transformers cannot load it: {said[:300]}") from None
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        bars.enable_progress_bar()


def _add_lora(module: Any, rank: int, *, half: bool) -> None:
    """Freeze the model but for low-rank adapters of all its linear layers (Hu et al., 2022), which begin as no change."""
    need_extra("peft", "hf", "--lora-rank")
    peft: Any = import_module("peft")

    module.requires_grad_(False)
    if half:
        module.to(torch.bfloat16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0), module
        )
    for value in module.parameters():
        if value.requires_grad and half:
            value.data = value.data.float()


def _checkpoint_layers(module: Any) -> None:
    """Recompute each layer's activations in the backward pass. Layers only do so while they are in training mode; what is
    inside of them, dropout above all, stays out of it."""
    if not module.supports_gradient_checkpointing:
        raise SettingError(f"--gradient-checkpointing: {type(module).__name__} does not support it; leave it out")
    newer = getattr(module, "activation_checkpointing_enable", None)  # transformers 5.24 calls the other name deprecated
    (newer or module.gradient_checkpointing_enable)({"use_reentrant": False})
    for part in module.modules():
        if getattr(part, "gradient_checkpointing", False):
            part.training = True


@dataclass(frozen=True, eq=False)
class Speech:
    """A model's tokenizer, as tasks need it: prompts as ids, with the chat template where there is one, and ids as text."""

    tokenizer: Any
    name: str

    @property
    def end_id(self) -> int:
        found = self.tokenizer.eos_token_id
        if found is None:
            raise SettingError(
                f"--model {self.name}: its tokenizer has no end token (eos_token), so no response would ever end"
            )
        return int(found)

    @property
    def pad_id(self) -> int:
        found = self.tokenizer.pad_token_id
        return self.end_id if found is None else int(found)

    def prompt_ids(self, text: str) -> list[int]:
        """The prompt that asks for this text, up to where the response begins."""
        if self.tokenizer.chat_template:
            said = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        return list(self.tokenizer(text).input_ids)

    def text(self, ids: list[int]) -> str:
        """What was said, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def load_speech(name: str) -> Speech:
    """The tokenizer in a model folder, or of a Hugging Face id. Raises `SettingError`, also for one without an end token."""
    need_extra("transformers", "hf", "--model")
    transformers: Any = import_module("transformers")

    place, is_local = _place(name)
    with _in_one_line(name):
        speech = Speech(
            transformers.AutoTokenizer.from_pretrained(place, local_files_only=is_local, trust_remote_code=False), name
        )
    _ = speech.end_id
    return speech
