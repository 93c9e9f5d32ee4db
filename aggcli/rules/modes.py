"""This project's own modes, the first lines of `aggcli modes`: adding one is one entry here.

Sources: the papers named; what frameworks do is in the frameworks' own rules.
"""

from __future__ import annotations

from aggcli.rules.rule import Denominator as By
from aggcli.rules.rule import Rule

NOTATION = (
    "One optimizer step: N rollouts, P prompt groups, n_r trained tokens (loss_mask 1) of rollout r (all its training"
    " samples together), T_p trained tokens of prompt group p, T all trained tokens, L the divisor, l_t the loss of token t."
)

SAMPLE_MEAN = Rule(
    name="sample_mean",
    option="--loss-aggregation sample_mean",
    version="this project",
    evidence="own",
    formula="1/N sum_r [ 1/n_r sum_(t in r) l_t ]",
    divides_by=(By("rollouts"), By("tokens of the rollout")),
    kl_term="the metrics' weights",
    entropy_term="the metrics' weights",
    terms_evidence="own",
    mode="sample_mean",
    weight="1/(N*n_r)",
    meaning="every rollout weighs the same, so a token of a long response weighs less",
    papers="GRPO (DeepSeekMath, 2402.03300); 'sample average' in ScaleRL (2510.13786); GSPO's 1/G (2507.18071)",
    flags="--loss-aggregation sample_mean (default)",
    traps=(
        "short right answers are favoured and long wrong ones under-penalised (Dr.GRPO's response-level length bias)",
        "most frameworks count rows: a rollout split into k samples weighs k times",
        "with micro-batches of one row, every mean of micro-batch means becomes this mode",
    ),
)
PROMPT_MEAN = Rule(
    name="prompt_mean",
    option="--loss-aggregation prompt_mean",
    version="this project",
    evidence="own",
    formula="1/N sum_p [ 1/T_p sum_(t in p) l_t ]; with --prompt-mean-scale prompts 1/P instead of 1/N",
    divides_by=(By("rollouts"), By("tokens of the prompt")),
    kl_term="the metrics' weights",
    entropy_term="the metrics' weights",
    terms_evidence="own",
    mode="prompt_mean",
    weight="1/(N*T_p), or 1/(P*T_p)",
    meaning="every prompt group weighs the same, and every token within it",
    papers="DAPO as printed (2503.14476, eq. 8); MiniMax-M1's CISPO as printed (2506.13585); 'prompt average', recommended by"
    " ScaleRL (2510.13786); Agg_Tok of 2510.11701",
    flags="--loss-aggregation prompt_mean [--prompt-mean-scale prompts]",
    traps=(
        "code that says DAPO or token-mean is nearly always token_mean",
        "a prompt whose rollouts straddle two optimizer steps has two denominators",
        "a mean of micro-batch means equals it only if each micro-batch is exactly one prompt group",
        "the pooled tokens of the group, not the mean of its samples' means",
    ),
    needs="a group_index for every sample, and whole groups in an optimizer step",
    settings=("prompt_mean_scale",),
)
TOKEN_MEAN = Rule(
    name="token_mean",
    option="--loss-aggregation token_mean",
    version="this project",
    evidence="own",
    formula="1/T sum_t l_t",
    divides_by=(By("tokens"),),
    metrics="its own weights",
    kl_term="the metrics' weights",
    entropy_term="the metrics' weights",
    terms_evidence="own",
    mode="token_mean",
    weight="1/T",
    meaning="every token of the step weighs the same, so a response weighs by its length",
    papers="'token average' in ScaleRL (2510.13786); what most code calls DAPO",
    flags="--loss-aggregation token_mean, or --calculate-per-token-loss",
    traps=(
        "T must be counted over the optimizer step: counted per micro-batch or rank, the loss depends on the packing",
        "where wrong answers are longer, negative tokens dominate (2605.04077)",
        "a clamp on each sample's count adds a phantom token per fully masked sample",
        "context-parallel ranks that count whole masks inflate T",
    ),
)
CONSTANT = Rule(
    name="constant",
    option="--loss-aggregation constant",
    version="this project",
    evidence="own",
    formula="1/N sum_r [ 1/L sum_(t in r) l_t ]",
    divides_by=(By("rollouts"), By("divisor")),
    divisor_is="--loss-aggregation-divisor L",
    kl_term="the metrics' weights",
    entropy_term="the metrics' weights",
    terms_evidence="own",
    mode="constant",
    weight="1/(N*L)",
    meaning="every token weighs the same in every step, however long the responses are",
    papers="Dr.GRPO (2503.20783)",
    flags="--loss-aggregation constant --loss-aggregation-divisor L",
    traps=(
        "the padded width is no constant: it differs from step to step and between micro-batches",
        "some lack the mean over rollouts (ROLL, legacy verl), some divide once by a whole-step constant (open-instruct)",
        "the gradient norm follows the lengths, so clipping may go from never to always",
    ),
    needs="--loss-aggregation-divisor L, in tokens",
)

MODES: tuple[Rule, ...] = (SAMPLE_MEAN, PROMPT_MEAN, TOKEN_MEAN, CONSTANT)
DEFAULT = SAMPLE_MEAN
CUSTOM = Rule(
    name="custom",
    option="--custom-pg-loss-reducer-function-path pkg.mod:fn",
    version="the user's",
    evidence="own",
    formula="whatever the function returns",
    divides_by=(),
    kl_term="the metrics' weights",
    entropy_term="the metrics' weights",
    terms_evidence="own",
    meaning="the gradient of its output by the per-token losses, called once on the whole step",
)
"""What stands for a user's own reducer, whose weights no formula gives."""
