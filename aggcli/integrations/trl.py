"""Any aggregation mode in TRL's GRPOTrainer, its rollouts on disk, and what the other modes would have given.

TRL's loss is linear in the advantage, so each sample's advantage times (weight wanted / weight that `loss_type` gives) makes
the unchanged trainer compute the mode wanted; see `aggcli.objective.factors`. The samples of an optimizer step are known when
TRL has shuffled a generation batch and cut it into micro-batches: there the factors come in, from the lengths of all processes.
Read in TRL 1.16.0.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from aggcli import interface
from aggcli.errors import SettingError
from aggcli.objective.factors import advantage_factors, as_step, need_correctable
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.writers import one_file, write_jsonl
from aggcli.rules import MODES, Rule, find_rule, names_of, settled
from aggcli.rules.reference import varies

READ_VERSION = "1.16"
"""The TRL whose loss was read."""
PROBED = ("pg_loss", "total_weight", "gradient_ratio", "gradient_cosine", "effective_tokens")
"""Besides the weight shares, what the probe logs of each mode; see `aggcli.measurement.catalogue`."""

_LOG = logging.getLogger("aggcli")


def with_aggregation(
    trainer_class: Any,
    loss_aggregation: str | None = None,
    *,
    divisor: float | None = None,
    prompt_mean_scale: Literal["rollouts", "prompts"] = "rollouts",
    write_rollouts: str | Path | None = None,
    probe: bool = False,
    correct_threshold: float = 1.0,
) -> Any:
    """A class like `trainer_class`, a `trl.GRPOTrainer`, whose policy loss is aggregated by `loss_aggregation`.

    `loss_aggregation`: a mode, or another rule that no layout changes; None leaves the loss as it is. `divisor`: the L of
    `constant`, in tokens. `write_rollouts`: a new folder, in which every optimizer step becomes a file `aggcli compare` reads:
    ids, masks, rewards, TRL's advantages before any factor, and log-probabilities, current and old. `probe`: log with the
    trainer's own numbers, as `aggcli/MODE/...`, what every mode would have given for the same rollouts: its weight shares, and
    the norm and the direction of its gradient by the log-probabilities against the mode in force. `correct_threshold`: the
    reward from which its shares call a rollout correct. A probe of 150,000 tokens takes the main process half a second.

        trainer = with_aggregation(GRPOTrainer, "prompt_mean")(model, reward_funcs, args=GRPOConfig(...), train_dataset=...)

    Trained tokens are TRL's: completion and tool masks, and without those of truncated completions where it masks them. A
    completion without a trained token counts in N and its prompt in P. Exact for the policy loss, under data parallelism of any
    number of processes; KL terms (`beta`), entropy bonuses and the loss of an evaluation keep the aggregation of `loss_type`.

    The class raises `SettingError` when it is made for what has no exact factor: a `loss_type` whose weights change with the
    split (bnpo), an optimizer step that does not lie within one generation batch, a prompt mean whose groups TRL deals over
    several optimizer steps, a subclass with a loss of its own.
    """
    base = _grpo_trainer()
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, base):
        raise SettingError(f"{getattr(trainer_class, '__name__', trainer_class)}: must be trl.GRPOTrainer or a subclass of it")
    for method in ("_compute_loss", "compute_loss", "_prepare_inputs"):
        if getattr(trainer_class, method) is not getattr(base, method):
            raise SettingError(
                f"{trainer_class.__name__} has a {method} of its own, so how it aggregates is not known; give trl.GRPOTrainer,"
                f" or a subclass that leaves {method} as it is"
            )
    wanted = None
    if loss_aggregation is not None:
        wanted = settled(find_rule(loss_aggregation), prompt_mean_scale=prompt_mean_scale, divisor=divisor)
        _check_wanted(wanted)

    class Aggregating(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            where = None if write_rollouts is None else Path(write_rollouts)
            self._aggcli = _Steps(self, wanted, where, is_probing=probe)
            self._aggcli.settings |= {"prompt_mean_scale": prompt_mean_scale, "correct_threshold": correct_threshold}
            if divisor is not None:
                self._aggcli.settings["loss_aggregation_divisor"] = divisor

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self._aggcli.scored(rewards, completion_ids_list)
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return self._aggcli.generated(super()._generate_and_score_completions(inputs))

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            self._aggcli.scale()
            return inputs

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._aggcli.forward(found[0], found[1])
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self._aggcli.inputs = inputs if self.model.training else None
            loss = super()._compute_loss(model, inputs)
            self._aggcli.inputs = None
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if self._step % self.current_gradient_accumulation_steps == 0:
                self._aggcli.end_step()
            return loss

    Aggregating.__name__ = Aggregating.__qualname__ = f"Aggregating{trainer_class.__name__}"
    return Aggregating


class _Steps:
    """The optimizer steps of one trainer: `wanted` is the rule to compute, None for the trainer's own (`given`)."""

    def __init__(self, trainer: Any, wanted: Rule | None, where: Path | None, *, is_probing: bool) -> None:
        self.trainer, self.wanted, self.where, self.is_probing = trainer, wanted, where, is_probing
        self.given = find_rule(f"trl:{trainer.loss_type}").with_divisor(trainer.max_completion_length)
        self.ranks, self.rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        self.accumulation = trainer.args.gradient_accumulation_steps
        self.inputs: dict[str, Any] | None = None
        self.is_new = self.has_written = False
        self.groups = 0
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {
            "loss_aggregation_divisor": trainer.max_completion_length,
            "eps_clip": trainer.epsilon_low,
            "eps_clip_high": trainer.epsilon_high,
            **({} if trainer.args.delta is None else {"eps_clip_c": trainer.args.delta}),
            "max_response_length": trainer.max_completion_length,
        }
        self._check()

    # -- what can be computed ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise `SettingError` for what has no exact answer, and say what is not covered."""
        trainer, args = self.trainer, self.trainer.args
        slices, said = args.steps_per_generation, []
        if args.n_gpu > 1:
            raise SettingError(
                f"{args.n_gpu} GPUs in one process (nn.DataParallel): start a process for each, as accelerate does"
            )
        if slices % self.accumulation:
            raise SettingError(
                f"steps_per_generation {slices} is no multiple of gradient_accumulation_steps {self.accumulation}, so an"
                " optimizer step takes samples of several generation batches, the last of which are not known when its first"
                " loss is computed; make it one"
            )
        if self.wanted is not None:
            need_correctable(self.given)
            if self.wanted.needs_groups and slices != self.accumulation:
                raise SettingError(
                    f"{self.wanted.name}: TRL shuffles a generation batch and cuts it into {slices // self.accumulation}"
                    " optimizer steps, which prompt groups straddle; set steps_per_generation to gradient_accumulation_steps"
                    f" ({self.accumulation})"
                )
            if trainer.beta != 0:
                said.append(f"beta {trainer.beta:g}: the KL term keeps the aggregation of loss_type={trainer.loss_type}")
            if trainer._entropy_bonus_enabled:
                said.append("the entropy bonus keeps the mean of each micro-batch's tokens")
        elif varies(self.given):
            said.append(f"loss_type={trainer.loss_type} varies with the split: {self.given.why_it_varies()}")
        if self.is_probing:
            self._check_probe()
        version = importlib.metadata.version("trl")
        if not version.startswith(f"{READ_VERSION}."):
            said.append(f"how TRL {version} aggregates was not read, only {READ_VERSION}: compare one step's gradient first")
        base = _grpo_trainer()
        if not base.__module__.startswith("trl."):
            said.append(f"trl.GRPOTrainer is {base.__module__}'s, whose loss was not read: compare one step's gradient first")
        if trainer.accelerator.is_main_process:
            for text in said:
                _LOG.warning(text)

    def _check_probe(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        unlike = {
            f"loss_type={trainer.loss_type}": trainer.loss_type in ("cispo", "sapo", "vespo", "luspo"),
            "importance_sampling_level=sequence": trainer.importance_sampling_level != "token",
            "top_entropy_quantile": trainer.top_entropy_quantile < 1,
            "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
            "vllm_importance_sampling_correction": trainer.use_vllm and trainer.vllm_importance_sampling_correction,
        }
        for setting in (name for name, is_set in unlike.items() if is_set):
            raise SettingError(
                f"probe: {setting} makes another loss of the token than the clipped surrogate that it compares by"
            )
        whole = args.steps_per_generation == self.accumulation
        if self.wanted is None and not whole and self._counts_tokens:
            raise SettingError(
                f"probe: loss_type={trainer.loss_type} divides by the generation batch's tokens, and no rule here does; set"
                f" steps_per_generation to gradient_accumulation_steps ({self.accumulation})"
            )

    @property
    def _counts_tokens(self) -> bool:
        """Whether `loss_type` divides by trained tokens of the whole generation batch."""
        return any(count.counted == "tokens" and count.scope == "step" for count in self.given.divides_by)

    # -- what the trainer does, in order ----------------------------------------------------------------------------

    def scored(self, rewards: Tensor, completion_ids: list[list[int]]) -> None:
        """Rewards of all processes by reward function [B, F], and this process's completions."""
        trainer = self.trainer
        weighted = (rewards.double() * trainer.reward_weights.to(rewards).unsqueeze(0)).nansum(dim=1)
        self.reward_B = torch.where(torch.isnan(rewards).all(dim=1), math.nan, weighted)
        self.length_B = [len(ids) for ids in completion_ids]
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self.ended_B = [bool(ids) and ids[-1] in ends for ids in completion_ids]

    def generated(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The generation batch of this process with what TRL leaves out of it, to be shuffled and cut like the rest."""
        if not self.trainer.model.training:
            return batch
        rows, device = len(self.length_B), batch["completion_mask"].device
        place_B = torch.arange(self.rank * rows, (self.rank + 1) * rows, device=device)
        batch["aggcli_group"] = place_B // self.trainer.num_generations + self.groups
        batch["aggcli_reward"] = self.reward_B[place_B.to(self.reward_B.device)].to(device)
        batch["aggcli_length"] = torch.tensor(self.length_B, device=device)
        batch["aggcli_ended"] = torch.tensor(self.ended_B, device=device)
        self.groups += rows * self.ranks // self.trainer.num_generations
        self.is_new = True
        return batch

    def scale(self) -> None:
        """Multiply the advantages of a generation batch that has just been cut by the factors of its optimizer steps."""
        if not self.is_new:
            return
        self.is_new = False
        slices = self.trainer._buffered_inputs
        for part in slices:
            part["aggcli_advantages"] = part["advantages"]
        if self.wanted is None:
            return
        columns = [torch.stack([_mask(part).sum(dim=1), part["aggcli_group"]], dim=1) for part in slices]
        local_BC = torch.cat(columns)
        all_RBC = self.trainer.accelerator.gather(local_BC).view(self.ranks, len(local_BC), 2).cpu()
        steps = len(slices) // self.accumulation
        tokens = int(all_RBC[..., 0].sum())
        for step, rows_RBC in enumerate(all_RBC.chunk(steps, dim=1)):
            held = rows_RBC.reshape(-1, 2)
            whole = as_step(held[:, 0].tolist(), held[:, 1].tolist(), None, None)
            assert self.wanted is not None
            factor_S = advantage_factors(whole, self.wanted, self.given)
            if self._counts_tokens:  # TRL's count is the mean over the generation batch's optimizer steps
                factor_S = factor_S * (max(tokens, 1) / steps / max(int(held[:, 0].sum()), 1))
            mine = factor_S.view(self.ranks, -1)[self.rank].split(len(slices[0]["aggcli_group"]))
            for part, factor_B in zip(slices[step * self.accumulation :], mine, strict=False):
                part["advantages"] = _times(part["advantages"], factor_B)

    def forward(self, log_probs_BT: Tensor, entropy_BT: Tensor | None) -> None:
        """Keep the first forward pass of a micro-batch's loss, on the CPU, where something reads it."""
        if self.inputs is None or (self.where is None and not self.is_probing):
            return
        inputs, self.inputs = self.inputs, None
        self.rows += _samples(inputs, log_probs_BT, entropy_BT)

    def end_step(self) -> None:
        """Write and probe the optimizer step that has just been accumulated."""
        if self.where is None and not self.is_probing:
            return
        rows, self.rows = self._gathered(self.rows), []
        if rows is None:
            return
        batch = _batch(rows, f"step {self._number}")
        if self.where is not None:
            self._write(batch)
        if self.is_probing:
            self._probe(batch)

    @property
    def _number(self) -> int:
        """The optimizer step, numbered from 1 as the trainer's log does, which counts it when it is done."""
        return self.trainer.state.global_step + 1

    def _gathered(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The rows of all processes, rank after rank, on the main process; None on the others."""
        if self.ranks == 1:
            return rows
        everyone: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(everyone, rows)
        return [row for of_rank in everyone for row in of_rank] if self.rank == 0 else None

    def _write(self, batch: RolloutBatch) -> None:
        assert self.where is not None
        if not self.has_written:
            self._make_room(self.where)
        with one_file(self.where / f"{self._number:06d}.jsonl", overwrite=False) as draft:
            write_jsonl(batch, draft)
        self.has_written = True

    def _make_room(self, where: Path) -> None:
        """A resumed run takes the place of the steps after its checkpoint. Raises `SettingError` for another run's rollouts."""
        later = [path for path in where.glob("[0-9]*.jsonl") if path.stem.isdecimal() and int(path.stem) >= self._number]
        if later and self._number == 1:
            raise SettingError(f"{where}: holds the rollouts of another run; give write_rollouts a new folder")
        for path in later:
            path.unlink()
        if later:
            _LOG.warning(f"{where}: resumed at step {self._number}; {len(later)} files of later steps are removed")

    def _probe(self, batch: RolloutBatch) -> None:
        in_force = self.wanted or self.given
        names = dict.fromkeys([in_force.name, *names_of(MODES)])
        layout = f"dp{self.ranks}:contiguous:mb{batch.num_samples // self.ranks // self.accumulation}"
        found = interface.replay(batch, list(names), [layout], advantages="recorded", **self.settings)
        metrics = self.trainer._metrics["train"]
        for mode, values in found.steps[0]["modes"].items():
            for name, value in values.items():
                if (name in PROBED or name.startswith("weight_share/")) and value is not None:
                    metrics[f"aggcli/{mode}/{name}"].append(value)


# -- one micro-batch ------------------------------------------------------------------------------------------------


def _mask(inputs: dict[str, Any]) -> Tensor:
    """The trained tokens [B, T], as TRL counts them."""
    return inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]


def _times(advantages: Tensor, factor_B: Tensor) -> Tensor:
    """Advantages [B] or [B, T] times a factor a sample, worked out in float64."""
    shape = (-1, *[1] * (advantages.dim() - 1))
    return (advantages.double() * factor_B.to(advantages.device).view(shape)).to(advantages.dtype)


def _samples(inputs: dict[str, Any], log_probs_BT: Tensor, entropy_BT: Tensor | None) -> list[dict[str, Any]]:
    """The samples of a micro-batch in the plain format's fields."""
    current_BT = log_probs_BT.detach()
    old_BT = inputs.get("old_per_token_logps")
    streams = {
        "log_probs": current_BT,
        "old_log_probs": current_BT if old_BT is None else old_BT,
        "ref_log_probs": inputs.get("ref_per_token_logps"),
        "rollout_log_probs": inputs.get("sampling_per_token_logps"),
        "entropy": None if entropy_BT is None else entropy_BT.detach(),
        "loss_mask": _mask(inputs),
    }
    lists = {field: values.tolist() for field, values in streams.items() if values is not None}
    made = []
    for at, length in enumerate(inputs["aggcli_length"].tolist()):
        prompt = inputs["prompt_ids"][at][inputs["prompt_mask"][at].bool()].tolist()
        reward, advantage = float(inputs["aggcli_reward"][at]), inputs["aggcli_advantages"][at].tolist()
        made.append(
            {
                "group_index": int(inputs["aggcli_group"][at]),
                "tokens": prompt + inputs["completion_ids"][at][:length].tolist(),
                "response_length": length,
                "reward": None if math.isnan(reward) else reward,
                "status": "completed" if inputs["aggcli_ended"][at] else "truncated",
                "advantage": advantage[:length] if isinstance(advantage, list) else advantage,
                **{field: values[at][:length] for field, values in lists.items()},
            }
        )
    return made


def _batch(rows: list[dict[str, Any]], name: str) -> RolloutBatch:
    """One optimizer step. An inference engine that scored no number for some trained token has none for the step."""
    is_scored = all(
        math.isfinite(value) or not trained
        for row in rows
        for value, trained in zip(row.get("rollout_log_probs", ()), row["loss_mask"], strict=False)
    )
    builder = BatchBuilder(name)
    for row in rows:
        builder.add(row if is_scored else {**row, "rollout_log_probs": None})
    return builder.build()


# -- what is asked for ----------------------------------------------------------------------------------------------


def _grpo_trainer() -> Any:
    try:
        return importlib.import_module("trl").GRPOTrainer
    except ImportError as error:
        raise SettingError(f'TRL cannot be imported ({error}): pip install "aggcli[trl]"') from error


def _check_wanted(wanted: Rule) -> None:
    if wanted.needs_divisor:
        raise SettingError(f"{wanted.name} divides by a constant: give divisor=L, such as max_completion_length")
    if varies(wanted):
        raise SettingError(
            f"{wanted.name}: its weights change with the layout ({wanted.why_it_varies()}), so no factor gives it"
        )
