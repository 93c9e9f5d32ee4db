"""Many runs: modes x seeds as one stack, on this process or on the ranks of a world."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aggcli.config import RunConfig, TrainingConfig
from aggcli.errors import SettingError
from aggcli.layout.chosen import layouts_of
from aggcli.layout.schedule import Layout
from aggcli.layout.steps import Part, need_whole_groups
from aggcli.measurement.local import is_correct
from aggcli.objective.weights import need_groups
from aggcli.policy.causal_lm import causal_start, need_context, vocabulary_of
from aggcli.policy.loading import DTYPES, load_model, load_speech
from aggcli.policy.protocol import Noise, Policy, Start
from aggcli.policy.stacked import SmallStart
from aggcli.policy.transformer import Parameters, PolicyConfig, initial_parameters, shapes
from aggcli.policy.warm_start import default_policy, load_policy, starting_policy
from aggcli.rollouts.sources import open_source
from aggcli.rules import Rule
from aggcli.tasks import TASKS, SmallTask, Task, make_task
from aggcli.tasks.protocol import EVALUATION_STEP
from aggcli.tasks.text import is_in_words, spoken_task
from aggcli.training.loop import Trainer
from aggcli.training.recorded import Recorded, RecordedSampler, prepared, supervised
from aggcli.training.report import Reporter
from aggcli.training.rollout import Sampler, StepSource, stacked_prompts
from aggcli.training.rows import layout_in_force, optimizer_step_positions
from aggcli.training.stack import RunSpec
from aggcli.training.step import stack_weights
from aggcli.world import World, local_rank

EVALUATION_PROMPTS = 512
"""Fresh prompts that a small policy is evaluated on unless --evaluation-prompts says otherwise."""
SUPERVISED_LR = 3e-3


@dataclass(frozen=True)
class Setup:
    """Everything a stack is trained with, made from the settings."""

    config: RunConfig
    task: Task | None
    """None when training on recorded rollouts."""
    start: Start
    response_limit: int
    device: torch.device
    recorded: Recorded | None = None


def device_of(config: RunConfig) -> torch.device:
    """The device to train on. Raises `SettingError` for one that is not there."""
    name = config.training.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"--device {name}: must be cpu, cuda, cuda:<number> or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"--device {name}: this machine has no CUDA device that torch can use; choose cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"--device {name}: must be cpu, cuda, cuda:<number> or auto")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return device


def task_of(training: TrainingConfig) -> SmallTask:
    """The task that the settings name. Raises `SettingError` for one that does not exist or lacks a setting."""
    return make_task(training.task, **({} if training.task_digits is None else {"digits": training.task_digits}))


def set_up(config: RunConfig, *, here: bool = True) -> Setup:
    """Task, policy shape and warm start, on the device; `here`: else in main memory, for other machines. Raises
    `SettingError`."""
    training = config.training
    device = device_of(config) if here else torch.device("cpu")
    if config.source.rollouts:
        if training.model is not None:
            return _set_up_recorded_model(config, training.model, device)
        return _set_up_recorded(config, device)
    if training.model is not None:
        return _set_up_model(config, training.model, device)
    task = task_of(training)
    limit = config.max_response_length or task.default_max_response_length
    policy = dataclasses.replace(
        default_policy(task, limit), layers=training.layers, width=training.width, heads=training.heads
    )
    _need_room(training.overlong_buffer, limit)
    initial = _initial(task, policy, training.warm_start)
    start = SmallStart(policy, _placed(initial, config, device), config, task.prompt_length)
    return Setup(config, task, start, limit, device)


def _set_up_model(config: RunConfig, model: str, device: torch.device) -> Setup:
    """A language model and a task in its words."""
    training = config.training
    if not is_in_words(training.task):
        what = "is for the small policy" if training.task in TASKS else "is not known"
        raise SettingError(f"--task {training.task}: {what}; with --model give rg:NAME, FILE.jsonl or pkg.mod:name")
    speech = load_speech(model)
    task = spoken_task(training.task, speech)
    limit = config.max_response_length or task.default_max_response_length
    _need_room(training.overlong_buffer, limit)
    return Setup(config, task, _start_of(_model(model, config, device), config, device), limit, device)


def _set_up_recorded(config: RunConfig, device: torch.device) -> Setup:
    """Recorded rollouts, a policy for their vocabulary, and its supervised warm start where one is asked for."""
    training = config.training
    source = open_source(config.source, config.seed)
    recorded = prepared(source, config)
    longest = max(int(batch.response_length_S.max()) for batch in recorded.batches)
    policy = PolicyConfig(
        recorded.vocabulary_size, recorded.longest, layers=training.layers, width=training.width, heads=training.heads
    )
    initial = initial_parameters(policy, torch.Generator().manual_seed(config.seed))
    if training.supervised_steps:
        initial = supervised(initial, policy, recorded, training.supervised_steps, SUPERVISED_LR)
    shorter = dataclasses.replace(training, steps=min(training.steps, len(recorded.batches)))
    config = dataclasses.replace(config, training=shorter)
    limit = config.max_response_length or longest
    start = SmallStart(policy, _placed(initial, config, device), config, None)
    return Setup(config, None, start, limit, device, recorded)


def _set_up_recorded_model(config: RunConfig, model: str, device: torch.device) -> Setup:
    """Recorded rollouts, and the language model that is to learn from them."""
    module = _model(model, config, device)
    recorded = prepared(open_source(config.source, config.seed), config, vocabulary_of(module))
    need_context(module, recorded.longest)
    longest = max(int(batch.response_length_S.max()) for batch in recorded.batches)
    shorter = dataclasses.replace(config.training, steps=min(config.training.steps, len(recorded.batches)))
    config = dataclasses.replace(config, training=shorter)
    limit = config.max_response_length or longest
    return Setup(config, None, _start_of(module, config, device), limit, device, recorded)


def _model(name: str, config: RunConfig, device: torch.device) -> Any:
    """A language model; in main memory where each rank's device is to hold a part of it only. Raises `SettingError`."""
    ranks = config.layout.dp * config.layout.cp
    if config.training.compile and ranks > 1:
        raise SettingError(f"--compile: is for a model that one process holds, and {ranks} ranks hold this one; leave it out")
    return load_model(name, config, torch.device("cpu") if ranks > 1 else device)


def _start_of(module: Any, config: RunConfig, device: torch.device) -> Start:
    """Where runs of a language model begin: whole in a process, cut over ranks where there are several."""
    if config.layout.dp * config.layout.cp == 1:
        return causal_start(module, config)
    from aggcli.policy.sharded import ShardedStart

    return ShardedStart(module, config, device)


def need_whole_groups_in(recorded: Recorded, global_batch_size: int | None, rule: Rule) -> None:
    """Raise `RolloutError` where the optimizer steps of recorded rollouts lack the whole prompt groups that the rule needs."""
    for batch in recorded.batches:
        parts = optimizer_step_positions(batch, 1, global_batch_size)
        need_whole_groups(batch, [Part("", positions.tolist()) for positions in parts], rule)
        need_groups(batch, rule)


def movable(setup: Setup) -> bytes | None:
    """The setup packed, its tensors in main memory, for a process that may have another device, see `arrived`; None where that
    process reads a language model itself."""
    if setup.config.training.model is not None:
        return None
    return pickle.dumps(dataclasses.replace(setup, start=setup.start.on(torch.device("cpu"))))


def arrived(setup: Setup | bytes | RunConfig) -> Setup:
    """The setup, which may be packed, on the device that its settings mean here; made anew where only those are given. Raises
    `SettingError`."""
    if isinstance(setup, RunConfig):
        return set_up(setup)
    if isinstance(setup, bytes):
        setup = pickle.loads(setup)
        assert isinstance(setup, Setup)
    device = device_of(setup.config)
    return dataclasses.replace(setup, device=device, start=setup.start.on(device))


def _placed(initial: Parameters, config: RunConfig, device: torch.device) -> Parameters:
    dtype = DTYPES[config.dtype or "float32"]
    return {name: value.detach().to(device, dtype) for name, value in initial.items()}


def _need_room(buffer: int, limit: int) -> None:
    if buffer >= limit:
        raise SettingError(
            f"--overlong-buffer {buffer}: must be below the response limit of {limit} tokens, or every response is penalised"
        )


def _initial(task: SmallTask, policy: PolicyConfig, path: str | None) -> Parameters:
    """The warm start: the user's own file, or the task's."""
    if path is None:
        return starting_policy(task, policy)
    parameters, _ = load_policy(Path(path))
    for name, shape in shapes(policy).items():
        if name not in parameters or parameters[name].shape != (1, *shape):
            found = tuple(parameters[name].shape[1:]) if name in parameters else "missing"
            raise SettingError(f"--warm-start {path}: parameter {name} is {found}, the policy has {shape}")
    return parameters


def runs_of(config: RunConfig, rules: Sequence[Rule], seeds: Sequence[int], response_limit: int) -> list[RunSpec]:
    """One run for each rule and seed; a rule that takes a divisor divides by the response limit unless told otherwise."""
    found = []
    for rule in rules:
        objective = config.objective.under(rule.with_divisor(float(response_limit)))
        found += [RunSpec(f"{rule.name}/seed-{seed}", seed, objective, config.training.lr) for seed in seeds]
    return found


def trainer_of(setup: Setup, runs: Sequence[RunSpec], world: World) -> Trainer:
    """The trainer of a stack."""
    config = setup.config
    layout = layout_in_force(config.layout)
    if setup.recorded is not None:
        sampler: StepSource = RecordedSampler(setup.recorded)
    else:
        sampler = Sampler(_task(setup), config, setup.response_limit, world)
    policy = setup.start.stack([run.lr for run in runs], world)
    others = checked_layouts(config, layout)
    reporter = Reporter(config, _as_listed(layout, config), others, setup.response_limit, world)
    return Trainer(runs, policy, config, sampler, layout, reporter, world)


def _task(setup: Setup) -> Task:
    """The task of a setup that samples; recorded rollouts have none, and nothing may ask for it."""
    assert setup.task is not None
    return setup.task


def checked_layouts(config: RunConfig, in_force: Layout) -> tuple[Layout, ...]:
    """The layouts besides the one in force that steps are evaluated under; none where that is switched off."""
    if not config.training.layout_records:
        return ()
    found = layouts_of(config.layout, has_recorded=False)
    return tuple(layout for layout in found if not _is_same(layout, in_force))


def _as_listed(in_force: Layout, config: RunConfig) -> Layout:
    """The layout in force by the text that the user gave it, if any."""
    found = layouts_of(config.layout, has_recorded=False)
    return next((layout for layout in found if _is_same(layout, in_force)), in_force)


def _is_same(layout: Layout, other: Layout) -> bool:
    return dataclasses.replace(layout, text=other.text) == other


# -- before and after -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """A policy on that many fresh prompts, one rollout each: accuracy, and mean response lengths in tokens (None where there is
    no such rollout)."""

    prompts: int
    accuracy: float
    response_length: float
    correct_response_length: float | None
    incorrect_response_length: float | None
    response_length_std: float


def evaluate(setup: Setup, policy: Policy, seeds: Sequence[int]) -> list[Evaluation]:
    """Evaluate every run of a policy on fresh prompts of its seed, as many as the settings say."""
    task, prompts = _task(setup), fresh_prompts(setup)
    distinct = list(dict.fromkeys(seeds))
    row_R = torch.tensor([distinct.index(seed) for seed in seeds])
    drawn = [task.prompts(seed, EVALUATION_STEP, prompts) for seed in distinct]
    asked = stacked_prompts(drawn, task.pad_id)
    sampled = policy.sample(
        asked.tokens_SL[row_R],
        asked.length_S[row_R],
        Noise(tuple(seeds), EVALUATION_STEP, 0, prompts),
        setup.response_limit,
        end_id=task.end_id,
        pad_id=task.pad_id,
    )
    length_RB = sampled.length_RB
    found = task.verify(asked.answer_S[row_R], sampled.tokens_RBL, length_RB)
    correct_RB = is_correct(found.reward, setup.config.correct_threshold)
    return [_evaluation(correct_B, length_B.double()) for correct_B, length_B in zip(correct_RB, length_RB, strict=True)]


def fresh_prompts(setup: Setup) -> int:
    """How many fresh prompts a policy is evaluated on."""
    asked, most = setup.config.training.evaluation_prompts or EVALUATION_PROMPTS, _task(setup).most_fresh_prompts
    return asked if most is None else min(asked, most)


def _evaluation(correct_B: Tensor, length_B: Tensor) -> Evaluation:
    def mean(chosen_B: Tensor) -> float | None:
        return float(length_B[chosen_B].mean()) if chosen_B.any() else None

    return Evaluation(
        correct_B.numel(),
        float(correct_B.double().mean()),
        float(length_B.mean()),
        mean(correct_B),
        mean(~correct_B),
        float(length_B.std()) if length_B.numel() > 1 else 0.0,
    )


@dataclass(frozen=True)
class Gap:
    """What the modes would do to the first rollouts: `start` is the policy before training; `shares`: mode -> share of the
    total weight on responses longer than 3/4 of the maximum."""

    start: Evaluation
    shares: dict[str, float]


def predicted_gap(setup: Setup, rules: Sequence[Rule], seed: int, world: World) -> Gap:
    """How far apart the modes are before training, on the first rollout step of one seed. Every rank must call it."""
    policy = setup.start.stack([0.0], world)
    (start,) = evaluate(setup, policy, [seed])
    runs = runs_of(setup.config, rules, [seed], setup.response_limit)
    sampler = Sampler(_task(setup), setup.config, setup.response_limit, world)
    batch = sampler.step(runs[:1], policy, 0).batch
    if not batch.num_samples:
        return Gap(start, {})
    longest_S = batch.response_length_S.argsort(descending=True, stable=True)[: max(batch.num_samples // 4, 1)]
    of_longest_T = torch.isin(batch.sample_of_token(), longest_S)
    shares = {}
    for run in runs:
        weight_T = stack_weights(batch, [run], layout_in_force(setup.config.layout))[0]
        shares[run.mode] = float(weight_T[of_longest_T].sum() / weight_T.sum())
    return Gap(start, shares)


def matched_rates(setup: Setup, runs: Sequence[RunSpec], world: World) -> list[RunSpec]:
    """The runs with learning rates scaled so that each mode's first update is as large as the first mode's of that seed.

    The size of an update is the 2-norm of the change of the parameters in a trial optimizer step on the first rollouts.
    """
    size_R = trainer_of(setup, runs, world).first_update().tolist()
    base = {run.seed: size for run, size in reversed(list(zip(runs, size_R, strict=True)))}
    return [
        dataclasses.replace(run, lr=run.lr * (base[run.seed] / size)) if size else run
        for run, size in zip(runs, size_R, strict=True)
    ]
