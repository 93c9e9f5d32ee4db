"""More frameworks, and the variants that papers propose, as facts."""

from __future__ import annotations

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Rule

_ROLL_VERSION = "8eb27cc2 (2026-08-18)"
_ROLL_ROWS = By("samples", masked="left out", epsilon=1e-8)
_ROLL = (
    Rule(
        "roll:seq-mean-token-mean",
        "loss_agg_mode=seq-mean-token-mean",
        _ROLL_VERSION,
        "code",
        "sum_i [ sum_(t in i) l_t / n_i ] / (valid rows + 1e-8)",
        (_ROLL_ROWS, By("tokens of the sample")),
        mode="sample_mean",
        is_default=True,
        traps=("its documentation names seq-mean-token-sum as the default",),
        unverified="the epsilon inside its masked mean was not checked; 0 here",
    ),
    Rule(
        "roll:token-mean",
        "loss_agg_mode=token-mean",
        _ROLL_VERSION,
        "code",
        "sum over ALL response tokens of l_t / T",
        (By("tokens", empty="nan"),),
        numerator="unmasked",
        mode="token_mean",
        traps=("the mask is not applied to the numerator (PR #444): right only because advantages are masked before",),
    ),
    Rule(
        "roll:seq-mean-token-sum",
        "loss_agg_mode=seq-mean-token-sum",
        _ROLL_VERSION,
        "code",
        "sum_t l_t / valid rows",
        (_ROLL_ROWS,),
        mode="constant",
        traps=("constant with L = 1; fully masked rows are not counted",),
    ),
    Rule(
        "roll:seq-mean-token-sum-norm",
        "loss_agg_mode=seq-mean-token-sum-norm",
        _ROLL_VERSION,
        "code",
        "sum_t l_t / padded width",
        (By("padded width"),),
        divisor_is="the padded width (no flag sets it)",
        mode="constant",
        traps=("no mean over rows, and the width changes with the batch",),
        unverified="whether the width is that of the step or of a dynamically padded micro-batch; the step's here",
    ),
)
_OAT = tuple(
    Rule(
        f"oat:{name}",
        f"critic_type={name}",
        "c1a074c3 (2025-10-31); understand-r1-zero dfca49dd",
        "code",
        formula,
        (By("samples", "micro-batch"), inner),
        micro_batches="mean",
        ranks="mean",
        layouts="equal micro-batches",
        divisor_is="generate_max_length" if name == "drgrpo" else "",
        context_parallel="not applicable",
        mode=mode,
        is_default=name == "drgrpo",
        traps=traps,
    )
    for name, formula, inner, mode, traps in (
        (
            "drgrpo",
            "mean_rows( sum l_t / generate_max_length )",
            By("divisor"),
            "constant",
            ("a masked row stays in the mean", "its scripts use 3000"),
        ),
        (
            "grpo",
            "mean_rows( sum l_t / n_i )",
            By("tokens of the sample", empty="nan"),
            "sample_mean",
            ("a fully masked row is 0/0: no epsilon",),
        ),
    )
)
_OPEN_INSTRUCT = (
    Rule(
        "open-instruct:token",
        "loss_denominator=token",
        "e6c3044a (2026-08-20)",
        "code",
        "sum_t l_t / T over the accumulation group and all ranks",
        (By("tokens"),),
        mode="token_mean",
        is_default=True,
        traps=("packed rows left over from a group are dropped",),
    ),
    Rule(
        "open-instruct:constant",
        "loss_denominator=<number>",
        "e6c3044a (2026-08-20)",
        "code",
        "sum_t l_t / D",
        (By("divisor"),),
        divisor_is="loss_denominator",
        traps=("D is the token count of the whole group: no division by N, so it is not Dr.GRPO",),
    ),
)
_TORCHFORGE = (
    Rule(
        "torchforge:simple-grpo",
        "SimpleGRPOLoss",
        "6e77f0b3 (2025-11-15)",
        "code",
        "mean_rows( sum l_t / n_i ), local",
        (By("samples", "micro-batch"), By("tokens of the sample", floor=1)),
        micro_batches="mean",
        ranks="mean",
        layouts="equal micro-batches",
        context_parallel="unverified",
        mode="sample_mean",
        is_default=True,
        unverified="what a fully masked row gives; 0 here",
    ),
    Rule(
        "torchforge:reinforce",
        "ReinforceLoss",
        "6e77f0b3 (2025-11-15)",
        "code",
        "sum l_t / max(T_local, 1)",
        (By("tokens", "micro-batch", floor=1),),
        micro_batches="mean",
        ranks="mean",
        put_together_is="assumed",
        layouts="equal micro-batches",
        context_parallel="unverified",
        mode="token_mean",
        unverified="how micro-batches are put together; a mean here",
    ),
)
_SINGLE = (
    Rule(
        "areal",
        "(only mode)",
        "cbff54d6 (2026-08-22)",
        "code",
        "sum_t l_t / T",
        (By("tokens", floor=1),),
        mode="token_mean",
        is_default=True,
        traps=(
            "GSPO keeps the token denominator, which is not the paper's 1/G",
            "M2PO changes the mask before the count but weighs micro-batches by the original mask",
        ),
    ),
    Rule(
        "prime-rl",
        "(only mode)",
        "559b4477 (2026-08-21)",
        "code",
        "sum_t l_t / T, tokens of zero advantage left out of T",
        (By("tokens", floor=1),),
        drops_zero_advantages=True,
        mode="token_mean",
        is_default=True,
        traps=(
            "filter_zero_advantages (default) removes tokens of zero advantage from T: the step size rises as groups saturate",
            "before PR #2562 (2026-05) T was counted per rank",
        ),
        unverified="the floor of 1 on T",
    ),
    Rule(
        "tinker",
        "(only mode)",
        "cookbook 9dfcc3a2 (2026-08-19)",
        "code",
        "sum_t l_t",
        (),
        context_parallel="unverified",
        is_default=True,
        traps=("no normalisation: any other scheme goes into the advantages", "num_substeps makes separate optimizer steps"),
        unverified="the service itself cannot be checked",
    ),
)
_PAPERS = (
    Rule(
        "delta-l",
        "(paper) alpha in [0, 1]",
        "2509.07558",
        "paper",
        "1/M sum_i n_i^-alpha sum_(t in i) l_t / sum_j n_j^-alpha",
        (By("length power"), By("sum of inverse length powers"), By("divisor")),
        alpha=0.75,
        divisor_is="the paper's M",
        mode="sample_mean",
        traps=(
            "alpha 1 has sample_mean's relative weights, alpha 0 is constant; delta-l:0.5 sets alpha",
            "alpha 1 on CountDown, 0.75 on Math in the paper's code",
        ),
        unverified="fully masked responses are left out of the sum here; the paper has none",
    ),
    Rule(
        "delta-l:repo",
        "adv x w/mean(w), then mean over the padded matrix",
        "89da5b9d (2025-06-14)",
        "code",
        "mean over [B x width] of l_t * n_i^-alpha / mean_j n_j^-alpha",
        (
            By("length power"),
            By("mean of inverse length powers"),
            By("samples", "micro-batch"),
            By("padded width"),
        ),
        micro_batches="mean",
        ranks="mean",
        put_together_is="assumed",
        layouts="equal micro-batches",
        alpha=0.75,
        divisor_is="the padded response width",
        context_parallel="unverified",
        mode="constant",
        traps=("the padded width is in the scale",),
        unverified="how micro-batches are put together; a mean here",
    ),
    Rule(
        "balanced",
        "(paper) Balanced Aggregation",
        "2605.04077",
        "second-hand",
        "1/P sum_p [ k/G mean of tokens with A > 0 + (G-k)/G mean of the others ]",
        (
            By("prompts"),
            By("prompt's samples per sample of the sign"),
            By("tokens of the prompt and sign"),
        ),
        mode="prompt_mean",
        traps=("samples of zero advantage count with the negative ones",),
        unverified="from the abstract and a summary: the scale over prompts and the place of zero advantages are assumptions",
    ),
)

OTHERS = (*_ROLL, *_OAT, *_OPEN_INSTRUCT, *_TORCHFORGE, *_SINGLE, *_PAPERS)
"""Rules of ROLL, oat, open-instruct, torchforge, AReaL, prime-rl, Tinker, and the papers' variants."""
