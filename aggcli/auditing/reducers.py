"""Anybody's reducer, called once per micro-batch as a framework calls it, as a weight per token.

Three signatures are known: slime's `(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` returning a
function of the flat losses; a masked matrix `(loss_BT, mask_BT, **counts)` as in verl and TRL; and `(loss_T)` alone, the
trained tokens of the micro-batch. The gradient of the output with respect to the losses *is* the weight vector.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from aggcli.errors import SettingError
from aggcli.layout.context_parallel import owner_of_tokens
from aggcli.layout.schedule import Schedule
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, distinct

Signature = Literal["slime", "matrix", "flat"]
SIGNATURES: tuple[Signature, ...] = ("slime", "matrix", "flat")
LINEAR = 1e-6
"""Relative size of a deviation from linearity that float32 arithmetic cannot explain."""


@dataclass(frozen=True, eq=False)
class ReducerRule:
    """A reducer as a rule.

    `ranks`: whether the framework averages ranks (`mean`, as data parallelism does; the matrix form's default) or sums them
    (slime, which cancels the average; the flat form). `width`: the least number of columns of the matrix. `divisor`: the
    constant that is offered as `loss_scale_factor` and `max_completion_length` (default: the longest response of the step).
    """

    function: Callable[..., Any]
    signature: Signature
    ranks: Literal["mean", "sum"]
    name: str = "reducer"
    divisor: float | None = None
    calculate_per_token_loss: bool = False
    width: int = 0


@dataclass
class Extraction:
    """The weights [T] of a reducer over one step, and what went wrong on the way: finding -> in words."""

    weight_T: Tensor
    problems: dict[str, str] = field(default_factory=dict)


def reducer_rule(function: Callable[..., Any], signature: Signature | None = None, **options: Any) -> ReducerRule:
    """The rule that `function` makes; its signature is recognised by its parameters. Raises `SettingError` when it is not."""
    chosen = signature or signature_of(function)
    if chosen not in SIGNATURES:
        raise SettingError(f"reducer signature '{chosen}': must be one of {', '.join(SIGNATURES)}")
    ranks = options.pop("ranks", None) or ("mean" if chosen == "matrix" else "sum")
    name = options.pop("name", None) or getattr(function, "__name__", type(function).__name__)
    return ReducerRule(function, chosen, ranks, name, **options)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Which of the three signatures a callable has."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise SettingError(f"the reducer's signature cannot be read ({error}); name it: slime, matrix or flat") from error
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    if any("length" in name for name in names[:2]) or (len(names) >= 3 and "mask" in names[2]):
        return "slime"
    takes_counts = any(p.kind in (kinds.VAR_KEYWORD, kinds.KEYWORD_ONLY) for p in parameters)
    required = [p for p in positional if p.default is kinds.empty]
    if len(required) >= 2 or (len(positional) >= 2 and takes_counts):
        unknown = [p.name for p in required[2:] if p.name not in COUNTS]
        if len(required) == 4 and unknown:
            return "slime"
        if unknown:
            raise SettingError(f"the reducer asks for {', '.join(unknown)}; known counts: {', '.join(COUNTS)}")
        return "matrix"
    if len(positional) >= 1:
        return "flat"
    raise SettingError("the reducer takes no losses: it must be called (loss_T), (loss_BT, mask_BT, **counts) or as slime does")


# -- one step -------------------------------------------------------------------------------------------------------


def extract(rule: ReducerRule, step: RolloutBatch, schedule: Schedule, cp: int = 1) -> Extraction:
    """Call the reducer on every micro-batch and context-parallel rank; put the gradients together as the framework does."""
    found = Extraction(torch.zeros(step.loss_mask_T.shape, dtype=torch.float64))
    if cp > 1 and rule.signature == "slime":
        found.problems["cannot run under context parallelism"] = (
            "slime gives a reducer its rank's tokens but whole masks: it must chunk them by Megatron's groups itself"
        )
        cp = 1
    owner_T = torch.from_numpy(owner_of_tokens(step.total_length_S.numpy(), step.response_length_S.numpy(), cp))
    places = np.split(np.arange(owner_T.numel()), np.cumsum(step.response_length_S.numpy())[:-1])
    share = 1.0 / len(schedule.partitions) if rule.ranks == "mean" else 1.0
    for rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
        for micro_batch in micro_batches:
            held = [partition[at] for at in micro_batch]
            at_T = torch.from_numpy(np.concatenate([places[sample] for sample in held]))
            counts = _counts(rule, step, schedule, rank, cp)
            for cp_rank in range(cp):
                found.weight_T[at_T] += share * _gradient(
                    rule, step, held, step.loss_mask_T[at_T], owner_T[at_T] == cp_rank, counts, found.problems
                )
    return found


def _gradient(
    rule: ReducerRule,
    step: RolloutBatch,
    held: list[int],
    mask_T: Tensor,
    mine_T: Tensor,
    counts: dict[str, Any],
    problems: dict[str, str],
) -> Tensor:
    """The weights of one micro-batch's response tokens, by two probes; NaN where the reducer fails."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(2):
        junk_T = torch.randn(mask_T.numel(), generator=generator).double()  # under the mask too
        x_T = torch.where(mine_T, junk_T, 0.0).requires_grad_()
        try:
            value = _call(rule, step, held, x_T, mask_T, mine_T, counts, problems)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise TypeError(f"it returned {type(value).__name__} {list(getattr(value, 'shape', []))}, not a scalar tensor")
            (weight_T,) = torch.autograd.grad(value.reshape(()), x_T, allow_unused=True) if value.requires_grad else (None,)
        except Exception as error:  # a user's code may raise anything; it is theirs to mend
            problems["fails"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return torch.full_like(x_T, torch.nan).detach()
        weight_T = torch.zeros_like(x_T) if weight_T is None else weight_T
        _check_call(value.detach().double().reshape(()), weight_T, x_T.detach(), mask_T, problems)
        weights.append(torch.where(mine_T, weight_T, 0.0))
    if not _close(weights[0], weights[1]):
        problems["not linear"] = "the weights change with the losses they multiply"
    return weights[0].detach()


def _check_call(value: Tensor, weight_T: Tensor, x_T: Tensor, mask_T: Tensor, problems: dict[str, str]) -> None:
    if not (torch.isfinite(weight_T).all() and torch.isfinite(value)):
        problems["not finite"] = "the loss or a weight is NaN or infinite"
        return
    if bool((weight_T[~mask_T] != 0).any()):
        problems["masked tokens have weight"] = "the gradient reaches tokens whose loss mask is 0"
    size = float((weight_T * x_T).abs().sum())
    if abs(float(value) - float(weight_T @ x_T)) > LINEAR * max(size, 1e-12):
        problems["not linear"] = "the output is not the weighted sum of the losses"


def _close(a_T: Tensor, b_T: Tensor) -> bool:
    scale = float(torch.nan_to_num(a_T).abs().max()) if a_T.numel() else 0.0
    return bool(torch.allclose(a_T, b_T, rtol=LINEAR, atol=LINEAR * scale, equal_nan=True))


# -- calling --------------------------------------------------------------------------------------------------------


def _call(
    rule: ReducerRule,
    step: RolloutBatch,
    held: list[int],
    x_T: Tensor,
    mask_T: Tensor,
    mine_T: Tensor,
    counts: dict[str, Any],
    problems: dict[str, str],
) -> Any:
    lengths = step.response_length_S[held].tolist()
    if rule.signature == "flat":
        loss = x_T[mask_T & mine_T]
        arguments: list[Any] = [loss]
        value = _watched(rule.function, arguments, {}, problems)
    elif rule.signature == "matrix":
        width = max(rule.width, *lengths) if lengths else rule.width
        arguments = [_rows(x_T, lengths, width), _rows(mask_T.double(), lengths, width)]
        value = _watched(rule.function, arguments, _wanted(rule.function, counts), problems)
    else:
        masks = list(mask_T.double().split(lengths))
        arguments = [step.total_length_S[held].tolist(), lengths, masks, rule.calculate_per_token_loss]
        before = _copied(arguments)
        reduce = rule.function(*arguments)
        value = _watched(reduce, [x_T * 1.0], {}, problems)
        if not _same(before, arguments):
            problems["mutates its inputs"] = "lengths or masks differ after the call"
    return value


def _watched(function: Callable[..., Any], arguments: list[Any], counts: dict[str, Any], problems: dict[str, str]) -> Any:
    before = _copied(arguments)
    value = function(*arguments, **counts)
    if not _same(before, arguments):
        problems["mutates its inputs"] = "the losses or masks differ after the call"
    return value


def _copied(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, Tensor) else _copied(v) if isinstance(v, list) else v for v in values]


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    if len(before) != len(after):
        return False
    for a, b in zip(before, after, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not torch.equal(a, b.detach()):
                return False
        elif isinstance(a, list) and isinstance(b, list):
            if not _same(a, b):
                return False
        elif a != b:
            return False
    return True


def _rows(value_T: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """Flat values as rows padded with 0 on the right, differentiable."""
    rows = [torch.nn.functional.pad(row, (0, width - row.numel())) for row in value_T.split(list(lengths))]
    return torch.stack(rows) if rows else value_T.new_zeros(0, width)


COUNTS = {
    "batch_num_tokens": "trained tokens of the optimizer step (verl)",
    "num_items_in_batch": "the same (TRL)",
    "global_batch_size": "samples of the step (verl)",
    "num_rollouts": "rollouts of the step",
    "num_prompts": "prompt groups of the step",
    "dp_size": "data-parallel ranks (verl)",
    "num_processes": "the same (TRL)",
    "cp_size": "context-parallel ranks",
    "rank_num_tokens": "trained tokens of this rank",
    "rank_num_samples": "samples of this rank",
    "num_micro_batches": "micro-batches of this rank",
    "gradient_accumulation_steps": "the same (TRL)",
    "current_gradient_accumulation_steps": "the same (TRL)",
    "loss_scale_factor": "the divisor: --divisor, else the longest response of the step (verl)",
    "max_completion_length": "the same (TRL)",
    "divisor": "the same",
}
"""What the matrix form is offered by name."""


def _counts(rule: ReducerRule, step: RolloutBatch, schedule: Schedule, rank: int, cp: int) -> dict[str, Any]:
    tokens_S = step.mask_sum_S
    mine = list(schedule.partitions[rank])
    groups = step.group_S[step.group_S != NO_GROUP]
    divisor = rule.divisor or float(max(int(step.response_length_S.max()), 1))
    total, ranks, cuts = int(tokens_S.sum()), len(schedule.partitions), len(schedule.micro_batches[rank])
    values = (
        *(total, total, step.num_samples, distinct(step.rollout_S), distinct(groups)),
        *(ranks, ranks, cp, int(tokens_S[mine].sum()), len(mine), cuts, cuts, cuts, divisor, divisor, divisor),
    )
    return dict(zip(COUNTS, values, strict=True))


def _wanted(function: Callable[..., Any], counts: dict[str, Any]) -> dict[str, Any]:
    """The counts that a function has parameters for; all of them if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return counts
    return {p.name: counts[p.name] for p in list(parameters)[2:] if p.name in counts}
