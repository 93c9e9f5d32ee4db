"""Runs on four real ranks: measures layouts on them, and the same layouts in-process at the root; writes both as JSON.

Started once, for the whole grid, by tests/test_ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.layout.views import cut
from aggcli.measurement.local import MeasureConfig, measure
from aggcli.measurement.ranks import dismiss, measure_on_ranks, serve
from aggcli.measurement.reduce import combine
from aggcli.objective.step import step_inputs
from aggcli.world import World, join, leave
from tests.fixtures import MODES, batch_of, fx_b, random_fanout, rules_named

LAYOUTS = ("dp2", "dp3", "dp4:balanced", "dp2cp2@40", "dp1cp4")
FIXTURES = {"FX-B": fx_b, "two samples": lambda: fx_b()[:2], "random fan-out": random_fanout}


def main(output: Path) -> None:
    world = join()
    found = []
    for layout in map(parse_layout, LAYOUTS):
        size = layout.dp * layout.cp
        group = dist.new_group(list(range(size)))
        if world.rank >= size:
            continue
        small = World(world.rank, size, group)
        if small.is_root:
            found += [_both(small, layout, name) for name in FIXTURES]
            dismiss(small)
        else:
            serve(small)
    if world.is_root:
        output.write_text(json.dumps(found))
    leave(world)


def _both(world: World, layout, name: str) -> dict:
    objective = settings_from({"loss_aggregation_divisor": 10.0, "kl_coef": 0.25}).objective
    inputs = step_inputs(batch_of(FIXTURES[name]()), objective, rules_named(MODES, objective), torch.float64)
    measuring = MeasureConfig(inputs.names, inputs.weight_names, objective, True, 1.0, 24, log_correct_samples=True)
    schedule = schedule_step(layout, inputs.step.total_length_S.tolist())
    views = cut(inputs.whole, [schedule], layout.cp)
    parts, total = measure_on_ranks(world, views, measuring)
    twins = [part for view in views for part in measure([view], measuring).values()]
    return {
        "layout": layout.text,
        "fixture": name,
        "idle": len(schedule.idle_ranks),
        "ranks": [list(part.sums.values()) for part in parts],
        "twins": [list(part.sums.values()) for part in twins],
        "total": list(total.sums.values()),
        "twin_total": list(combine(twins).sums.values()),
        "maxima": list(total.maxima.values()),
        "twin_maxima": list(combine(twins).maxima.values()),
        "lengths": total.correct_lengths,
        "twin_lengths": combine(twins).correct_lengths,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
