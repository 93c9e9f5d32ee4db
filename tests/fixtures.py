"""The shared fixtures FX-A to FX-F, as plain samples, and batches made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from aggcli.config import ObjectiveConfig, settings_from
from aggcli.jobs.steps import Replay
from aggcli.layout.views import WholeStep
from aggcli.measurement.report import StepReport
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rules import Rule, find_rule

Sample = dict[str, Any]
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
PROMPT = 3
"""Prompt tokens of a fixture's samples, where nothing else is said."""
FX_B = {"sample_mean": -0.025, "prompt_mean": 0.19375, "token_mean": 0.171875, "constant": 0.06875}
"""pg_loss of FX-B by hand; prompt_mean is the strict mean over prompts, and constant divides by 10."""
LAYOUTS = "dp1,dp2:interleaved,dp2:contiguous,dp2:balanced,dp3,dp4:balanced,dp8,dp1cp2,dp2cp2:interleaved,dp1cp4"
"""Ten layouts that differ in ranks, partition rule and context parallelism."""


def rules_named(names: Iterable[str], objective: ObjectiveConfig) -> tuple[Rule, ...]:
    """The rules of these names, as the settings have them."""
    return tuple(objective.in_force(find_rule(name)) for name in names)


def batch_of(samples: Iterable[Mapping[str, Any]], name: str = "step 0 (test)", **options: Any) -> RolloutBatch:
    builder = BatchBuilder(name, **options)
    for sample in samples:
        builder.add(sample)
    return builder.build()


def sample(length: int, **fields: Any) -> Sample:
    return {"response_length": length, "total_length": length + PROMPT, **fields}


def fx_a(log_ratio: float = 0.0) -> list[Sample]:
    """Groups a,a,b,b; 1,3,4,8 tokens; advantages +.5,-.5,+.5,-.5; every ratio exp(log_ratio) on samples 0 and 2."""
    made = []
    for group, length, reward, shifted in ((0, 1, 1, True), (0, 3, 0, False), (1, 4, 1, True), (1, 8, 0, False)):
        old = [-1.0 - 0.125 * t for t in range(length)]
        new = [value + (log_ratio if shifted else 0.0) for value in old]
        made.append(
            sample(
                length,
                group_index=group,
                reward=reward,
                advantage=reward - 0.5,
                old_log_probs=old,
                log_probs=new,
                ref_log_probs=[value + 0.25 for value in old],
            )
        )
    return made


def fx_b() -> list[Sample]:
    """FX-A with log-ratio ln 1.1 on every token of samples 0 and 2."""
    return fx_a(math.log(1.1))


def fx_c() -> list[Sample]:
    """Groups a,a,b,b; valid tokens 2,5,6,0: the last sample has 5 tokens, all masked; on-policy."""
    made = []
    for group, length, advantage in ((0, 2, 0.5), (0, 5, -0.5), (1, 6, 0.5), (1, 5, -0.5)):
        log_probs = [-0.5 - 0.25 * t for t in range(length)]
        made.append(
            sample(
                length,
                group_index=group,
                reward=advantage + 0.5,
                advantage=advantage,
                old_log_probs=log_probs,
                log_probs=log_probs,
                ref_log_probs=log_probs,
            )
        )
    made[3]["loss_mask"] = [0] * 5
    return made


def fx_d() -> list[Sample]:
    """Group sizes 4,2,3; rewards 1,0,1,0 / 1,1 / 0,0,1; lengths 2 to 10; a log-ratio of 0.05 per position on odd samples."""
    made = []
    groups = [0] * 4 + [1] * 2 + [2] * 3
    for at, (group, reward) in enumerate(zip(groups, [1, 0, 1, 0, 1, 1, 0, 0, 1], strict=True)):
        old = [-0.75 - 0.0625 * t for t in range(at + 2)]
        new = [value + 0.05 * t * (at % 2) for t, value in enumerate(old)]
        made.append(
            sample(
                at + 2, group_index=group, reward=reward, old_log_probs=old, log_probs=new, ref_log_probs=[v - 0.1 for v in new]
            )
        )
    return made


def fx_e() -> list[Sample]:
    """8 samples, response lengths 11..18, total lengths +20, raw rewards 1,0,0,1,1,0,1,0."""
    rewards = [1, 0, 0, 1, 1, 0, 1, 0]
    return [
        {"response_length": length, "total_length": length + 20, "reward": reward, "group_index": at // 4}
        for at, (length, reward) in enumerate(zip(range(11, 19), rewards, strict=True))
    ]


def fx_f() -> list[Sample]:
    """Context-parallel corners: 256 tokens with a response of 16, and 16 tokens with a response of 12."""
    made = []
    for total, length, advantage in ((256, 16, 0.5), (16, 12, -0.25)):
        old = [-1.0 - 0.03125 * t for t in range(length)]
        made.append(
            {
                "response_length": length,
                "total_length": total,
                "group_index": 0,
                "reward": 1.0 if advantage > 0 else 0.0,
                "advantage": advantage,
                "old_log_probs": old,
                "log_probs": [value + 0.02 * t for t, value in enumerate(old)],
                "ref_log_probs": [value + 0.1 for value in old],
            }
        )
    return made


def random_fanout(seed: int = 7) -> list[Sample]:
    """A random batch with fan-out, uneven groups, masks, entropy and every log-probability stream."""
    draw = random.Random(seed)
    made, rollout = [], 0
    for group in range(5):
        for _ in range(draw.randint(1, 5)):
            reward = float(draw.random() < 0.5)
            for _ in range(draw.choice((1, 1, 2, 3))):
                length = draw.randint(1, 24)
                old = [-draw.random() * 3 for _ in range(length)]
                made.append(
                    {
                        "response_length": length,
                        "total_length": length + draw.randint(0, 12),
                        "group_index": group,
                        "rollout_id": rollout,
                        "reward": reward,
                        "advantage": draw.gauss(0, 1),
                        "loss_mask": [int(draw.random() < 0.8) for _ in range(length)],
                        "old_log_probs": old,
                        "log_probs": [value + draw.gauss(0, 0.2) for value in old],
                        "ref_log_probs": [value + draw.gauss(0, 0.3) for value in old],
                        "rollout_log_probs": [value + draw.gauss(0, 0.01) for value in old],
                        "entropy": [draw.random() * 2 for _ in range(length)],
                    }
                )
            rollout += 1
    return made


def with_places(whole: WholeStep) -> WholeStep:
    """The same step, whose views say where in its flat arrays their tokens are: `tokens["place"]`."""
    place_T = torch.arange(whole.step.loss_mask_T.numel())
    return WholeStep(whole.step, {**whole.tokens, "place": place_T}, whole.weights, whole.sequences)


def replayed(batch: RolloutBatch, modes: tuple[str, ...] = MODES, **settings: Any) -> list[StepReport]:
    """The batch through the whole replay; `constant` divides by 10 unless told otherwise."""
    given = {"loss_aggregation_divisor": 10.0, **settings}
    config = settings_from(given)
    rules = rules_named(modes, config.objective)
    longest = config.max_response_length or int(batch.response_length_S.max())
    return list(Replay(config, rules, False, max(longest, 1)).steps([batch]))
