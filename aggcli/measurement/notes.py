"""What a step's numbers cannot say for themselves: what was skipped and why, and what looks like a fault but is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aggcli.errors import some
from aggcli.measurement.catalogue import OVER_TRAINED
from aggcli.measurement.report import LayoutReport, Values
from aggcli.measurement.words import listed, plural
from aggcli.objective.step import StepInputs
from aggcli.objective.weights import masked_weights
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch
from aggcli.rules import CUSTOM

ZERO = 1e-12
"""A loss below this is 0 but for rounding."""
ROUNDING = 1e-2
"""A log-probability up to this above 0 may be that of a near certain token, rounded by bfloat16."""


def skipped(inputs: StepInputs) -> dict[str, str]:
    """Metric -> what the batch would need for it."""
    found: dict[str, str] = {}
    step = inputs.step
    if "advantages" not in inputs.tokens:
        need = "needs advantage, or reward and group_index"
        found |= dict.fromkeys(
            ("pg_loss", "loss", "grad_norm_log_probs", "gradient_share/*", "pg_clipfrac", "sequence_ratio/clipfrac"), need
        )
    if not inputs.has_ratio:
        need = "needs log_probs and old_log_probs (or rollout_log_probs)"
        found |= dict.fromkeys(("pg_clipfrac", "ppo_kl", "ratio_deviation", "sequence_ratio/*", "importance_ess/*"), need)
    if "ref_log_probs" not in inputs.tokens:
        found["kl_loss"] = "needs log_probs and ref_log_probs"
    if "trainer_log_probs" not in inputs.tokens:
        need = "needs rollout_log_probs and log_probs (or old_log_probs)"
        found |= dict.fromkeys(("sampler_mismatch", "sampler_mismatch/*"), need)
    if "entropy" not in inputs.tokens:
        found |= dict.fromkeys(("entropy_loss", "correct/entropy"), "needs entropy")
    if step.reward_S is None:
        found |= dict.fromkeys(("raw_reward", "correct/*", "correct_length/*", "pass@k"), "needs reward")
    elif (step.group_S == NO_GROUP).all():
        found["pass@k"] = "needs group_index (--group-size groups consecutive rollouts)"
    return found


def notes_on_step(inputs: StepInputs, values: Mapping[str, Values], layouts: Sequence[LayoutReport]) -> list[str]:
    """Plain sentences about one step. `values`: the numbers of each rule."""
    first = values[inputs.names[0]]
    return [
        *_on_data(inputs, first),
        *_on_log_probs(inputs.step),
        *_on_certain_tokens(inputs, first),
        *_on_trained_rollouts(values),
        *_on_groups(inputs, first),
        *_on_loss(inputs, values),
        *_on_ranks(layouts),
    ]


def _on_data(inputs: StepInputs, values: Values) -> list[str]:
    step, notes = inputs.step, []
    if masked := values["fully_masked_samples"]:
        they = "it counts in N and adds no token" if masked == 1 else "they count in N and add no token"
        baseline = "; a fully masked rollout's reward is in its group's baseline, where advantages are made from rewards"
        notes.append(f"fully masked samples: {masked:g}; {they} to the loss{baseline}")
    if not values["tokens"]:
        notes.append("no trained token at all: the step is empty and takes no optimizer step")
    missing = int((step.group_S == NO_GROUP).sum())
    if 0 < missing < step.num_samples:
        those = plural(missing, "sample has", "samples have")
        notes.append(f"{those} no group_index: advantage 0 unless recorded, and left out of pass@k")
    if not inputs.has_ratio:
        notes.append("fewer than two log-probability streams: the importance ratio is taken as 1 (exactly on-policy)")
    elif step.old_log_probs_T is None:
        notes.append("old_log_probs are missing: rollout_log_probs are taken as the policy that sampled")
    return notes


def _on_log_probs(step: RolloutBatch) -> list[str]:
    """Log-probabilities of trained tokens that none can be."""
    notes = []
    streams = {field: values_T for field, values_T in step.token_fields.items() if field.endswith("log_probs_T")}
    for field, values_T in streams.items():
        above_T = step.loss_mask_T & (values_T > ROUNDING)
        if count := int(above_T.sum()):
            most, those = float(values_T[above_T].max()), plural(count, "trained token", "trained tokens")
            notes.append(f"{field.removesuffix('_T')} above 0 at {those}, up to {most:.3g}: no probability is above 1")
    return notes


def _on_certain_tokens(inputs: StepInputs, values: Values) -> list[str]:
    """What sampler_mismatch is without trained tokens whose sampler log-prob is exactly 0, where others' is not."""
    step, counted = inputs.step, values.get("sampler_mismatch")
    if counted is None or "rollout_log_probs" not in inputs.tokens:
        return []
    certain_T = step.loss_mask_T & (inputs.tokens["rollout_log_probs"] == 0)
    kept = step.derived(loss_mask_T=step.loss_mask_T & ~certain_T)
    rule = inputs.weighing[inputs.names[0]].metrics
    if not certain_T.any() or not kept.loss_mask_T.any() or rule == CUSTOM:
        return []
    apart_T = (inputs.tokens["trainer_log_probs"] - inputs.tokens["rollout_log_probs"]).abs_().double()
    without = float(masked_weights(rule, kept).whole() @ apart_T.masked_fill_(~kept.loss_mask_T, 0.0))
    those = plural(int(certain_T.sum()), "trained token", "trained tokens")
    return [f"sampler_mismatch is {counted:.5g}; without {those} whose sampler log-prob is exactly 0 it is {without:.5g}"]


def _on_trained_rollouts(values: Mapping[str, Values]) -> list[str]:
    """Metrics that count fully masked rollouts: what they are without, once for the rules that agree in that."""
    rules: dict[str, list[str]] = {}
    for rule, numbers in values.items():
        found = [name.removesuffix(OVER_TRAINED) for name in numbers if name.endswith(OVER_TRAINED)]
        texts = [
            f"{name} {without:.5g} (counted: {counted:.5g})"
            for name in found
            if (without := numbers[name + OVER_TRAINED]) is not None and (counted := numbers[name]) is not None
        ]
        if texts:
            rules.setdefault(", ".join(texts), []).append(rule)
    return [
        f"fully masked rollouts count as 0 in these metrics under {listed(names)}; over the trained rollouts alone: {text}"
        for text, names in rules.items()
    ]


def _on_groups(inputs: StepInputs, values: Values) -> list[str]:
    groups, flat = values.get("groups"), values.get("zero_variance_groups")
    advantages_T = inputs.tokens.get("advantages")
    told_apart = values.get("all_wrong_groups_with_advantage")
    notes = []
    if told_apart and groups:
        notes.append(
            f"warning: groups without a right answer whose advantages are not 0: {told_apart:g} of {groups:g}; wrong answers"
            " differ in advantage (by a length penalty or a graded reward), and the policy is trained on the difference"
        )
    if not groups or not flat or advantages_T is None or not values["tokens"]:
        return notes
    if flat < groups or (inputs.tokens["loss_mask"] & (advantages_T != 0)).any():
        return [
            *notes,
            f"zero-variance groups {flat:g}/{groups:g}: every advantage in them is 0",
        ]
    kl = "; what moves the policy is the KL term alone" if values.get("kl_loss") and values.get("grad_norm_log_probs") else ""
    return [
        *notes,
        f"zero-variance groups {flat:g}/{groups:g}: every advantage is 0, so pg_loss is exactly 0 and there is no signal{kl}"
        " (the spread of rewards over the whole batch does not matter)",
    ]


def _on_loss(inputs: StepInputs, values: Mapping[str, Values]) -> list[str]:
    notes = []
    for rule in inputs.names:
        loss, norm = values[rule].get("pg_loss"), values[rule].get("grad_norm_log_probs")
        if loss is not None and abs(loss) < ZERO and norm and values[rule].get("ratio_deviation", 0) == 0:
            notes.append(
                f"pg_loss is 0 under {rule} but the gradient is not: with ratios of 1, advantages centred in each group cancel;"
                " this is how a step starts, not a fault"
            )
    if inputs.has_ratio and values[inputs.names[0]].get("ratio_deviation") == 0:
        zero = "pg_clipfrac and ppo_kl are" if "pg_clipfrac" in values[inputs.names[0]] else "ppo_kl is"
        notes.append(f"every ratio is exactly 1: {zero} 0 because nothing was updated since sampling")
    return notes


def _on_ranks(layouts: Sequence[LayoutReport]) -> list[str]:
    notes = []
    for layout in layouts:
        idle = [rank.rank for rank in layout.ranks if not rank.partition]
        if idle:
            those = (
                f"rank {idle[0]} holds no sample and stays" if len(idle) == 1 else f"ranks {some(idle)} hold no sample and stay"
            )
            notes.append(f"layout {layout.layout}: {those} idle")
    return notes
