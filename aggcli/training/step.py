"""One optimizer step of a stack: weights for the whole step first, then each rank's own rows, then one sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.layout.schedule import Layout
from aggcli.objective.policy_loss import OF_SEQUENCES, averaged_log_ratio, kl_terms, policy_terms
from aggcli.objective.step import OWN_WEIGHTS
from aggcli.objective.weighing import weighing_of
from aggcli.objective.weights import aggregate, need_no_nan, rule_weights
from aggcli.policy.protocol import Pass, Policy
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rules import Rule
from aggcli.training.rows import schedules_of_runs
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE, World


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Everything a token of the step needs, flat [T]: the weights of its loss, metrics, KL and entropy, advantages, clip range
    and coefficients of its run, and the log-probabilities of the other policies where there are any."""

    loss_weight_T: Tensor
    metric_weight_T: Tensor
    kl_weight_T: Tensor
    entropy_weight_T: Tensor
    advantages_T: Tensor
    clip_low_T: Tensor
    clip_high_T: Tensor
    kl_coef_T: Tensor
    old_log_probs_T: Tensor | None = None
    ref_log_probs_T: Tensor | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of each run's own rule, by name."""
        of_rule = (self.loss_weight_T, self.metric_weight_T, self.kl_weight_T, self.entropy_weight_T)
        return dict(zip(OWN_WEIGHTS, of_rule, strict=True))

    def beside(self, old_log_probs_T: Tensor | None, ref_log_probs_T: Tensor | None) -> StepTokens:
        """The same with the log-probabilities of the other policies."""
        return replace(self, old_log_probs_T=old_log_probs_T, ref_log_probs_T=ref_log_probs_T)


@dataclass(frozen=True, eq=False)
class Gradient:
    """`gradient_RQ`: d loss / d the parameters of each run that this rank holds, summed over ranks; `norm_R`: the 2-norm of all
    of it, float64; `log_probs_T`, `entropy_T`: of the whole step; `own_log_probs_T`, `own_entropy_T`: as this rank has computed
    them, 0 at others' tokens."""

    gradient_RQ: Tensor
    norm_R: Tensor
    log_probs_T: Tensor
    entropy_T: Tensor
    own_log_probs_T: Tensor
    own_entropy_T: Tensor


def step_tokens(step: RolloutBatch, runs: Sequence[RunSpec], layout: Layout, dtype: torch.dtype) -> StepTokens:
    """Weights and settings of every token of one optimizer step, each run by its own rule, before anything is cut.

    `layout`: the one in force, which only other frameworks' rules and narrower normalisers depend on.
    """

    def of_run(value: Callable[[ObjectiveConfig], float]) -> Tensor:
        values = [value(run.objective) for run in runs]
        if len(set(values)) == 1:
            return torch.full(step.loss_mask_T.shape, values[0], dtype=dtype)
        return torch.tensor(values, dtype=dtype)[torch.repeat_interleave(step.run_S, step.response_length_S)]

    assert step.advantages_T is not None
    loss_T, metric_T, kl_T, entropy_T = (weight_T.to(dtype) for weight_T in stack_weights(step, runs, layout))
    return StepTokens(
        loss_T,
        metric_T,
        kl_T,
        entropy_T,
        step.advantages_T.to(dtype),
        of_run(lambda objective: objective.clip_range[0]),
        of_run(lambda objective: objective.clip_range[1]),
        of_run(lambda objective: objective.kl_coef),
    )


def stack_weights(step: RolloutBatch, runs: Sequence[RunSpec], layout: Layout) -> list[Tensor]:
    """The weights of the policy loss, of the metrics, of the KL and of the entropy at every token, each run of the stack by its
    own rule under a layout; float64 [T] each. Raises `RolloutError` where a run's rule divides 0 by 0."""
    weighing = [weighing_of(run.rule, run.objective) for run in runs]
    schedules = None
    if any(rule.depends_on_layout for one in weighing for rule in one.rules):
        schedules = [schedule for schedule, _ in schedules_of_runs(step, len(runs), layout)]
    run_T = torch.repeat_interleave(step.run_S, step.response_length_S)
    by_rule: dict[Rule, Tensor] = {}
    by_rules: dict[tuple[Rule, ...], Tensor] = {}

    def of_runs(rules: tuple[Rule, ...]) -> Tensor:
        if rules not in by_rules:
            weight_T = torch.zeros(step.loss_mask_T.numel(), dtype=torch.float64)
            distinct = dict.fromkeys(rules)
            for rule in distinct:
                if rule not in by_rule:
                    by_rule[rule] = rule_weights(rule, step, schedules)
                before_T, weight_T = weight_T, by_rule[rule]
                if len(distinct) > 1:
                    mine_T = torch.tensor([used == rule for used in rules])[run_T]
                    weight_T = torch.where(mine_T, weight_T, before_T)
                need_no_nan(weight_T, rule, step)
            by_rules[rules] = torch.where(step.loss_mask_T, weight_T, 0.0)
        return by_rules[rules]

    kinds = zip(*((one.loss, one.metrics, one.kl, one.entropy) for one in weighing), strict=True)
    return [of_runs(rules) for rules in kinds]


def step_gradient(
    policy: Policy,
    rows: Sequence[Tensor],
    step: RolloutBatch,
    tokens_SL: Tensor,
    given: StepTokens,
    objective: ObjectiveConfig,
    world: World,
    sharing: World = ALONE,
) -> Gradient:
    """The gradient of every run's loss over the whole step, and the step's log-probabilities.

    `rows`: this rank's micro-batches, each [R, B] sample positions, -1 where a run has fewer rows. Every micro-batch only
    sums `w_t * l_t`; only sums cross ranks. Rows whose loss has no gradient, such as those of groups of equal rewards, go
    through a pass without one where that pays. With `given.old_log_probs_T` None the policy itself is the old one (ratio 1).
    `objective` holds the settings that are the same for all runs; `sharing`: the ranks that hold parts of the same rows.
    """
    gradient_RQ = policy.no_gradient()  # and so it stays of a rank without rows
    rows = _as_many(rows, policy)
    new_T = torch.zeros(2, step.loss_mask_T.numel(), dtype=torch.float64)
    is_alone = given.old_log_probs_T is None and given.ref_log_probs_T is None
    fewest = policy.fewest_apart if is_alone else None  # else rows are read as they were: what has not moved is not apart
    learns_S = None if fewest is None or step.num_samples < fewest else has_gradient(step, given, objective)
    for some in policy.passes():
        is_first = True
        for part_RB, learns in [part for row_RB in rows for part in apart(row_RB[some.runs], learns_S, fewest)]:
            with nullcontext() if learns else torch.no_grad():
                at, own_T, spread_T = read(some, step, tokens_SL, part_RB, policy.device)
            if learns:
                loss = loss_of_rows(own_T, spread_T, at, step, given, objective, policy.device, sharing)
                if loss.requires_grad:  # a token of these runs is in this micro-batch
                    some.add_gradient(loss, gradient_RQ, is_first=is_first)
                    is_first = False
            new_T[0, at] = own_T.detach().double().cpu()
            new_T[1, at] = spread_T.detach().double().cpu()
    gradient_RQ = policy.summed(gradient_RQ, world)
    whole_T = world.add_up(new_T.clone())
    return Gradient(gradient_RQ, policy.shards.norm(gradient_RQ), *whole_T, *new_T)


def read(
    some: Pass, step: RolloutBatch, tokens_SL: Tensor, row_RB: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """What a pass of some runs gives of their rows, at the response tokens that this rank has computed: their flat positions in
    the step, on the CPU, their log-probabilities and entropies in nats, [N] each."""
    laid_out = lay_out(step, tokens_SL, row_RB)
    log_prob_RBC, entropy_RBC, owned_RBC = some.log_probs(*laid_out.inputs)
    place, at = laid_out.owned(owned_RBC, device)
    return at, log_prob_RBC.flatten()[place], entropy_RBC.flatten()[place]


def has_gradient(step: RolloutBatch, given: StepTokens, objective: ObjectiveConfig) -> Tensor:
    """Whether the loss of each sample has a gradient, bool [S]: a token of it has an advantage and a weight that are not 0, or
    a KL or entropy term. Every policy loss is 0 where the advantage is, at any log-probability."""
    moves_T = (given.loss_weight_T != 0) & (given.advantages_T != 0)
    if given.ref_log_probs_T is not None:
        moves_T |= given.kl_weight_T * given.kl_coef_T != 0
    if objective.entropy_coef:
        moves_T |= given.entropy_weight_T != 0
    return step.count_S(moves_T) > 0


def apart(row_RB: Tensor, learns_S: Tensor | None, fewest: int | None) -> list[tuple[Tensor, bool]]:
    """A micro-batch in two, whose second part no gradient comes from (False), where that has at least so many rows: as many
    columns as the run with most rows that one comes from needs are the first. In one piece where `fewest` or `learns_S`, which
    of the step's samples a gradient comes from, is None."""
    if learns_S is None or fewest is None:
        return [(row_RB, True)]
    is_row_RB = row_RB >= 0
    learns_RB = is_row_RB & learns_S[row_RB.clamp(min=0)]
    learning = int(learns_RB.sum(1).max())
    if int((is_row_RB.sum(1) - learning).clamp(min=0).sum()) < fewest:
        return [(row_RB, True)]
    ordered_RB = row_RB.gather(1, learns_RB.long().argsort(dim=1, descending=True, stable=True))
    first_RB, second_RB = ordered_RB[:, :learning], ordered_RB[:, learning:]
    return [(first_RB, True), (second_RB, False)] if learning else [(second_RB, False)]


def loss_of_rows(
    own_T: Tensor,
    entropy_T: Tensor,
    at: Tensor,
    step: RolloutBatch,
    given: StepTokens,
    objective: ObjectiveConfig,
    device: torch.device,
    sharing: World = ALONE,
) -> Tensor:
    """The sum of `w_t * l_t` over the tokens of one micro-batch (flat positions `at`), over all its runs: a sum of sums, whose
    gradient by each run's parameters is that run's own. `sharing`: the ranks that hold the other parts of its rows."""
    mask_T = step.loss_mask_T[at].to(device)
    old_T = own_T.detach() if given.old_log_probs_T is None else given.old_log_probs_T[at].to(device, own_T.dtype)
    of_sequence_T = None
    if objective.policy_loss in OF_SEQUENCES:
        of_sequence_T = _sequence_log_ratio(own_T, old_T, at, step, given, objective, sharing).to(device, own_T.dtype)
    terms = policy_terms(
        own_T,
        old_T,
        given.advantages_T[at].to(device),
        mask_T,
        objective,
        clip_range=(given.clip_low_T[at].to(device), given.clip_high_T[at].to(device)),
        sequence_log_ratio_T=of_sequence_T,
    )
    loss = aggregate(terms.pg_loss_T, given.loss_weight_T[at].to(device))
    if given.ref_log_probs_T is not None:
        ratio_T = terms.ratio_T if objective.kl_unbiased else None
        kl_T = kl_terms(own_T, given.ref_log_probs_T[at].to(device, own_T.dtype), mask_T, objective.kl_estimator, ratio_T)
        loss = loss + torch.dot((given.kl_weight_T[at] * given.kl_coef_T[at]).to(device), kl_T)
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * torch.dot(
            given.entropy_weight_T[at].to(device), torch.where(mask_T, entropy_T, 0.0)
        )
    return loss


def _sequence_log_ratio(
    own_T: Tensor,
    old_T: Tensor,
    at: Tensor,
    step: RolloutBatch,
    given: StepTokens,
    objective: ObjectiveConfig,
    sharing: World,
) -> Tensor:
    """The mean of `averaged_log_ratio` over the trained tokens of each token's response, float64 [T] on the CPU: of whole rows,
    whose other parts the ranks of `sharing` hold, all at the same micro-batch."""
    ratio_T = averaged_log_ratio(
        own_T.detach().cpu(),
        old_T.cpu(),
        given.advantages_T[at],
        step.loss_mask_T[at],
        objective,
        clip_range=(given.clip_low_T[at], given.clip_high_T[at]),
    )
    sample_T = torch.searchsorted(step.response_length_S.cumsum(0), at, right=True)
    sum_S = torch.zeros(step.num_samples, dtype=torch.float64).index_add_(0, sample_T, ratio_T)
    return (sharing.add_up(sum_S) / step.mask_sum_S.clamp(min=1))[sample_T]


def all_log_probs(
    policy: Policy, rows: Sequence[Tensor], step: RolloutBatch, tokens_SL: Tensor, world: World, *, reference: bool = False
) -> Tensor:
    """Log-probability of every response token of the step under the parameters as they are (`reference`: as they were at the
    start), float64 [T], on every rank."""
    found_T = torch.zeros(step.loss_mask_T.numel(), dtype=torch.float64)
    rows = _as_many(rows, policy)
    with torch.no_grad():
        for some in policy.passes(reference=reference):
            for row_RB in rows:
                at, own_T, _ = read(some, step, tokens_SL, row_RB[some.runs], policy.device)
                found_T[at] = own_T.double().cpu()
    return world.add_up(found_T)


def _as_many(rows: Sequence[Tensor], policy: Policy) -> Sequence[Tensor]:
    """As many micro-batches on every rank that holds a part of the parameters, for which they all wait in each: empty ones
    follow where a rank has fewer."""
    most = int(policy.shards.world.max([float(len(rows))])[0])
    return [*rows, *(torch.full((len(policy.flat_RQ), 1), -1) for _ in range(most - len(rows)))]


@dataclass(frozen=True, eq=False)
class LaidOut:
    """Rows of one micro-batch: `place` of each real response token in the flat [R * B * C], `position_T` in the step."""

    tokens_RBL: Tensor
    prompt_RB: Tensor
    length_RB: Tensor
    place: Tensor
    position_T: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a forward pass takes."""
        return self.tokens_RBL, self.prompt_RB, self.length_RB

    def owned(self, owned_RBC: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """`place` (on the device) and `position_T` of the tokens that this rank has computed."""
        place = self.place.to(device)
        if owned_RBC is None:
            return place, self.position_T
        mine_T = owned_RBC.flatten()[place]
        return place[mine_T], self.position_T[mine_T.cpu()]


def lay_out(step: RolloutBatch, tokens_SL: Tensor, row_RB: Tensor) -> LaidOut:
    real_RB = row_RB >= 0
    at_RB = row_RB.clamp(min=0)
    length_RB = torch.where(real_RB, step.response_length_S[at_RB], 0)
    prompt_RB = step.total_length_S[at_RB] - step.response_length_S[at_RB]
    width = int((prompt_RB + length_RB).max())  # a row of no sample is the prompt of the first
    columns = max(int(length_RB.max()), 1)
    valid_RBC = torch.arange(columns) < length_RB[:, :, None]
    start_S = step.response_length_S.cumsum(0) - step.response_length_S
    position_RBC = start_S[at_RB][:, :, None] + torch.arange(columns)
    return LaidOut(
        tokens_SL[at_RB][:, :, : max(width, 1)],
        prompt_RB,
        length_RB,
        valid_RBC.flatten().nonzero().flatten(),
        position_RBC[valid_RBC],
    )
