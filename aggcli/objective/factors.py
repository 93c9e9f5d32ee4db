"""What to multiply advantages by, so that a framework's own rule computes another mode: weight wanted over weight given.

The policy loss of a token is linear in its advantage, and a positive factor moves no clip: `min(r A, clip(r) A)` and its dual
clip scale with A. A framework that gives token t the weight g_t therefore computes `sum_t w_t * l_t` once each advantage is
multiplied by `w_t / g_t`. Both weights are one number at all tokens of a sample, and so is the factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aggcli.errors import RolloutError, SettingError, some
from aggcli.objective.weights import masked_weights
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rules import Rule
from aggcli.rules.reference import varies


def advantage_factors(step: RolloutBatch, wanted: Rule, given: Rule) -> Tensor:
    """The factor of each sample's advantage, float64 [S], under which the rule `given` has the weights of `wanted`.

    `step` is the whole optimizer step, over all ranks and micro-batches. A sample without weight under `given`, since it has no
    trained token or since its advantage is 0, has no loss either, and factor 1. Exact for the policy loss; what else a loss
    adds (KL, entropy) is aggregated as before. Raises `SettingError` for a rule `given` that a layout changes, since then no
    factor known before the step is cut is right; `RolloutError` for a rule that looks at advantages without any; and as
    `masked_weights` does.
    """
    need_correctable(given)
    for rule in (wanted, given):
        if rule.drops_zero_advantages and step.advantages_T is None:
            raise RolloutError(f"{step.name}: {rule.name} leaves out tokens of zero advantage, so it needs the advantages")
    wanted_S, given_S = (masked_weights(rule, step).value_S for rule in (wanted, given))
    return torch.where((step.mask_sum_S > 0) & (given_S > 0), wanted_S / given_S, 1.0)


def need_correctable(rule: Rule) -> None:
    """Raise `SettingError` for a rule that no factor can turn into another: one that a layout changes, or that weighs masked
    tokens."""
    if varies(rule):
        raise SettingError(
            f"{rule.name}: its weights change with the layout ({rule.why_it_varies()}), so no factor that is known before the"
            " step is cut turns it into another mode; use a rule whose weights do not (`aggcli audit --framework"
            f" {rule.framework}` names them)"
        )
    if rule.numerator == "unmasked":
        raise SettingError(
            f"{rule.name}: masked tokens have weight under it, which a factor of their sample does not take away"
        )


def need_groups_of(step: RolloutBatch, *rules: Rule) -> None:
    """Raise `RolloutError` for a sample without a prompt group under a rule that counts prompts."""
    missing = (step.group_S == NO_GROUP).nonzero().flatten().tolist()
    for rule in (rule for rule in rules if rule.needs_groups and missing):
        raise RolloutError(
            f"{step.sample_name(missing[0])}: its prompt group is missing, and {rule.name} counts prompts: give groups=[...],"
            " an id for each sample"
        )


def without_tokens(step: RolloutBatch) -> list[str]:
    """In words: the prompt groups of which no token is trained, and the samples of other groups of which none is."""
    is_empty_S = step.mask_sum_S == 0
    groups = step.group_S[step.group_S != NO_GROUP].unique()
    empty = groups[~torch.isin(groups, step.group_S[~is_empty_S])]
    samples = (is_empty_S & ~torch.isin(step.group_S, empty)).nonzero().flatten().tolist()
    named = [repr(step.labels.groups[group]) for group in empty.tolist()]
    said = []
    if named:
        those = f"prompt group {named[0]} has" if len(named) == 1 else f"prompt groups {some(named)} have"
        said.append(f"{those} no trained token, and {'counts' if len(named) == 1 else 'count'} all the same")
    if samples:
        those = f"sample {samples[0]} has" if len(samples) == 1 else f"samples {some(samples)} have"
        it = (
            "it counts all the same, and its factor is"
            if len(samples) == 1
            else "they count all the same, and their factors are"
        )
        said.append(f"{those} no trained token: {it} 1")
    return said


def as_step(trained: Any, groups: Any, rollouts: Any, advantages: Any) -> RolloutBatch:
    """The optimizer step of these samples as far as weights need it; the arguments are those of `aggcli.advantage_factors`.

    Raises `SettingError` for what is no list, `RolloutError` for shapes that do not fit and ids that cannot be.
    """
    rows = _listed(trained, "trained")
    given = {"groups": groups, "rollouts": rollouts, "advantages": advantages}
    called = {"groups": "group_index", "rollouts": "rollout_id", "advantages": "advantage"}
    columns = {name: _listed(column, name) for name, column in given.items() if column is not None}
    for name, column in columns.items():
        if len(column) != len(rows):
            raise RolloutError(f"the optimizer step: {name} of {len(column)} samples, where {len(rows)} are trained")
    builder = BatchBuilder("the optimizer step")
    for at, row in enumerate(rows):
        mask = {"loss_mask": [int(token) for token in row]} if isinstance(row, Sequence) else {}
        length = len(row) if isinstance(row, Sequence) else row
        builder.add(
            {
                "response_length": length,
                "total_length": length,
                **mask,
                **{called[name]: one[at] for name, one in columns.items()},
            }
        )
    return builder.build()


def as_given(factor_S: Tensor, trained: Any) -> Any:
    """The factors as a tensor on the device of `trained`, an array, or a list: what it is."""
    if isinstance(trained, Tensor):
        return factor_S.to(trained.device)
    return factor_S.numpy() if isinstance(trained, np.ndarray) else factor_S.tolist()


def _listed(values: Any, name: str) -> list[Any]:
    """Plain lists of numbers, however deep, of what may be tensors or arrays. Raises `SettingError` for what is no list."""
    plain = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    if isinstance(plain, str) or not isinstance(plain, Iterable):
        raise SettingError(f"{name}: must be a list, an array or a tensor with an entry for each sample, not {plain!r}")
    return [one.tolist() if isinstance(one, Tensor | np.ndarray | np.generic) else one for one in plain]
