"""What a setting may be: ranges, and settings that exclude each other. Each refusal names the flag and what must hold."""

from __future__ import annotations

import math

from aggcli.config.sections import SINKS, RunConfig, TrainingConfig
from aggcli.errors import SettingError, nearest
from aggcli.rules import check_divisor


def check(config: RunConfig) -> None:
    """Refuse settings out of range, and those that exclude each other. Raises `SettingError`."""
    objective, layout, synthetic = config.objective, config.layout, config.source.synthetic
    for name in config.log_to:
        if name not in SINKS:
            raise SettingError(f"--log-to {name}: is not known{nearest(name, SINKS)}")
    check_divisor(objective.loss_aggregation_divisor)
    _need("eps_clip", objective.eps_clip, 0 < objective.eps_clip < 1, "above 0 and below 1")
    if objective.eps_clip_high is not None:
        _need("eps_clip_high", objective.eps_clip_high, 0 < objective.eps_clip_high < math.inf, "a positive number")
    if objective.eps_clip_c is not None and objective.policy_loss in ("gmpo", "cispo", "sapo"):
        raise SettingError(f"--eps-clip-c: {objective.policy_loss} has no clipped loss for a dual clip to bound; leave it out")
    if objective.eps_clip_c is not None:
        _need("eps_clip_c", objective.eps_clip_c, 1 < objective.eps_clip_c < math.inf, "above 1")
    for name in ("kl_coef", "entropy_coef"):
        value = getattr(objective, name)
        _need(name, value, 0 <= value < math.inf, "a finite number of at least 0")
    for name in ("dp", "cp", "max_tokens_per_gpu", "micro_batch_size", "global_batch_size"):
        value = getattr(layout, name)
        _need(name, value, value is None or value >= 1, "at least 1")
    if layout.max_tokens_per_gpu is not None and layout.micro_batch_size is not None:
        raise SettingError("--max-tokens-per-gpu and --micro-batch-size are two ways to cut micro-batches; give one")
    for name in ("group_size", "max_response_length"):
        value = getattr(config.source if name == "group_size" else config, name)
        _need(name, value, value is None or value >= 1, "at least 1")
    if any(not path.strip() for path in config.source.rollouts):
        raise SettingError("--rollouts is empty: give a file, a folder, a glob, `example` or `synthetic`")
    if config.source.length_unit is not None and config.source.tokenizer is not None:
        raise SettingError("--length-unit and --tokenizer are two ways to count lengths; give one")
    if config.source.drop_zero_variance and not config.source.rollouts:
        raise SettingError("--drop-zero-variance is for recorded rollouts; use --dynamic-sampling to train on --task")
    reward_weights(config.source.reward_weights)
    _need("seed", config.seed, config.seed >= 0, "at least 0")
    _need("correct_threshold", config.correct_threshold, math.isfinite(config.correct_threshold), "a finite number")
    for name in ("synthetic_steps", "synthetic_prompts", "synthetic_max_length"):
        value = getattr(synthetic, name)
        _need(name, value, value >= 1, "at least 1")
    for name in ("synthetic_tail", "synthetic_accuracy", "synthetic_fanout", "synthetic_masked"):
        value = getattr(synthetic, name)
        _need(name, value, 0 <= value <= 1, "between 0 and 1")
    _need(
        "synthetic_length_correctness",
        synthetic.synthetic_length_correctness,
        -1 <= synthetic.synthetic_length_correctness <= 1,
        "between -1 and 1",
    )
    _check_training(config.training, config.source.rollouts)
    for name in ("workers", "shares"):
        value = getattr(config.launch, name)
        _need(name, value, value is None or value >= 1, "at least 1")
    for name in ("cpus_per_share", "gpus_per_share"):
        value = getattr(config.launch, name)
        _need(name, value, 0 <= value < math.inf, "a finite number of at least 0")
    if config.launch.ray_address is not None and config.launch.launcher != "ray":
        raise SettingError(f"--ray-address {config.launch.ray_address}: only --launcher ray uses it; give that too")
    if config.launch.launcher not in (None, "here") and layout.dp * layout.cp > 1:
        raise SettingError(
            f"--launcher {config.launch.launcher}: ranks (--dp {layout.dp} --cp {layout.cp}) share every run, and are started"
            " by aggcli itself or by torchrun; leave one of the two out"
        )
    for name in ("synthetic_length", "synthetic_length_sigma", "synthetic_off_policy"):
        value = getattr(synthetic, name)
        _need(name, value, 0 <= value < math.inf, "a finite number of at least 0")


def _check_training(training: TrainingConfig, rollouts: tuple[str, ...]) -> None:
    if training.train and training.seeds not in (None, 1):
        raise SettingError(f"--seeds {training.seeds}: recorded rollouts are the same for every seed; leave it out")
    if training.train and not rollouts:
        raise SettingError("--train trains on recorded rollouts: give --rollouts PATH, or leave --train out to train on --task")
    whole = ("steps", "rollout_batch_size", "n_samples_per_prompt", "num_iterations", "checkpoint_every")
    for name in (*whole, "task_digits", "dynamic_sampling_rounds", "layers", "width", "heads", "seeds", "evaluation_prompts"):
        value = getattr(training, name)
        _need(name, value, value is None or value >= 1, "at least 1")
    _check_model(training)
    for name in ("temperature", "lr", "adam_eps"):
        value = getattr(training, name)
        _need(name, value, 0 < value < math.inf, "a positive finite number")
    for name in ("weight_decay", "clip_grad", "lr_warmup_steps", "overlong_buffer", "lora_rank"):
        value = getattr(training, name)
        _need(name, value, 0 <= value < math.inf, "a finite number of at least 0")
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(training, name)
        _need(name, value, 0 <= value < 1, "at least 0 and below 1")
    _need("heads", training.heads, training.width % training.heads == 0, f"a divisor of --width {training.width}")


def _check_model(training: TrainingConfig) -> None:
    if training.model is None:
        for name in ("lora_rank", "gradient_checkpointing", "compile"):
            if getattr(training, name):
                raise SettingError(f"{flag(name)} is for language models; give one with --model, or leave it out")
        return
    if not training.model.strip():
        raise SettingError("--model is empty: give a model folder, a Hugging Face id, or smollm2-135m")
    for name in ("warm_start", "task_digits", "supervised_steps"):
        if getattr(training, name):
            raise SettingError(f"{flag(name)} is for the small policy; leave it out with --model")


def reward_weights(text: str | None) -> dict[str, float]:
    """`name=1,other=0.5` as a dict, a name alone weighing 1; raises `SettingError` for what is not of that form."""
    weights: dict[str, float] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, _, value = item.rpartition("=") if "=" in item else (item, "", "1")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise SettingError(f"--reward-weights '{item.strip()}': must be name=number, as in accuracy=1,format=0.5") from None
        if not math.isfinite(weights[name.strip()]) or not name.strip():
            raise SettingError(f"--reward-weights '{item.strip()}': must be name=number, a finite one")
    if text is not None and not weights:
        raise SettingError("--reward-weights is empty: give name=number, as in accuracy=1,format=0.5")
    return weights


def _need(name: str, value: object, holds: bool, what: str) -> None:
    if not holds:
        raise SettingError(f"{flag(name)} {value}: must be {what}")


def flag(name: str) -> str:
    """`eps_clip` -> `--eps-clip`."""
    return "--" + name.replace("_", "-")
