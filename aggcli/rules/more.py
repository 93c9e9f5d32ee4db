"""Still more frameworks, and rules that issues and pull requests propose, as facts."""

from __future__ import annotations

import dataclasses

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Evidence, Rule
from aggcli.rules.trl_swift import TRL_SWIFT

_Row = tuple[str, str, tuple[By, ...], str, tuple[str, ...]]
"""(its name there, formula, denominators, nearest mode here, traps)."""


def _local(framework: str, flag: str, version: str, default: str, rows: tuple[_Row, ...], unverified: str = "") -> list[Rule]:
    """Rules whose loss is a mean of each micro-batch; micro-batches and ranks are averaged, which is what is `unverified` where
    anything is."""
    return [
        Rule(
            f"{framework}:{name}",
            f"{flag}={name}",
            version,
            "code",
            formula,
            counts,
            micro_batches="mean",
            ranks="mean",
            put_together_is="assumed" if unverified else "known",
            layouts="equal micro-batches",
            context_parallel="unverified",
            mode=mode,
            is_default=name == default,
            traps=traps,
            unverified=unverified,
        )
        for name, formula, counts, mode, traps in rows
    ]


_ROWS_OF_MB = By("samples", "micro-batch")
_TORCHRL = _local(
    "torchrl",
    "aggregation",
    "0.14.1",
    "token_mean",
    (
        (
            "token_mean",
            "sum l_t / T_mb, T_mb of the call",
            (By("tokens", "micro-batch", empty="nan"),),
            "token_mean",
            ("a token mean of each call of the loss, so of the micro-batch where gradients are accumulated",),
        ),
        (
            "prompt_mean",
            "1/B sum_i [ sum_(t in i) l_t / max(n_i, 1) ], B rows of the call",
            (_ROWS_OF_MB, By("tokens of the sample", floor=1)),
            "sample_mean",
            ("its prompt_mean is this project's sample_mean: each row, and not each prompt, weighs the same",),
        ),
    ),
    "how the calls of a step are put together, which is the user's loop; a mean here",
)
_RLINF = _local(
    "rlinf",
    "algorithm.loss_agg_func",
    "main in 2026",
    "",
    (
        (
            "token-mean",
            "1/GA sum_mb [ sum l_t / T_mb ], ranks averaged",
            (By("tokens", "micro-batch"),),
            "token_mean",
            ("T is that of the micro-batch",),
        ),
        (
            "seq-mean-token-sum",
            "1/GA sum_mb mean_rows( sum l_t )",
            (_ROWS_OF_MB,),
            "constant",
            ("constant with L = 1",),
        ),
        (
            "seq-mean-token-mean",
            "1/GA sum_mb mean_rows( sum l_t / n_i )",
            (_ROWS_OF_MB, By("tokens of the sample", empty="nan")),
            "sample_mean",
            ("a fully masked row is 0/0: no epsilon",),
        ),
    ),
    "which of the three is the default, and whether every worker divides by the accumulation steps",
)
_COSMOS = _local(
    "cosmos-rl",
    "loss_type",
    "main in 2026",
    "",
    (
        (
            "token-mean",
            "sum l_t / T_mb of the mini-batch",
            (By("tokens", "micro-batch", floor=1),),
            "token_mean",
            ("balance_dp_token sums T over ranks, and still not over the mini-batches of a step",),
        ),
    ),
    "how mini-batches are put together, and the floor of 1 on T; a mean here",
)
_SDPO = _local(
    "trl-sdpo",
    "loss_type",
    "1.16.0, trl.experimental.sdpo",
    "dapo",
    (
        (
            "dapo",
            "1/GA sum_mb [ sum l_t / max(T_mb, 1) ]",
            (By("tokens", "micro-batch", floor=1),),
            "token_mean",
            ("named dapo, and computed as GRPOTrainer's bnpo: T is that of the micro-batch",),
        ),
    ),
)

_TUNIX_ROWS = By("samples", masked="left out", floor=1)
_TUNIX = tuple(
    Rule(
        f"tunix:{name}",
        f"loss_agg_mode={name}",
        "0340b3b9",
        "code",
        formula,
        counts,
        divisor_is="norm" if "scale" in name else "",
        context_parallel="unverified",
        mode=mode,
        is_default=name == "sequence-mean-token-mean",
        traps=traps,
        unverified="that numerators and denominators of micro-batches are each added before the division, as they are returned",
    )
    for name, formula, counts, mode, traps in (
        ("token-mean", "sum_t l_t / T", (By("tokens", floor=1),), "token_mean", ()),
        (
            "sequence-mean-token-mean",
            "1/N+ sum_i [ sum_(t in i) l_t / max(n_i, 1) ], N+ rows that are not empty",
            (_TUNIX_ROWS, By("tokens of the sample", floor=1)),
            "sample_mean",
            ("MaxText's RL runs on it", "its logged reduced_pg_loss divides by all rows, empty ones included"),
        ),
        (
            "sequence-mean-token-scale",
            "sum_t l_t / (N+ * norm), norm the padded response width unless it is given",
            (_TUNIX_ROWS, By("padded width")),
            "constant",
            ("what its Dr.GRPO recipe uses",),
        ),
        ("seq-mean-token-sum", "sum_t l_t / N+", (dataclasses.replace(_TUNIX_ROWS, floor=1e-6),), "constant", ("L is 1",)),
        (
            "sequence-mean-token-sum-norm",
            "sum_t l_t / rows, unless norm is given",
            (By("samples"),),
            "constant",
            ("L is 1, and rows without a trained token are counted", "a norm that is given takes the place of the rows"),
        ),
    )
)
_COPIES: tuple[tuple[str, str, str], ...] = (
    ("unsloth", "zoo ce232d6c (2026-08-20)", "the chunked path divides by the chunks, of which the trainer passes 1"),
    ("axolotl", "067b021c (2026-07-24)", "without async training it is TRL's own trainer"),
)
_AS_TRL = tuple(
    dataclasses.replace(
        rule,
        name=rule.name.replace("trl", framework),
        version=version,
        evidence="code",
        divides_by=(By("tokens", empty="nan"),) if rule.is_default else rule.divides_by,
        entropy_term="its own weights",
        terms_evidence="unverified",
        is_default=False,
        traps=(*rule.traps, trap, *(("T is not kept from 0",) if rule.is_default else ())),
        unverified="which loss_type is the default there",
    )
    for framework, version, trap in _COPIES
    for rule in TRL_SWIFT
    if rule.name in ("trl:grpo", "trl:bnpo", "trl:dr_grpo", "trl:dapo")
)
_EASYR1 = (
    Rule(
        "easyr1:token",
        "worker.actor.loss_avg_mode=token",
        "main in 2026",
        "code",
        "sum_t l_t / T over all ranks",
        (By("tokens", empty="nan"),),
        mode="token_mean",
        is_default=True,
        unverified="the epsilon inside its masked mean; 0 here",
    ),
    Rule(
        "easyr1:seq",
        "worker.actor.loss_avg_mode=seq",
        "main in 2026",
        "code",
        "sum_mb (T_mb / T) * mean_rows( sum l_t / n_i )",
        (_ROWS_OF_MB, By("tokens of the sample", floor=1)),
        micro_batches="share of tokens",
        context_parallel="unverified",
        mode="sample_mean",
        traps=("micro-batches weigh by their tokens, not by their rows: not each response counts the same",),
        unverified="how a fully masked row is kept from 0/0; 0 here. Forks weigh micro-batches by their rows instead",
    ),
)
_AGENT_LIGHTNING = (
    Rule(
        "agent-lightning:per_rollout_mean",
        "policy_loss.loss_mode=per_rollout_mean",
        "5f93f2b2",
        "code",
        "1/R sum_r [ sum_(t in r) l_t / n_r ], R rollouts",
        (By("rollouts"), By("tokens of the rollout", floor=1)),
        mode="sample_mean",
        traps=("another version divides by the rows instead of the rollouts, where its report's eq. 16 has rollouts",),
        unverified="that its advantages are scaled over the whole optimizer step, before it is cut",
    ),
)


def _proposed(name: str, where: str, formula: str, counts: tuple[By, ...], mode: str, trap: str) -> Rule:
    evidence: Evidence = "second-hand"
    return Rule(
        f"proposal:{name}",
        "(proposal)",
        where,
        evidence,
        formula,
        counts,
        context_parallel="unverified",
        mode=mode,
        traps=(trap,),
        unverified="a proposal, from its thread: nobody ships it as far as is known here",
    )


_PROPOSALS = (
    _proposed(
        "session-balanced",
        "verl-project/uni-agent issue #185",
        "1/S sum_s 1/J_s sum_(j in s) [ sum_(t in j) l_t / n_j ], S sessions of J_s samples",
        (By("rollouts"), By("samples of the rollout"), By("tokens of the sample", floor=1)),
        "sample_mean",
        "a session is a rollout here, and its training samples weigh the same whatever their lengths",
    ),
    _proposed(
        "turn-denominator",
        "cua-lite issue #13",
        "1/N sum_r sum_(t in r) l_t / (J_r * mean tokens of a sample)",
        (By("rollouts"), By("samples of the rollout"), By("mean tokens of a sample")),
        "token_mean",
        "a turn is a training sample here; then it is the per-trajectory proposal on top of a token mean, written differently",
    ),
    _proposed(
        "per-trajectory",
        "verl PR #7580, on top of token-mean",
        "sum_t l_t * (1/k_i) / mean_i(1/k_i) / T, k_i the samples of sample i's rollout",
        (By("tokens"), By("samples of the rollout"), By("mean of inverse samples of the rollout")),
        "token_mean",
        "the factor goes on top of any mode; where every rollout is one sample it is 1",
    ),
)

MORE = (
    *_TORCHRL,
    *_RLINF,
    *_COSMOS,
    *_SDPO,
    *_TUNIX,
    *_AS_TRL,
    *_EASYR1,
    *_AGENT_LIGHTNING,
    *_PROPOSALS,
)
"""Rules of torchrl, RLinf, cosmos-rl, TRL's SDPO, tunix and MaxText, unsloth, axolotl, EasyR1, agent-lightning; proposals."""
