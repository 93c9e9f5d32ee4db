"""slime, miles and verl as shipped, as facts. Source: their code at the commits named; see `Rule.evidence`."""

from __future__ import annotations

import dataclasses

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Evidence, Rule

# -- slime and miles (Megatron) ---------------------------------------------------------------------------------------

_SLIME_TRAPS = (
    "a custom pg_loss reducer gets no rollout totals and no step counts, and must handle context parallelism itself",
    "a mask multiplies the loss, so NaN under the mask poisons the sum",
)
_SLIME = (
    Rule(
        "slime:sample_mean",
        "(no flag)",
        "624b824a (2026-08-21)",
        "executed",
        "1/N sum_r [ sum_(t in r) l_t / max(n_r, 1) ], N = global_batch_size rollouts",
        (By("rollouts"), By("tokens of the rollout", floor=1)),
        terms_evidence="code",
        mode="sample_mean",
        is_default=True,
        traps=("a fully masked rollout still counts in N", *_SLIME_TRAPS),
    ),
    Rule(
        "slime:per_token",
        "--calculate-per-token-loss",
        "624b824a (2026-08-21)",
        "code",
        "sum_t l_t / sum_i max(n_i, 1)",
        (By("tokens", masked="one token each"),),
        terms_evidence="code",
        mode="token_mean",
        traps=("each fully masked sample adds one token to the denominator", *_SLIME_TRAPS),
    ),
)
_MILES_TRAP = "on the FSDP backend the per-token normaliser is ignored: the gradient is T/dp times too large (open PR #3231)"
_MILES = tuple(
    dataclasses.replace(
        rule,
        name=rule.name.replace("slime", "miles"),
        version="31f1ca96 (2026-08-21)",
        evidence="code",
        traps=(*rule.traps, *((_MILES_TRAP,) if rule.mode == "token_mean" else ())),
    )
    for rule in _SLIME
)

# -- verl -------------------------------------------------------------------------------------------------------------

_ROWS_TRAP = (
    "the denominator is ppo_mini_batch_size * rollout.n, a constant: fully masked rows stay in it, multi-turn rows mis-scale it"
)
_VERL_VERSION = "0.9.1; 1dda039b (2026-08-22)"
_VERL = (
    Rule(
        "verl:token-mean",
        "actor.loss_agg_mode=token-mean",
        _VERL_VERSION,
        "executed",
        "sum_t l_t / T",
        (By("tokens", empty="nan"),),
        terms_evidence="code",
        mode="token_mean",
        is_default=True,
        traps=("with dp == 1 and missing counts it falls back to local counts (issue #7321)",),
    ),
    Rule(
        "verl:token-sum",
        "actor.loss_agg_mode=token-sum",
        _VERL_VERSION,
        "executed",
        "sum_t l_t",
        (),
        terms_evidence="code",
        traps=("no mean at all",),
    ),
    Rule(
        "verl:seq-mean-token-sum",
        "actor.loss_agg_mode=seq-mean-token-sum",
        _VERL_VERSION,
        "executed",
        "1/B sum_i sum_(t in i) l_t, B rows of the mini-batch",
        (By("samples"),),
        terms_evidence="code",
        mode="constant",
        traps=(_ROWS_TRAP, "constant with L = 1"),
    ),
    Rule(
        "verl:seq-mean-token-mean",
        "actor.loss_agg_mode=seq-mean-token-mean",
        _VERL_VERSION,
        "executed",
        "1/B sum_i [ sum_(t in i) l_t / (n_i + 1e-8) ]",
        (By("samples"), By("tokens of the sample", epsilon=1e-8)),
        terms_evidence="code",
        mode="sample_mean",
        traps=(_ROWS_TRAP, "GSPO and SAPO losses always use it, whatever the flag says"),
    ),
    Rule(
        "verl:seq-mean-token-sum-norm",
        "actor.loss_agg_mode=seq-mean-token-sum-norm actor.loss_scale_factor=L",
        _VERL_VERSION,
        "executed",
        "sum_t l_t / (B * S), S = loss_scale_factor, else the padded response width",
        (By("samples"), By("padded width")),
        divisor_is="actor.loss_scale_factor",
        terms_evidence="code",
        mode="constant",
        traps=(_ROWS_TRAP, "without loss_scale_factor, S is the padded width, which differs from step to step"),
    ),
)
_LEGACY_VERSION = "b178a3cd (2026-01-29), dp_actor.py"
_LEGACY_ROWS = By("samples", "micro-batch", masked="left out", empty="nan")
_Row = tuple[str, Evidence, str, tuple[By, ...], str, tuple[str, ...]]
"""(mode, evidence, formula, denominators, nearest mode here, traps)."""

_LEGACY_MODES: tuple[_Row, ...] = (
    (
        "token-mean",
        "executed",
        "sum l_t / T_mb",
        (By("tokens", "micro-batch", empty="nan"),),
        "token_mean",
        ("a fully masked micro-batch is 0/0", "what the original DAPO runs used"),
    ),
    ("seq-mean-token-sum", "derived", "sum l_t / B_mb", (_LEGACY_ROWS,), "constant", ("constant with L = 1",)),
    (
        "seq-mean-token-mean",
        "executed",
        "1/B_mb sum_i [ sum l_t / (n_i + 1e-8) ]",
        (_LEGACY_ROWS, By("tokens of the sample", epsilon=1e-8)),
        "sample_mean",
        ("rows that are not fully masked are counted in the micro-batch",),
    ),
    (
        "seq-mean-token-sum-norm",
        "executed",
        "sum l_t / padded width",
        (By("padded width"),),
        "constant",
        ("no mean over rows: proportional to the micro-batch size (issue #3741)",),
    ),
)
_VERL_LEGACY = tuple(
    Rule(
        f"verl-legacy:{name}",
        f"actor.loss_agg_mode={name}",
        _LEGACY_VERSION,
        evidence,
        f"mean over ranks, sum over micro-batches of (rows/rank's rows) * [ {formula} ]",
        counts,
        micro_batches="share of samples",
        ranks="mean",
        layouts="equal ranks",
        divisor_is="the padded response width" if "norm" in name else "",
        context_parallel="unverified",
        terms_evidence="code",
        mode=mode,
        is_default=name == "token-mean",
        traps=traps,
    )
    for name, evidence, formula, counts, mode, traps in _LEGACY_MODES
)

SLIME_VERL = (*_SLIME, *_MILES, *_VERL, *_VERL_LEGACY)
