"""Question: what does it cost to write an aggregation as a weight per token, and does the cost grow with the tokens only?

Three contestants on one batch of 4096 samples of 16 to 1024 response tokens (a tenth masked out), forward and backward to the
per-token loss, under all four modes and in float32 and float64:

    ours   count the denominators, spread them into weights, `aggregate`, backward: everything, once per optimizer step
    loop   what a list-based reducer runs: split the flat loss by response length, one masked sum and one division a sample
    dot    a bare `torch.dot` of the same length with its backward: the least that a weighted sum can cost

`reduce` is ours with the weights given. Ours should be at least 10 times faster than the loop, and `reduce` at most 1.3 times
the dot. The second table holds about 10^5, 10^6 and 10^7 tokens: time per token should not grow. Contestants take turns
(A B C D D C B A), so that a machine that slows down slows all of them; medians are shown. One torch thread unless told
otherwise: the loop's operations are too small to share, and on shared cores more threads measure the neighbours.

glibc hands blocks above 32 MiB back to the system at once, so each use pays for fresh pages: a bare dot of 10^7 tokens then
costs 3 to 4 times as much a token as one of 10^6. Here freed memory is kept, as a training process's allocator does
(--plain-malloc: it is not), and the growth of the dot stands beside ours.

    python experiments/benchmarks/aggregation.py
    python experiments/benchmarks/aggregation.py --json --repeats 15
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.objective.weights import aggregate, rule_weights
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rules import MODES, find_rule, names_of

SAMPLES = 4096
SHORTEST, LONGEST = 16, 1024
"""Response tokens of a sample, drawn evenly."""
GROUP = 8
"""Rollouts of a prompt."""
MASKED_SHARE = 0.1
SIZES = (10**5, 10**6, 10**7)
"""Response tokens of the batches that show the growth."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TARGET_LOOP, TARGET_DOT = 10.0, 1.3
OBJECTIVE = ObjectiveConfig(loss_aggregation_divisor=float(LONGEST))

Contestant = Callable[[], Tensor]


# -- contestants ----------------------------------------------------------------------------------------------------


def ours(batch: RolloutBatch, loss_T: Tensor, mode: str) -> Tensor:
    """The weights of the step, the weighted sum and its gradient."""
    return reduce_only(loss_T, weights_of(batch, mode, loss_T.dtype))


def weights_of(batch: RolloutBatch, mode: str, dtype: torch.dtype) -> Tensor:
    return rule_weights(OBJECTIVE.in_force(find_rule(mode)), batch).to(dtype)


def reduce_only(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """`aggregate` with given weights, and its gradient."""
    (gradient_T,) = torch.autograd.grad(aggregate(loss_T, weights_T), loss_T)
    return gradient_T


def dot_only(loss_T: Tensor, other_T: Tensor) -> Tensor:
    """The floor: one dot product and its gradient."""
    (gradient_T,) = torch.autograd.grad(torch.dot(loss_T, other_T), loss_T)
    return gradient_T


def loop(lists: Lists, loss_T: Tensor, mode: str) -> Tensor:
    """One Python iteration a sample, over per-sample masks, and the gradient through all of them."""
    parts = zip(loss_T.split(lists.lengths), lists.masks, lists.groups, strict=True)
    samples = len(lists.masks)
    if mode == "sample_mean":
        value = sum((x * m).sum() / m.sum().clamp_min(1) for x, m, _ in parts) / samples
    elif mode == "prompt_mean":
        totals: dict[int, Tensor] = {}
        for mask, group in zip(lists.masks, lists.groups, strict=True):
            totals[group] = totals.get(group, 0) + mask.sum()  # pyright: ignore[reportArgumentType]
        value = sum((x * m).sum() / totals[group].clamp_min(1) for x, m, group in parts) / samples
    elif mode == "token_mean":
        value = sum((x * m).sum() for x, m, _ in parts) / sum(m.sum() for m in lists.masks)
    else:
        value = sum((x * m).sum() / LONGEST for x, m, _ in parts) / samples
    assert isinstance(value, Tensor)
    (gradient_T,) = torch.autograd.grad(value, loss_T)
    return gradient_T


# -- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lists:
    """A batch as a list-based reducer holds it: per-sample lengths, masks and groups."""

    lengths: list[int]
    masks: list[Tensor]
    groups: list[int]


def make_batch(samples: int, seed: int = 0) -> RolloutBatch:
    """Samples of SHORTEST to LONGEST tokens, in groups of GROUP, each its own rollout."""
    draw = torch.Generator().manual_seed(seed)
    length_S = torch.randint(SHORTEST, LONGEST + 1, (samples,), generator=draw)
    at_S = torch.arange(samples)
    return RolloutBatch(
        response_length_S=length_S,
        total_length_S=length_S,
        loss_mask_T=torch.rand(int(length_S.sum()), generator=draw) >= MASKED_SHARE,
        rollout_S=at_S,
        group_S=at_S // GROUP,
        run_S=torch.zeros_like(at_S),
        position_S=at_S,
    )


def make_loss(batch: RolloutBatch, dtype: torch.dtype, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch.loss_mask_T.numel(), generator=draw, dtype=dtype).requires_grad_()


def as_lists(batch: RolloutBatch, dtype: torch.dtype) -> Lists:
    lengths = batch.response_length_S.tolist()
    return Lists(lengths, list(batch.loss_mask_T.to(dtype).split(lengths)), batch.group_S.tolist())


# -- timing ---------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of any size; False where the C library has no such switch."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))


def medians(contestants: dict[str, Contestant], repeats: int, inner: dict[str, int]) -> dict[str, float]:
    """Median seconds of each contestant; they take turns, every other round in reverse; the first is dropped.

    `inner`: calls a measurement is the mean of (default 1), for those too short to time alone.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, call in list(contestants.items())[:: 1 if turn % 2 else -1]:
            calls = inner.get(name, 1)
            call()  # untimed: the caches hold what the contestant before left there
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def race(mode: str, dtype_name: str, repeats: int) -> dict[str, object]:
    """All contestants on the batch of SAMPLES, after checking that ours and the loop have the same gradient."""
    dtype = DTYPES[dtype_name]
    batch = make_batch(SAMPLES)
    loss_T, lists, weights_T = make_loss(batch, dtype), as_lists(batch, dtype), weights_of(batch, mode, dtype)
    torch.testing.assert_close(ours(batch, loss_T, mode), loop(lists, loss_T, mode), rtol=1e-5, atol=0.0)
    contestants: dict[str, Contestant] = {
        "ours": lambda: ours(batch, loss_T, mode),
        "loop": lambda: loop(lists, loss_T, mode),
        "reduce": lambda: reduce_only(loss_T, weights_T),
        "dot": lambda: dot_only(loss_T, weights_T),
    }
    found = medians(contestants, repeats, {"reduce": 20, "dot": 20, "ours": 2})
    return {
        "mode": mode,
        "dtype": dtype_name,
        "tokens": loss_T.numel(),
        **{f"{name}_s": seconds for name, seconds in found.items()},
        "loop_over_ours": found["loop"] / found["ours"],
        "reduce_over_dot": found["reduce"] / found["dot"],
    }


def growth(mode: str, dtype_name: str, repeats: int) -> list[dict[str, object]]:
    """Ours and the dot on batches of about SIZES tokens, nanoseconds a token; the sizes take turns too."""
    dtype = DTYPES[dtype_name]
    batches = [make_batch(round(size / ((SHORTEST + LONGEST) / 2))) for size in SIZES]
    contestants: dict[str, Contestant] = {}
    inner: dict[str, int] = {}
    for at, batch in enumerate(batches):
        loss_T, weights_T = make_loss(batch, dtype), weights_of(batch, mode, dtype)
        contestants[f"ours {at}"] = lambda batch=batch, loss_T=loss_T: ours(batch, loss_T, mode)
        contestants[f"dot {at}"] = lambda loss_T=loss_T, weights_T=weights_T: dot_only(loss_T, weights_T)
        inner |= {f"ours {at}": max(1, SIZES[-1] // SIZES[at] // 4), f"dot {at}": max(1, SIZES[-1] // SIZES[at] // 2)}
    found = medians(contestants, repeats, inner)
    tokens = [batch.loss_mask_T.numel() for batch in batches]
    ours_ns, dot_ns = ([found[f"{who} {at}"] / n * 1e9 for at, n in enumerate(tokens)] for who in ("ours", "dot"))
    return [
        {
            "mode": mode,
            "dtype": dtype_name,
            "samples": batch.num_samples,
            "tokens": tokens[at],
            "ours_s": found[f"ours {at}"],
            "ours_ns_per_token": ours_ns[at],
            "over_1e5": ours_ns[at] / ours_ns[0],
            "dot_ns_per_token": dot_ns[at],
            "dot_over_1e5": dot_ns[at] / dot_ns[0],
        }
        for at, batch in enumerate(batches)
    ]


# -- report ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows of one shape as aligned text."""
    cells = [list(rows[0]), *([_cell(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value * 1e3:.3f} ms" if name.endswith("_s") else f"{value:.2f}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds, after one that warms up (default: 9)")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads, for all alike; 0: torch's own choice (default: 1)"
    )
    parser.add_argument("--modes", default=",".join(names_of(MODES)), help="modes, with commas (default: all four)")
    parser.add_argument("--plain-malloc", action="store_true", help="let the C library hand freed memory back")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    kept = not asked.plain_malloc and keep_freed_memory()
    modes = asked.modes.split(",")
    races = [race(mode, dtype, asked.repeats) for dtype in DTYPES for mode in modes]
    grown = [row for dtype in DTYPES for row in growth(modes[0], dtype, asked.repeats)]
    facts = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "samples": SAMPLES,
        "repeats": asked.repeats,
        "freed_memory_kept": kept,
    }
    held = {
        f"ours at least {TARGET_LOOP:g} times faster than the loop": all(_at_least(r, "loop_over_ours") for r in races),
        f"reduction at most {TARGET_DOT:g} times the dot": all(_at_most(r, "reduce_over_dot") for r in races),
    }
    if asked.json:
        print(json.dumps({**facts, "races": races, "growth": grown, "targets": held}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()), table(races), table(grown), sep="\n\n")
    print("\n" + "\n".join(f"{'holds' if holds else 'MISSED'}: {target}" for target, holds in held.items()))


def _at_least(row: dict[str, object], name: str) -> bool:
    value = row[name]
    return isinstance(value, float) and value >= TARGET_LOOP


def _at_most(row: dict[str, object], name: str) -> bool:
    value = row[name]
    return isinstance(value, float) and value <= TARGET_DOT


if __name__ == "__main__":
    main()
