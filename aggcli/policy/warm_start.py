"""Where RL starts: a policy taught on a task's demonstrations until about half of its answers are right.

The files in the package are float32 and were made by

    python -m aggcli.policy.warm_start --task running-sum --output aggcli/data/warm_start/running-sum-6.safetensors
    python -m aggcli.policy.warm_start --task control --output aggcli/data/warm_start/control.safetensors

Repeating a command on one machine gives the same file bit for bit (seen with torch 2.13.0, CPU, AVX-512); other
machines differ in the last bits of each product, and hence in the file. Any other task or policy is taught when it is first
asked for, and kept under `$XDG_CACHE_HOME/aggcli` (`~/.cache/aggcli`), named by a hash of all its settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import sys
import typing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Generator

from aggcli.errors import SettingError
from aggcli.files import whole_file
from aggcli.policy.groups import one_thread
from aggcli.policy.log_probs import packed_log_probs
from aggcli.policy.packing import pack
from aggcli.policy.transformer import Parameters, PolicyConfig, initial_parameters, shapes
from aggcli.tasks import TASKS, SmallTask, make_task

SHIPPED = Path(__file__).parent.parent / "data" / "warm_start"
STEPS, BATCH, SEED = 500, 128, 0
LEARNING_RATE, WARM_UP = 6e-3, 50
RECIPE = 1
"""Goes up whenever demonstrations, policy or learning change, so that old cached files are not used."""
METADATA = "aggcli"
LENGTH_STEP = 64
"""Policies hold a multiple of this many tokens, so that most response limits share one warm start."""


def default_policy(task: SmallTask, max_response_length: int) -> PolicyConfig:
    """The small policy for a task and a response limit: 2 layers of width 64, about 100 thousand parameters."""
    longest = task.prompt_length + max_response_length
    return PolicyConfig(len(task.vocabulary), max_length=-(-longest // LENGTH_STEP) * LENGTH_STEP)


@one_thread()
def warm_start(task: SmallTask, config: PolicyConfig, steps: int = STEPS, batch: int = BATCH, seed: int = SEED) -> Parameters:
    """Teach a new policy of one run (R = 1, float32, CPU) on `steps` batches of demonstrations. Deterministic.

    AdamW on the mean negative log-likelihood of the response tokens; the learning rate rises for `WARM_UP` steps and then
    falls to 0 along a cosine, both as if `steps` were all.
    """
    generator = Generator().manual_seed(seed)
    parameters = initial_parameters(config, generator)
    for value in parameters.values():
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        tokens_BL, prompt_length, length_B = task.demonstrations(generator, batch)
        check_fits(config, int(length_B.max()), task.name)
        packing = pack(tokens_BL[None], prompt_length, (length_B - prompt_length)[None])
        log_prob_RBC, _ = packed_log_probs(parameters, config, packing)
        loss = -log_prob_RBC.sum() / packing.valid_RBC.sum()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate_share(step, steps)
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


def learning_rate_share(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to 0."""
    rising = min((step + 1) / WARM_UP, 1.0)
    return rising * 0.5 * (1 + torch.cos(torch.tensor(step / steps * torch.pi, dtype=torch.float64)).item())


def check_fits(config: PolicyConfig, longest: int, task: str) -> None:
    if longest > config.max_length:
        raise SettingError(
            f"task {task}: its demonstrations have up to {longest} tokens with the prompt, the policy holds"
            f" {config.max_length}; raise --max-response-length"
        )


# -- files ----------------------------------------------------------------------------------------------------------


def starting_policy(task: SmallTask, config: PolicyConfig) -> Parameters:
    """The warm start of this task and policy (R = 1, float32, CPU): shipped, cached, or made now and cached."""
    settings = settings_of(task, config)
    cached = cache_folder() / f"{key_of(settings)}.safetensors"
    for path in (SHIPPED / file_name(task), cached):
        found = load_matching(path, settings)
        if found is not None:
            return found
    parameters = warm_start(task, config)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        save_policy(cached, parameters, settings, command_of(task, config, cached.name))
    return parameters


def settings_of(
    task: SmallTask, config: PolicyConfig, steps: int = STEPS, batch: int = BATCH, seed: int = SEED
) -> dict[str, object]:
    """Everything that a warm start depends on, as JSON values."""
    return {
        "recipe": RECIPE,
        "task": task.name,
        "task_settings": task.settings,
        "policy": dataclasses.asdict(config),
        "steps": steps,
        "batch": batch,
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "warm_up": WARM_UP,
    }


def key_of(settings: dict[str, object]) -> str:
    """A name for these settings: 16 hex digits of a SHA-256 hash."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/aggcli`, or `~/.cache/aggcli`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aggcli"


def file_name(task: SmallTask) -> str:
    """`running-sum-6.safetensors`: the task and its settings."""
    return "-".join([task.name, *(str(value) for value in task.settings.values())]) + ".safetensors"


def save_policy(path: Path, parameters: Parameters, settings: dict[str, object], command: str) -> None:
    """Write a safetensors file whose metadata hold the settings and the command; whole or not at all."""
    about = {"settings": settings, "command": command, "torch": str(torch.__version__)}
    # One key: safetensors writes several in an order that changes from run to run.
    content = save(
        {name: value.contiguous() for name, value in parameters.items()}, {METADATA: json.dumps(about, sort_keys=True)}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        draft.write_bytes(content)


def load_policy(path: Path) -> tuple[Parameters, dict[str, object]]:
    """Parameters and metadata (`settings`, `command`, `torch`); raises `SettingError` for a file that is no such thing."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[METADATA])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SettingError(f"{path}: is not a policy that aggcli saved ({error}); delete it or make it again") from error


def load_matching(path: Path, settings: dict[str, object]) -> Parameters | None:
    """The policy in `path`, or None where there is none that was made with these settings."""
    try:
        parameters, about = load_policy(path)
    except SettingError:
        return None
    config = PolicyConfig(**typing.cast(dict, settings["policy"]))
    expected = {name: (1, *shape) for name, shape in shapes(config).items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    return parameters if about["settings"] == settings and found == expected else None


def command_of(task: SmallTask, config: PolicyConfig, output: str) -> str:
    """The shell command that makes this warm start again."""
    words = ["python", "-m", "aggcli.policy.warm_start", "--task", task.name]
    for name, value in task.settings.items():
        words += [f"--{name}", str(value)]
    return shlex.join([*words, "--max-length", str(config.max_length), "--output", output])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m aggcli.policy.warm_start", description="Make a warm-start file.")
    parser.add_argument("--task", required=True, choices=sorted(TASKS))
    parser.add_argument("--digits", type=int, help="digits of a running-sum question (default: 6)")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and response that the policy holds (default: 64)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    given = parser.parse_args(arguments)
    task = make_task(given.task, **({} if given.digits is None else {"digits": given.digits}))
    config = default_policy(task, task.default_max_response_length)
    if given.max_length is not None:
        config = dataclasses.replace(config, max_length=given.max_length)
    save_policy(given.output, warm_start(task, config), settings_of(task, config), command_of(task, config, given.output.name))


if __name__ == "__main__":
    main(sys.argv[1:])
