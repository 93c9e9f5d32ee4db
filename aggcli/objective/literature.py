"""The aggregation modes in words: formula, weight, where they come from and what others call them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeReference:
    """`formula` and `weight` in the notation of NOTATION; `papers`; `elsewhere`: framework option -> what it is called."""

    formula: str
    weight: str
    meaning: str
    papers: str
    elsewhere: tuple[str, ...]
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
        "GRPO (DeepSeekMath, 2402.03300); 'sample average' in ScaleRL (2510.13786)",
        (
            "slime (default)",
            "verl seq-mean-token-mean",
            "TRL loss_type=grpo",
            "SkyRL sequence_mean",
            "OpenRLHF without token_level_loss",
        ),
    ),
    "prompt_mean": ModeReference(
        "1/N sum_p [ 1/T_p sum_(t in p) l_t ]; with --prompt-mean-scale prompts 1/P instead of 1/N",
        "1/(N*T_p), or 1/(P*T_p)",
        "every prompt group weighs the same, and every token within it",
        "DAPO as printed (2503.14476, eq. 8); 'prompt average', recommended by ScaleRL (2510.13786)",
        ("SkyRL prompt_mean (scale prompts)",),
        "a group_index for every sample, and whole groups in an optimizer step",
    ),
    "token_mean": ModeReference(
        "1/T sum_t l_t",
        "1/T",
        "every token of the step weighs the same, so a long response weighs more",
        "'token average' in ScaleRL; what most code calls DAPO",
        (
            "slime --calculate-per-token-loss",
            "verl token-mean (default)",
            "TRL loss_type=dapo (default)",
            "prime-rl",
            "NeMo-RL (default)",
            "OpenRLHF (default)",
        ),
    ),
    "constant": ModeReference(
        "1/N sum_r [ 1/L sum_(t in r) l_t ]",
        "1/(N*L)",
        "every token weighs the same in every step, however long the responses are",
        "Dr.GRPO (2503.20783)",
        (
            "oat critic_type=drgrpo",
            "TRL loss_type=dr_grpo",
            "SkyRL seq_mean_token_sum_norm",
            "verl seq-mean-token-sum-norm with loss_scale_factor",
        ),
        "--loss-aggregation-divisor L, in tokens",
    ),
}
