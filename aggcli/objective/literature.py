"""The aggregation modes in words: formula, weight, where they come from, and the traps. Who has them is in the presets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeReference:
    """`formula` and `weight` in the notation of NOTATION; `papers`; `flags`: how to ask for it
    here; `traps`: what goes wrong."""

    formula: str
    weight: str
    meaning: str
    papers: str
    flags: str
    traps: tuple[str, ...]
    needs: str = ""


NOTATION = (
    "One optimizer step: N rollouts, P prompt groups, n_r masked-in tokens of rollout r (all its training samples"
    " together), T_p masked-in tokens of prompt group p, T all masked-in tokens, L the divisor, l_t the loss of token t."
)

REFERENCE = {
    "sample_mean": ModeReference(
        "1/N sum_r [ 1/n_r sum_(t in r) l_t ]",
        "1/(N*n_r)",
        "every rollout weighs the same, so a token of a long response weighs less",
        "GRPO (DeepSeekMath, 2402.03300); 'sample average' in ScaleRL (2510.13786); GSPO's 1/G (2507.18071)",
        "--loss-aggregation sample_mean (default)",
        (
            "short right answers are favoured and long wrong ones under-penalised (Dr.GRPO's response-level length bias)",
            "most frameworks count rows: a rollout split into k samples weighs k times",
            "with micro-batches of one row, every mean of micro-batch means becomes this mode",
        ),
    ),
    "prompt_mean": ModeReference(
        "1/N sum_p [ 1/T_p sum_(t in p) l_t ]; with --prompt-mean-scale prompts 1/P instead of 1/N",
        "1/(N*T_p), or 1/(P*T_p)",
        "every prompt group weighs the same, and every token within it",
        "DAPO as printed (2503.14476, eq. 8); MiniMax-M1's CISPO as printed (2506.13585); 'prompt average', recommended by"
        " ScaleRL (2510.13786); Agg_Tok of 2510.11701",
        "--loss-aggregation prompt_mean [--prompt-mean-scale prompts]",
        (
            "code that says DAPO or token-mean is nearly always token_mean",
            "a prompt whose rollouts straddle two optimizer steps has two denominators",
            "a mean of micro-batch means equals it only if each micro-batch is exactly one prompt group",
            "the pooled tokens of the group, not the mean of its samples' means",
        ),
        "a group_index for every sample, and whole groups in an optimizer step",
    ),
    "token_mean": ModeReference(
        "1/T sum_t l_t",
        "1/T",
        "every token of the step weighs the same, so a response weighs by its length",
        "'token average' in ScaleRL (2510.13786); what most code calls DAPO",
        "--loss-aggregation token_mean, or --calculate-per-token-loss",
        (
            "T must be counted over the optimizer step: counted per micro-batch or rank, the loss depends on the packing",
            "where wrong answers are longer, negative tokens dominate (2605.04077)",
            "a clamp on each sample's count adds a phantom token per fully masked sample",
            "context-parallel ranks that count whole masks inflate T",
        ),
    ),
    "constant": ModeReference(
        "1/N sum_r [ 1/L sum_(t in r) l_t ]",
        "1/(N*L)",
        "every token weighs the same in every step, however long the responses are",
        "Dr.GRPO (2503.20783)",
        "--loss-aggregation constant --loss-aggregation-divisor L",
        (
            "the padded width is no constant: it differs from step to step and between micro-batches",
            "some lack the mean over rollouts (ROLL, legacy verl), some divide once by a whole-step constant (open-instruct)",
            "the gradient norm follows the lengths, so clipping may go from never to always",
        ),
        "--loss-aggregation-divisor L, in tokens",
    ),
}
"""Sources: the papers named; rollout and framework facts from the frameworks' code (see the presets)."""
