"""OpenRLHF, NeMo-RL and SkyRL as shipped, as facts. Source: their code at the commits named."""

from __future__ import annotations

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Rule

_OPENRLHF_TOKEN = Rule(
    "openrlhf:token",
    "token_level_loss=True",
    "3c3be623 (2026-08-13)",
    "code",
    "sum_t l_t / T",
    (By("tokens", empty="nan"),),
    terms_evidence="code",
    mode="token_mean",
    is_default=True,
    traps=("the KL and entropy losses are per token in either mode",),
)
_OPENRLHF = (
    _OPENRLHF_TOKEN,
    Rule(
        "openrlhf:sequence",
        "token_level_loss=False",
        "3c3be623 (2026-08-13)",
        "code",
        "sum_i [ sum_(t in i) l_t / (n_i + 1e-8) ] / rows that are not fully masked",
        (By("samples", masked="left out", empty="nan"), By("tokens of the sample", epsilon=1e-8)),
        kl_term=_OPENRLHF_TOKEN,
        entropy_term=_OPENRLHF_TOKEN,
        terms_evidence="code",
        mode="sample_mean",
        traps=("forced for GSPO",),
        unverified="ring attention was read, not run",
    ),
)
_NEMO_TOKEN = Rule(
    "nemo-rl:token",
    "loss_fn.token_level_loss=True",
    "7ea279ab (2026-08-22)",
    "code",
    "sum_t l_t / (T + 1e-8)",
    (By("tokens", epsilon=1e-8),),
    terms_evidence="code",
    mode="token_mean",
    is_default=True,
    traps=("CISPO requires it",),
)
_NEMO = (
    _NEMO_TOKEN,
    Rule(
        "nemo-rl:sequence",
        "loss_fn.token_level_loss=False",
        "7ea279ab (2026-08-22)",
        "code",
        "sum_i [ sum_(t in i) l_t / (n_i + 1e-8) ] / (valid rows + 1e-8)",
        (By("samples", masked="left out", epsilon=1e-8), By("tokens of the sample", epsilon=1e-8)),
        entropy_term=_NEMO_TOKEN,
        terms_evidence="code",
        mode="sample_mean",
        traps=("sequence-level importance sampling (GSPO) requires it",),
        unverified="a row with sample_mask 1 and no token counts as valid there; here every fully masked row is left out",
    ),
)
_SKYRL_VERSION = "a9564572 (2026-08-21)"
_SKYRL_TRAP = (
    "the weights are baked into the advantages before the data is split; KL and entropy terms stay means of micro-batch means"
)
_SKYRL_TERMS = Rule(
    "skyrl:kl-and-entropy",
    "(no flag)",
    _SKYRL_VERSION,
    "code",
    "mean over ranks and micro-batches of [ sum x_t / T_mb ]",
    (By("tokens", "micro-batch", floor=1),),
    micro_batches="mean",
    ranks="mean",
)
"""How SkyRL aggregates its KL and entropy terms under every loss_reduction: not a rule for pg_loss."""
_SKYRL_STEP = tuple(
    Rule(
        f"skyrl:{name}",
        f"trainer.algorithm.loss_reduction={name}",
        _SKYRL_VERSION,
        "code",
        formula,
        counts,
        divisor_is="trainer.algorithm.max_seq_len (prompt and response)" if "norm" in name else "",
        kl_term=_SKYRL_TERMS,
        entropy_term=_SKYRL_TERMS,
        terms_evidence="code",
        mode=mode,
        is_default=name == "token_mean",
        traps=(trap, _SKYRL_TRAP),
    )
    for name, formula, counts, mode, trap in (
        ("token_mean", "sum_t l_t / max(T, 1)", (By("tokens", floor=1),), "token_mean", "a custom loss must not average again"),
        (
            "sequence_mean",
            "1/B sum_i [ sum_(t in i) l_t / max(n_i, 1) ]",
            (By("samples"), By("tokens of the sample", floor=1)),
            "sample_mean",
            "step-wise training weighs a trajectory by its number of turns",
        ),
        (
            "seq_mean_token_sum_norm",
            "sum_t l_t / (B * max_seq_len)",
            (By("samples"), By("divisor")),
            "constant",
            "max_seq_len covers prompt and response",
        ),
        (
            "prompt_mean",
            "1/P sum_p [ sum_(t in p) l_t / max(T_p, 1) ]",
            (By("prompts"), By("tokens of the prompt", floor=1)),
            "prompt_mean",
            "strict mean over prompts (--prompt-mean-scale prompts); masked prompts stay in P",
        ),
    )
)
_SKYRL_LEGACY = (
    Rule(
        "skyrl:token_mean_legacy",
        "trainer.algorithm.loss_reduction=token_mean_legacy",
        _SKYRL_VERSION,
        "code",
        "1/n_mb sum_mb [ sum l_t / T_mb ]",
        (By("tokens", "micro-batch", floor=1),),
        micro_batches="mean of the step",
        drops_smaller_micro_batches=True,
        kl_term=_SKYRL_TERMS,
        entropy_term=_SKYRL_TERMS,
        terms_evidence="code",
        mode="token_mean",
        traps=("rows past n_mb * micro-batch size get no weight", _SKYRL_TRAP),
    ),
)

OPENRLHF_NEMO_SKYRL = (*_OPENRLHF, *_NEMO, *_SKYRL_STEP, *_SKYRL_LEGACY)
