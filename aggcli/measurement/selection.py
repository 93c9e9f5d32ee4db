"""What of a rollout batch is trained, where less than all of it is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from aggcli.config import RunConfig
from aggcli.errors import RolloutError
from aggcli.measurement.words import plural
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, group_of_rollout


@dataclass(frozen=True)
class Selected:
    """What is left of a rollout batch: None where nothing is. `generated`, `kept`: its prompt groups before and after, None
    where groups were not looked at; `notes`: what was left out, in words."""

    batch: RolloutBatch | None
    generated: int | None
    kept: int | None
    notes: tuple[str, ...]


def selected(batch: RolloutBatch, config: RunConfig) -> Selected:
    """What --drop-zero-variance and --mask-truncated leave of a batch whose advantages are set, in that order.

    Which groups have no signal does not depend on what is masked afterwards. Raises `RolloutError` where the batch does not say
    what the flags need.
    """
    generated = kept = None
    notes: list[str] = []
    left: RolloutBatch | None = batch
    if config.source.drop_zero_variance:
        left, generated, kept = _without_zero_variance(batch)
        if left is None:
            those = "its only prompt group has" if generated == 1 else f"all {generated} prompt groups have"
            return Selected(None, generated, kept, (f"{those} advantages of 0 alone, and --drop-zero-variance leaves nothing",))
        gone = " and the recorded layout with them" if generated != kept and batch.recorded is not None else ""
        notes.append(
            f"--drop-zero-variance: {generated - kept} of {plural(generated, 'prompt group')} left out{gone}, since every"
            " advantage in them is 0; what is counted here, N and P included, is over the rest"
        )
    if config.objective.mask_truncated:
        left, said = mask_truncated(left)
        notes.append(said)
    return Selected(left, generated, kept, tuple(notes))


def mask_truncated(batch: RolloutBatch) -> tuple[RolloutBatch, str]:
    """The batch with a loss mask of 0 on its truncated responses, and that in words (overlong filtering, DAPO section 3.4).

    Raises `RolloutError` where the batch does not say of any response whether it is truncated.
    """
    truncated_S = batch.truncated_S
    if truncated_S is None:
        raise RolloutError(
            f"{batch.name}: --mask-truncated needs to know which responses are truncated (status), and nothing here says it"
        )
    cut_S = truncated_S == 1
    cut, unknown = int(cut_S.sum()), int(truncated_S.isnan().sum())
    cut_T = torch.repeat_interleave(cut_S, batch.response_length_S, output_size=batch.loss_mask_T.numel())
    they = "its loss mask is 0, and it still counts" if cut == 1 else "their loss mask is 0, and they still count"
    words = f"--mask-truncated: truncated responses: {cut} of {batch.num_samples}" + (f"; {they} in N" if cut else "")
    if unknown:
        words += f"; samples that do not say how they ended, and keep their mask: {unknown}"
    return dataclasses.replace(batch, loss_mask_T=batch.loss_mask_T & ~cut_T), words


def _without_zero_variance(batch: RolloutBatch) -> tuple[RolloutBatch | None, int, int]:
    """The batch without the prompt groups whose trained tokens all have advantage 0, which is what dynamic sampling (DAPO
    section 3.2) would have left; and the number of its groups before and after. Samples without a group stay."""
    if batch.advantages_T is None:
        raise RolloutError(f"{batch.name}: --drop-zero-variance needs advantages, or rewards and groups that give them")
    group_S = group_of_rollout(batch.group_S, batch.rollout_S)
    grouped_S = group_S != NO_GROUP
    if not grouped_S.any():
        raise RolloutError(f"{batch.name}: --drop-zero-variance needs group_index (--group-size groups consecutive rollouts)")
    has_T = batch.loss_mask_T & (batch.advantages_T != 0)
    signal_S = torch.zeros(batch.num_samples, dtype=torch.int64).index_add_(0, batch.sample_of_token(), has_T.long())
    signal_P = torch.zeros(int(group_S.max()) + 1, dtype=torch.int64)
    signal_P.index_add_(0, group_S[grouped_S], signal_S[grouped_S])
    keep_S = ~grouped_S | (signal_P[group_S.clamp(min=0)] > 0)
    generated, kept = (int(group_S[chosen_S].unique().numel()) for chosen_S in (grouped_S, grouped_S & keep_S))
    if generated == kept:
        return batch, generated, kept
    if not keep_S.any():
        return None, generated, kept
    return _dense(batch.select(keep_S.nonzero().flatten())), generated, kept


def _dense(batch: RolloutBatch) -> RolloutBatch:
    """The batch with rollout and group ids from 0 without gaps, and their labels."""
    rollouts, rollout_S = batch.rollout_S.unique(return_inverse=True)
    known_S = batch.group_S != NO_GROUP
    groups, group_K = batch.group_S[known_S].unique(return_inverse=True)
    group_S = batch.group_S.clone()
    group_S[known_S] = group_K
    labels = batch.labels
    return dataclasses.replace(
        batch,
        rollout_S=rollout_S,
        group_S=group_S,
        labels=dataclasses.replace(
            labels,
            rollouts=tuple(labels.rollouts[at] for at in rollouts.tolist()) if labels.rollouts else (),
            groups=tuple(labels.groups[at] for at in groups.tolist()) if labels.groups else (),
        ),
    )
