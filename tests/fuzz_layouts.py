"""Random batches under random layouts: every number of every mode against plain arithmetic, and no false alarm.

As a program it runs as many batch-layout pairs as asked for: `python -m tests.fuzz_layouts --pairs 20000 [--seed 0]`. It ends
with exit code 1 where a deviation exceeds 1e-12 of the sum of the absolute terms, where the product sees a difference beyond
rounding, or where a layout made wrong on purpose is not found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from aggcli.layout.schedule import Schedule, parse_layout, schedule_step
from aggcli.layout.views import LocalView, WholeStep, cut_in_pieces
from aggcli.measurement.comparison import beyond_rounding
from aggcli.measurement.report import StepReport
from tests import closed_form
from tests.fixtures import MODES, Sample, batch_of, replayed

LIMIT = 1e-12
"""Of the sum of the absolute terms."""
TOLERATED = 1e-9
"""What the product takes for rounding in float64."""
CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.3}
DIVISOR, KL, ENTROPY = 10.0, 0.3, 0.01
METRICS = ("pg_clipfrac", "ppo_kl", "kl_loss", "ratio_deviation", "entropy_loss", "sampler_mismatch")
FAULTS = ("twice", "lost", "elsewhere")

Rewards = Callable[[random.Random, int], float]
REWARDS: dict[str, Rewards] = {
    "0 or 1": lambda draw, at: float(draw.random() < 0.5),
    "+1 and -1 in turn": lambda draw, at: 1.0 if at % 2 else -1.0,
    "around 0": lambda draw, at: draw.gauss(0, 1),
    "large": lambda draw, at: draw.gauss(0, 1e6),
    "tiny": lambda draw, at: draw.gauss(0, 1e-6),
}


def random_samples(draw: random.Random) -> list[Sample]:
    """Uneven groups, fan-out, masks up to whole rollouts, rewards that often cancel, ratios from exactly 1 to far off."""
    kind, gap, hidden = draw.choice(list(REWARDS)), draw.choice((0.0, 1e-9, 0.3)), draw.choice((0.0, 0.2, 0.9))
    rollouts = [(group, REWARDS[kind](draw, at)) for group in range(draw.randint(1, 4)) for at in range(draw.randint(1, 4))]
    if draw.random() < 0.5:  # centred beforehand, as some trainers write them
        mean = math.fsum(reward for _, reward in rollouts) / len(rollouts)
        rollouts = [(group, reward - mean) for group, reward in rollouts]
    made = []
    for rollout, (group, reward) in enumerate(rollouts):
        masked = draw.random() < 0.15
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            length = draw.randint(1, 12)
            old = [-3 * draw.random() for _ in range(length)]
            made.append(
                {
                    "response_length": length,
                    "total_length": length + draw.randint(0, 9),
                    "group_index": group,
                    "rollout_id": rollout,
                    "reward": reward,
                    "advantage": reward if draw.random() < 0.5 else draw.gauss(0, 1),
                    "loss_mask": [int(not masked and draw.random() >= hidden) for _ in range(length)],
                    "old_log_probs": old,
                    "log_probs": [value + draw.gauss(0, gap) for value in old],
                    "ref_log_probs": [value + draw.gauss(0, 0.3) for value in old],
                    "rollout_log_probs": [value + draw.gauss(0, 0.01) for value in old],
                    "entropy": [2 * draw.random() for _ in range(length)],
                }
            )
    draw.shuffle(made)
    return made


def random_layouts(draw: random.Random, count: int) -> list[str]:
    """Different layouts of up to 8 x 4 ranks, by every rule, with and without a budget."""
    found: dict[str, None] = {}
    while len(found) < count:
        cp, budget = draw.choice(("", "cp1", "cp2", "cp3", "cp4")), draw.choice(("", f"@{draw.randint(1, 40)}"))
        rule = draw.choice(("", ":first-fit", ":interleaved", ":contiguous", ":balanced"))
        found[f"dp{draw.randint(1, 8)}{cp}{rule}{budget}"] = None
    return list(found)


def report_of(samples: Sequence[Sample], layouts: Sequence[str], **settings: Any) -> StepReport:
    """The step as the product replays it."""
    given = {"layouts": tuple(layouts), "loss_aggregation_divisor": DIVISOR, "kl_coef": KL, "entropy_coef": ENTROPY, **CLIP}
    (report,) = replayed(batch_of(samples), kl_estimator="k3", **given, **settings)
    return report


# -- the second route -----------------------------------------------------------------------------------------------

Expected = dict[str, tuple[float | None, float]]
"""Metric -> its value, and the sum of its absolute terms."""


def expected(samples: Sequence[Sample]) -> dict[str, Expected]:
    """Every number of every mode, by plain arithmetic."""
    tokens = closed_form.token_numbers(samples, [s["advantage"] for s in samples], CLIP["eps_clip"], CLIP["eps_clip_high"])
    trained = any(map(any, closed_form.masks(samples)))
    return {mode: _of_mode(samples, mode, tokens, trained) | _of_samples(samples) for mode in MODES}


def _of_mode(samples: Sequence[Sample], mode: str, tokens: dict[str, list[list[float]]], trained: bool) -> Expected:
    weight = closed_form.weights(samples, mode, DIVISOR)
    metric_weight = closed_form.weights(samples, "token_mean" if mode == "token_mean" else "sample_mean")

    def both(rows: Sequence[Sequence[float]], name: str) -> tuple[float, float]:
        size = [[abs(value) for value in row] for row in tokens[name]]
        return closed_form.weighted(rows, tokens[name]), closed_form.weighted(rows, size)

    found: dict[str, Any] = {"pg_loss": both(weight, "pg_loss")} | {name: both(metric_weight, name) for name in METRICS}
    loss, kl, entropy = (found[name] for name in ("pg_loss", "kl_loss", "entropy_loss"))
    found["loss"] = tuple(loss[at] + KL * kl[at] + sign * ENTROPY * entropy[at] for at, sign in ((0, -1), (1, 1)))
    total = math.fsum(w for row in weight for w in row)
    found["total_weight"] = (total, total)
    return found if trained else dict.fromkeys(found, (None, 0.0))


def _of_samples(samples: Sequence[Sample]) -> Expected:
    rewards = {sample["rollout_id"]: sample["reward"] for sample in samples}
    right = [sample for sample in samples if sample["reward"] >= 1 - 1e-6]
    tokens = sum(map(sum, closed_form.masks(samples)))
    lengths = [sample["response_length"] for sample in samples]
    entropies = [
        math.fsum(e for e, m in zip(sample["entropy"], sample["loss_mask"], strict=True) if m) / sum(sample["loss_mask"])
        for sample in right
        if any(sample["loss_mask"])
    ]
    plain = {
        "samples": len(samples),
        "tokens": tokens,
        "response_tokens": sum(lengths),
        "response_length": sum(lengths) / len(lengths),
        "fully_masked_samples": sum(not any(sample["loss_mask"]) for sample in samples),
        "correct/count": len(right),
        "incorrect/count": len(samples) - len(right),
        "correct/response_length": sum(s["response_length"] for s in right) / len(right) if right else None,
        "correct/entropy": math.fsum(entropies) / len(entropies) if entropies else None,
    }
    mean = math.fsum(rewards.values()) / len(rewards)
    size = math.fsum(map(abs, rewards.values())) / len(rewards)
    found: Expected = {name: (value, abs(value or 0.0)) for name, value in plain.items()}
    return found | {"raw_reward": (mean, size)}


def deviation(report: StepReport, samples: Sequence[Sample]) -> tuple[float, str]:
    """The largest deviation of any number under any layout from plain arithmetic, as a share of the sum of its absolute terms,
    and where it is. Infinite where only one of the two has the number."""
    worst, where = 0.0, ""
    for mode, numbers in expected(samples).items():
        for layout in report.layouts:
            for name, (value, size) in numbers.items():
                found = layout.values[mode][name]
                if found is None or value is None:
                    share = 0.0 if found is value else math.inf
                else:
                    share = abs(found - value) / size if size else abs(found)
                if share > worst:
                    worst, where = share, f"{name} of {mode} under {layout.layout}: {found}, expected {value}"
    return worst, where


# -- wrong on purpose -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def wrong(fault: str, layout: str, draw: random.Random) -> Iterator[None]:
    """The layout of this text hands out its samples wrongly: one `twice`, one `lost`, or one `elsewhere` (on another rank than
    the layout says); every other layout stays right."""

    def scheduled(given: Any, lengths: Sequence[int]) -> Schedule:
        schedule = schedule_step(given, lengths)
        if given.text != layout or fault == "elsewhere":
            return schedule
        rank = draw.choice([at for at, held in enumerate(schedule.partitions) if held])
        partition = list(schedule.partitions[rank])
        at = draw.randrange(len(partition))
        partition = [*partition, partition[at]] if fault == "twice" else partition[:at] + partition[at + 1 :]
        return _replaced(schedule, {rank: partition})

    def cut_up(whole: WholeStep, schedules: Sequence[Schedule], cp: int) -> Iterator[Iterator[LocalView]]:
        (schedule,) = schedules
        if fault == "elsewhere" and len(schedule.partitions) == layout_ranks:
            holders = [at for at, held in enumerate(schedule.partitions) if held]
            source = draw.choice(holders)
            target = draw.choice([at for at in range(len(schedule.partitions)) if at != source])
            moved = draw.choice(schedule.partitions[source])
            schedule = _replaced(
                schedule,
                {
                    source: [sample for sample in schedule.partitions[source] if sample != moved],
                    target: [*schedule.partitions[target], moved],
                },
            )
        return cut_in_pieces(whole, [schedule], cp)

    layout_ranks = parse_layout(layout).dp
    with mock.patch("aggcli.jobs.steps.schedule_step", scheduled), mock.patch("aggcli.measurement.step.cut_in_pieces", cut_up):
        yield


def _replaced(schedule: Schedule, ranks: dict[int, list[int]]) -> Schedule:
    """The schedule with other samples on these ranks, one micro-batch each."""
    partitions, micro_batches = list(schedule.partitions), list(schedule.micro_batches)
    for rank, samples in ranks.items():
        partitions[rank] = tuple(samples)
        micro_batches[rank] = (tuple(range(len(samples))),) if samples else ()
    return dataclasses.replace(schedule, partitions=tuple(partitions), micro_batches=tuple(micro_batches))


def is_found(samples: Sequence[Sample], fault: str, draw: random.Random) -> bool:
    """Whether a layout that is wrong in this way is found, beside a right one."""
    layout = f"dp{draw.randint(2, 6)}{draw.choice(('', 'cp2'))}:{draw.choice(('interleaved', 'contiguous', 'balanced'))}"
    with wrong(fault, layout, draw):
        report = report_of(samples, ("dp1", layout))
    return beyond_rounding([(0, report.comparison)], TOLERATED) is not None


# -- the long run ---------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--layouts", type=int, default=20, help="layouts of a batch")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    batches = -(-given.pairs // given.layouts)
    worst, where, apart, alarms, planted, missed = 0.0, "", 0.0, [], 0, []
    for at in range(batches):
        draw = random.Random(f"{given.seed}/{at}")
        samples = random_samples(draw)
        report = report_of(samples, random_layouts(draw, given.layouts))
        found, place = deviation(report, samples)
        if found > worst:
            worst, where = found, f"batch {at}: {place}"
        apart = max(apart, report.comparison.deviation or 0.0)
        if alarm := beyond_rounding([(at, report.comparison)], TOLERATED):
            alarms.append(alarm)
        for fault in FAULTS:
            planted += 1
            if not is_found(samples, fault, draw):
                missed.append(f"batch {at}: {fault}")
    print(
        f"{batches} batches x {given.layouts} layouts = {batches * given.layouts} pairs, seed {given.seed}, {len(MODES)} modes"
    )
    print(f"largest deviation from plain arithmetic: {worst:.3g} of the sum of the absolute terms ({where}); limit {LIMIT:g}")
    print(f"largest difference between layouts: {apart:.3g} of the sum of the absolute terms; {len(alarms)} false alarms")
    print(f"wrong on purpose: {planted} layouts, {len(missed)} not found")
    for text in [*alarms[:5], *missed[:5]]:
        print(text)
    return int(worst > LIMIT or bool(alarms) or bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
