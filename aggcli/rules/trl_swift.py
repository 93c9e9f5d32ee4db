"""TRL and ms-swift as shipped, as facts. Source: their code at the commits named; see `Rule.evidence`."""

from __future__ import annotations

import dataclasses

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Evidence, Rule

_ROWS_OF_MB = By("samples", "micro-batch")
_TRL_VERSION = "1.16.0; f2cd5771 (2026-07-24)"
_OWN_LOSS = "its per-token loss is not the clipped surrogate: only the weights are what is shown here"
_Row = tuple[str, Evidence, str, tuple[By, ...], str, tuple[str, ...]]
"""(mode, evidence, formula, denominators, nearest mode here, traps)."""

_TRL_MODES: tuple[_Row, ...] = (
    (
        "grpo",
        "executed",
        "1/GA sum_mb mean_rows( sum l_t / max(n_i, 1) )",
        (_ROWS_OF_MB, By("tokens of the sample", floor=1)),
        "sample_mean",
        ("a fully masked row stays in the mean over rows",),
    ),
    (
        "bnpo",
        "executed",
        "1/GA sum_mb [ sum l_t / max(T_mb, 1) ]",
        (By("tokens", "micro-batch", floor=1),),
        "token_mean",
        ("with one row per device it is loss_type=grpo",),
    ),
    (
        "dr_grpo",
        "executed",
        "1/GA sum_mb sum l_t / (rows_mb * max_completion_length)",
        (_ROWS_OF_MB, By("divisor")),
        "constant",
        ("a fully masked row stays in rows_mb",),
    ),
    (
        "dapo",
        "executed",
        "sum_t l_t / T, T over the optimizer step",
        (By("tokens", floor=1),),
        "token_mean",
        ("'dapo' is the global token mean here, not DAPO's printed prompt mean",),
    ),
    (
        "luspo",
        "code",
        "1/GA sum_mb mean_rows( sum l_t )",
        (_ROWS_OF_MB,),
        "constant",
        (
            "at importance_sampling_level=sequence, the paper's, a row has one loss, times its length; at token level, the"
            " default, TRL warns, and sums the losses of the row's tokens",
            "constant with L = 1",
        ),
    ),
    (
        "cispo",
        "code",
        "sum_t l_t / T, T over the optimizer step; l_t = -clip(r_t) A log pi_t",
        (By("tokens", floor=1),),
        "token_mean",
        (_OWN_LOSS, "the printed CISPO divides by the tokens of each prompt: prompt_mean"),
    ),
    (
        "vespo",
        "code",
        "sum_t l_t / T, T over the optimizer step; l_t = -phi A log pi_t",
        (By("tokens", floor=1),),
        "token_mean",
        (_OWN_LOSS,),
    ),
    (
        "sapo",
        "code",
        "1/GA sum_mb mean_rows( sum l_t / max(n_i, 1) ); l_t = -4/tau sigmoid(tau (r_t - 1)) A",
        (_ROWS_OF_MB, By("tokens of the sample", floor=1)),
        "sample_mean",
        (_OWN_LOSS,),
    ),
)
_STEP_TOKENS = ("dapo", "cispo", "vespo")
"""The loss types that divide by `num_items_in_batch`, the trained tokens of the whole generation batch over the optimizer steps
that it is cut into; of the optimizer step, where that is one."""
_ENTROPY = Rule(
    "trl:entropy-bonus",
    "entropy_coef",
    _TRL_VERSION,
    "code",
    "1/GA sum_mb [ sum h_t / T_mb ]",
    (By("tokens", "micro-batch", floor=1),),
    micro_batches="mean",
    ranks="mean",
)
"""How TRL aggregates its entropy bonus under every loss_type: not a rule for pg_loss."""
_TRL = tuple(
    Rule(
        f"trl:{name}",
        f"loss_type={name}",
        _TRL_VERSION,
        evidence,
        formula,
        counts,
        micro_batches="sum" if name in _STEP_TOKENS else "mean",
        ranks="sum" if name in _STEP_TOKENS else "mean",
        layouts="any" if name in _STEP_TOKENS else "equal micro-batches",
        divisor_is="max_completion_length" if name == "dr_grpo" else "",
        context_parallel="unverified",
        own_loss=_OWN_LOSS in traps,
        entropy_term=_ENTROPY,
        terms_evidence="code",
        mode=mode,
        is_default=name == "dapo",
        traps=traps,
    )
    for name, evidence, formula, counts, mode, traps in _TRL_MODES
)
_SWIFT = tuple(
    dataclasses.replace(
        rule,
        name=rule.name.replace("trl", "ms-swift"),
        version="3602360a (2026-08-22)",
        evidence="code",
        entropy_term="its own weights",
        terms_evidence="unverified",
        formula="sum_t l_t / (T * GA)" if rule.is_default else rule.formula,
        divides_by_accumulation_again=rule.is_default,
        is_default=rule.name == "trl:grpo",
        layouts="equal micro-batches",
        traps=("overlong_filter masks after T was counted: filtered tokens stay in T", "issue #10117 (open)")
        if rule.is_default
        else rule.traps,
        unverified="the Megatron backend looks under-scaled the same way (derived, not run)",
    )
    for rule in _TRL
    if rule.name.partition(":")[2] in ("grpo", "bnpo", "dr_grpo", "dapo")
)

TRL_SWIFT = (*_TRL, *_SWIFT)
