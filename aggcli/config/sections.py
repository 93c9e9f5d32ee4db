"""The settings: frozen dataclasses, each field explained by the text under it, which is also the help of its flag."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from aggcli.rules import DEFAULT, MODES, TOKEN_MEAN, Rule, Scope, settled

SINKS: tuple[str, ...] = ("tensorboard", "trackio")
DEFAULT_LAYOUTS: tuple[str, ...] = ("dp1:first-fit", "dp2:interleaved", "dp2:contiguous", "dp4:balanced")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: how tokens are weighted, clipped and penalised."""

    loss_aggregation: Rule = DEFAULT
    """Aggregation of pg_loss: a framework's own rule, such as verl:token-mean (see `aggcli modes`), or a mode, by the weight
    of a trained token: sample_mean 1/(N*n_r), prompt_mean 1/(N*T_p), token_mean 1/T, constant 1/(N*L); N rollouts,
    n_r, T_p, T tokens of the rollout, the prompt group, the step, L the divisor."""
    prompt_mean_scale: Literal["rollouts", "prompts"] = "rollouts"
    """prompt_mean's absolute scale: `rollouts` = 1/(N*T_p), `prompts` = 1/(P*T_p), the strict mean over prompts."""
    normalizer: Scope = "step"
    """Where a mode's denominators are counted. Less than the step makes the loss a mean over ranks (of means over
    micro-batches), which varies with the layout; frameworks' rules count as their framework does."""
    loss_aggregation_divisor: float | None = None
    """The L of `constant` = 1/(N*L), in tokens."""
    calculate_per_token_loss: bool = False
    """The same thing as token_mean; each sets the other."""
    custom_pg_loss_reducer_function_path: str | None = None
    """`pkg.mod:fn`, a reducer with slime's signature; takes precedence over the mode."""
    custom_reducer_scale: Literal["none", "rollouts"] = "none"
    """`none`: the reducer's output is the step loss; `rollouts`: it is divided by N afterwards, as slime does."""
    metric_aggregation: Literal["sample_mean", "matched"] = "sample_mean"
    """`sample_mean`: metrics compare across modes (token_mean: per token); `matched`: metrics use the loss's weights."""
    advantages: Literal["auto", "recorded", "grpo", "mean_only"] = "auto"
    """grpo = (reward - group mean)/(std + 1e-6), std with n-1; mean_only = without std; recorded = the file's own;
    auto = the file's own where it has them, else grpo."""
    eps_clip: float = 0.2
    """The ratio is clipped from below at 1 - eps_clip."""
    eps_clip_high: float | None = None
    """The ratio is clipped from above at 1 + eps_clip_high; default: eps_clip."""
    eps_clip_c: float | None = None
    """Dual clip: for negative advantages the loss is at most -eps_clip_c * advantage; must exceed 1. Off by default."""
    kl_coef: float = 0.0
    """Weight of kl_loss in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference (Schulman, 2020)."""
    kl_unbiased: bool = False
    """Multiply the KL estimate by the importance ratio, which makes its gradient unbiased off-policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    mask_truncated: bool = False
    """Set the loss mask of truncated responses to 0 (overlong filtering): they train nothing and still count in N."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(1 - eps_clip, 1 + eps_clip_high)."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return 1.0 - self.eps_clip, 1.0 + high

    def in_force(self, rule: Rule) -> Rule:
        """A rule as these settings have it: its scale, its scope and its divisor."""
        return settled(
            rule,
            prompt_mean_scale=self.prompt_mean_scale,
            normalizer=self.normalizer,
            divisor=self.loss_aggregation_divisor,
        )

    def under(self, rule: Rule) -> ObjectiveConfig:
        """The same settings with this rule in force."""
        divisor = rule.divisor if rule.takes_divisor else None
        return dataclasses.replace(
            self, loss_aggregation=rule, calculate_per_token_loss=rule == TOKEN_MEAN, loss_aggregation_divisor=divisor
        )


@dataclass(frozen=True)
class LayoutConfig:
    """The parallel layout in force, and those each step is recorded under as well."""

    dp: int = 1
    """Data-parallel ranks of the layout in force; more than one rank runs on real processes."""
    cp: int = 1
    """Context-parallel ranks per data-parallel rank."""
    partition: Literal["first-fit", "interleaved", "contiguous", "balanced"] = "first-fit"
    """How the layout in force deals samples to data-parallel ranks."""
    layouts: tuple[str, ...] | None = None
    """Layouts to record each step under, each dp<N>[cp<M>][:rule][@tokens|:mb<K>] (data- and context-parallel ranks;
    first-fit, interleaved, contiguous or balanced; token budget of a micro-batch per rank, or its samples) or `recorded`.
    Default: dp1:first-fit, dp2:interleaved, dp2:contiguous, dp4:balanced, and the recorded layout of a train dump."""
    max_tokens_per_gpu: int | None = None
    """Token budget of a micro-batch per context-parallel rank; default: one micro-batch a rank."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch, instead of a token budget."""
    global_batch_size: int | None = None
    """Rollouts of one optimizer step; default: the whole file."""


@dataclass(frozen=True)
class SyntheticConfig:
    """Rollouts drawn from a seed, for layout experiments and for people without a dump."""

    synthetic_steps: int = 1
    """Number of steps."""
    synthetic_prompts: int = 16
    """Prompt groups of a step."""
    synthetic_group_size: str = "8"
    """Rollouts of a group: a number, or a range such as 4-12 drawn evenly."""
    synthetic_length: float = 64.0
    """Median response length, in tokens."""
    synthetic_length_sigma: float = 0.6
    """Spread of the lognormal length law: standard deviation of log length."""
    synthetic_tail: float = 0.05
    """Share of responses from a heavy (Pareto, exponent 1.5) tail that starts at the median."""
    synthetic_max_length: int = 1024
    """Responses are cut here, in tokens."""
    synthetic_accuracy: float = 0.5
    """Mean chance that a rollout is right; groups differ."""
    synthetic_length_correctness: float = -0.3
    """Correlation between log length and being right, -1 to 1; negative: wrong answers are longer."""
    synthetic_fanout: float = 0.0
    """Share of rollouts split into two or three training samples."""
    synthetic_masked: float = 0.0
    """Share of response tokens masked out, as tool output is."""
    synthetic_off_policy: float = 0.0
    """Standard deviation of log_probs - old_log_probs, in nats; 0 is exactly on-policy."""


@dataclass(frozen=True)
class SourceConfig:
    """Where rollouts come from and how they are read."""

    rollouts: tuple[str, ...] = ()
    """Files, folders or globs of recorded rollouts, each file one step; `example`, the ones that ship with aggcli; or
    `synthetic`."""
    rollout_format: str | None = None
    """Reader to use instead of detecting the format."""
    include_eval: bool = False
    """Read slime's `eval_` files too."""
    reward_key: str | None = None
    """Key of the reward when it is an object."""
    group_size: int | None = None
    """Group every this many consecutive rollouts where a file has no group_index; in formats that are grouped by identical
    prompt, every this many rows of a prompt."""
    length_unit: Literal["chars", "words"] | None = None
    """What lengths count in dumps that hold text only (verl, TRL); always labelled. Default there: chars."""
    tokenizer: str | None = None
    """Local tokenizer.json, or a folder with one, that counts the tokens of dumps that hold text only."""
    reward_weights: str | None = None
    """Weights that combine reward columns (verl, TRL), as name=1,other=0.5; columns not named are left out. Default: TRL's
    numeric columns at 1 each, verl's score alone."""
    drop_zero_variance: bool = False
    """Leave out prompt groups whose advantages are all 0, before N and P are counted: what dynamic sampling would have left."""
    unsafe_load: bool = False
    """Read pickles (SkyRL): a format that can hold code. What is not plain data or SkyRL's own batch is refused even so."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop: task, policy, sampling and optimizer."""

    task: str = "running-sum"
    """Task to train on when no rollouts are given: running-sum, or control (length is free of correctness)."""
    task_digits: int | None = None
    """Digits of a prompt of running-sum; default 6."""
    train: bool = False
    """Take optimizer steps of the small policy on the recorded rollouts, each file one step."""
    supervised_steps: int = 0
    """With --train: supervised steps on the dump's own responses before the first optimizer step."""
    steps: int = 100
    """Rollout steps; with --train at most the number of recorded steps."""
    seeds: int | None = None
    """Seeds per mode in `compare`: --seed, --seed + 1, ...; default 3."""
    rollout_batch_size: int = 16
    """Prompts of a rollout step."""
    n_samples_per_prompt: int = 8
    """Rollouts of a prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    num_iterations: int = 1
    """Passes over each rollout batch."""
    dynamic_sampling: bool = False
    """Sample more prompts until the batch is full of groups that are neither all right nor all wrong (DAPO)."""
    dynamic_sampling_rounds: int = 8
    """Most rounds of sampling for a batch; then it is trained on with the groups there are."""
    overlong_buffer: int = 0
    """Soft overlong penalty (DAPO eq. 13): it grows from 0 to -1 over the last this many tokens of the response limit."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    lr: float = 3e-4
    """Learning rate."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate grows linearly from 0."""
    adam_beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest 2-norm of a run's gradient; 0 does not clip."""
    match: Literal["none", "grad-norm"] = "none"
    """grad-norm: scale each mode's learning rate so that its first update is as large as the first mode's."""
    layers: int = 2
    """Layers of the policy."""
    width: int = 64
    """Width of the policy."""
    heads: int = 4
    """Attention heads of the policy."""
    warm_start: str | None = None
    """Initial parameters (safetensors); default: the task's own supervised warm start, made and cached where not shipped."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or auto (cuda where there is one)."""
    processes: int | None = None
    """Processes that share the runs of a small policy on CPU; default one for each thread of torch's (OMP_NUM_THREADS, else the
    cores), at most one a run; a run stays in one."""
    checkpoint_every: int = 20
    """Rollout steps between checkpoints."""
    layout_records: bool = True
    """Evaluate the first step, the last and each before a checkpoint under every layout, and record that."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on."""

    source: SourceConfig = field(default_factory=SourceConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    recipe: Literal["grpo", "dapo", "dr_grpo"] | None = None
    """A set of objective settings; single flags win over it."""
    modes: tuple[Rule, ...] | None = None
    """Modes or frameworks' rules that `compare` lines up, the first being the baseline; default: all of this project's
    modes."""
    dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Arithmetic of per-token numbers and of the policy (sums are float64); default: float64 in replay, float32 in training;
    bfloat16 is autocast in training."""
    seed: int = 0
    """Seed of everything drawn."""
    correct_threshold: float = 1.0
    """A rollout is correct when its raw reward is at least this (tolerance 1e-6)."""
    max_response_length: int | None = None
    """Response limit, in tokens: what correct_length/p25..p100 are shares of, and the divisor that recipe dr_grpo takes;
    default: the longest response in the source."""
    log_correct_samples: bool = False
    """Record the sorted response lengths of the correct samples of each rank too."""
    log_to: tuple[str, ...] = ()
    """Mirror metrics.jsonl as it is written: `tensorboard` into tensorboard/ of each run, `trackio` into trackio/ of the
    results directory (look at it with TRACKIO_DIR set to that). Each needs its extra, as in aggcli[tensorboard]."""

    @property
    def compared(self) -> tuple[Rule, ...]:
        """The rules that `compare` lines up, as they are in force: those asked for, else all of this project's modes."""
        return tuple(dict.fromkeys(map(self.objective.in_force, self.modes or MODES)))
