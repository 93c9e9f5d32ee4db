"""Each framework's reduction as its own loop would run it: per rank, per micro-batch, plain Python, no weights.

The second route that presets are checked against. A row is one sample of the padded matrix: its masked loss sum `s`, its
trained tokens `n`, its width `w` (response tokens), `group`, `rollout` and `advantage`. `g` holds what a framework gathers over
the whole optimizer step. Each function returns what the framework hands to `backward` for one micro-batch of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    s: float
    n: int
    w: int
    group: Any
    rollout: Any
    advantage: float


@dataclass(frozen=True)
class Global:
    rows: list[Row]
    dp: int
    length: float
    """The constant, which is given as the padded width too."""

    @property
    def tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def width(self) -> float:
        return self.length


@dataclass(frozen=True)
class Rank:
    micro_batches: int
    rows: int


Local = Callable[[list[Row], Global, Rank], float]


def rows_of(samples: Sequence[dict], losses: Sequence[Sequence[float]]) -> list[Row]:
    made = []
    for at, (sample, values) in enumerate(zip(samples, losses, strict=True)):
        mask = sample.get("loss_mask") or [1] * sample["response_length"]
        s = math.fsum(x for x, m in zip(values, mask, strict=True) if m)
        made.append(Row(s, sum(mask), len(mask), sample.get("group_index"), sample.get("rollout_id", at), sample["advantage"]))
    return made


def step_loss(name: str, rows: list[Row], split: Sequence[Sequence[Sequence[int]]], length: float) -> float:
    """Backward calls added up over micro-batches, then averaged over ranks by data parallelism."""
    g = Global(rows, len(split), length)
    total = 0.0
    for micro_batches in split:
        rank = Rank(len(micro_batches), sum(map(len, micro_batches)))
        for held in micro_batches:
            total += LOOPS[name]([rows[at] for at in held], g, rank)
    return total / len(split)


def _sum(rows: list[Row]) -> float:
    return math.fsum(row.s for row in rows)


def _tokens(rows: list[Row]) -> int:
    return sum(row.n for row in rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -- slime, miles: Megatron averages, slime multiplies by dp ---------------------------------------------------------


def _slime(rows: list[Row], g: Global, rank: Rank) -> float:
    of_rollout: dict[Any, int] = {}
    for row in g.rows:
        of_rollout[row.rollout] = of_rollout.get(row.rollout, 0) + row.n
    return sum(row.s / max(of_rollout[row.rollout], 1) for row in rows) / len(of_rollout) * g.dp


def _slime_per_token(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / sum(max(row.n, 1) for row in g.rows) * g.dp


# -- verl ------------------------------------------------------------------------------------------------------------


def _verl_token_mean(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / g.tokens * g.dp


def _verl_sequences(rows: list[Row], g: Global, rank: Rank) -> float:
    kept = [row for row in rows if row.n > 0]
    return sum(row.s / (row.n + 1e-8) for row in kept) / len(g.rows) * g.dp


def _legacy(inner: Callable[[list[Row], Global], float]) -> Local:
    """dp_actor: the micro-batch's loss, scaled by its share of the rank's rows; FSDP averages ranks."""
    return lambda rows, g, rank: inner(rows, g) * len(rows) / rank.rows


def _kept(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.n > 0]


# -- TRL, ms-swift ---------------------------------------------------------------------------------------------------


def _trl_grpo(rows: list[Row], g: Global, rank: Rank) -> float:
    return _mean([row.s / max(row.n, 1) for row in rows]) / rank.micro_batches


def _trl_bnpo(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / max(_tokens(rows), 1) / rank.micro_batches


def _trl_dr_grpo(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / (len(rows) * g.length) / rank.micro_batches


def _trl_dapo(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / (g.tokens / g.dp)


def _swift_dapo(rows: list[Row], g: Global, rank: Rank) -> float:
    return _trl_dapo(rows, g, rank) / rank.micro_batches


# -- the rest --------------------------------------------------------------------------------------------------------


def _sequences_over_valid(rows: list[Row], g: Global, rank: Rank) -> float:
    return sum(row.s / (row.n + 1e-8) for row in _kept(rows)) / len(_kept(g.rows)) * g.dp


def _nemo_token(rows: list[Row], g: Global, rank: Rank) -> float:
    return _sum(rows) / (g.tokens + 1e-8) * g.dp


def _nemo_sequence(rows: list[Row], g: Global, rank: Rank) -> float:
    return sum(row.s / (row.n + 1e-8) for row in _kept(rows)) / (len(_kept(g.rows)) + 1e-8) * g.dp


def _roll_sequences(rows: list[Row], g: Global, rank: Rank) -> float:
    return sum(row.s / row.n for row in _kept(rows)) / (len(_kept(g.rows)) + 1e-8) * g.dp


def _skyrl_prompt_mean(rows: list[Row], g: Global, rank: Rank) -> float:
    """Advantages are scaled on the controller; the worker adds up."""
    groups = {row.group for row in g.rows}
    scale = {p: 1 / len(groups) / max(sum(r.n for r in g.rows if r.group == p), 1) for p in groups}
    return sum(row.s * scale[row.group] for row in rows) * g.dp


def _skyrl_legacy(rows: list[Row], g: Global, rank: Rank) -> float:
    """Only called with equal micro-batches here: their number is that of the rank times the ranks."""
    return _sum(rows) / max(_tokens(rows), 1) / (rank.micro_batches * g.dp) * g.dp


def _prime_rl(rows: list[Row], g: Global, rank: Rank) -> float:
    kept = sum(row.n for row in g.rows if row.advantage != 0)
    return sum(row.s for row in rows if row.advantage != 0) / kept * g.dp


def _delta_l(rows: list[Row], g: Global, rank: Rank) -> float:
    total = sum(row.n**-0.75 for row in g.rows if row.n)
    return sum(row.s * row.n**-0.75 for row in _kept(rows)) / (g.length * total) * g.dp


def _delta_l_repo(rows: list[Row], g: Global, rank: Rank) -> float:
    """adv * w / mean(w) with w = (L / mean L) ** -alpha, then a plain mean over the padded matrix of the micro-batch."""
    kept = _kept(g.rows)
    mean_length = _mean([float(row.n) for row in kept])
    w = {id(row): (row.n / mean_length) ** -0.75 for row in kept}
    mean_w = _mean(list(w.values()))
    matrix = len(rows) * g.width
    return sum(row.s * w[id(row)] / mean_w for row in _kept(rows)) / matrix / rank.micro_batches


def _balanced(rows: list[Row], g: Global, rank: Rank) -> float:
    groups = {row.group for row in g.rows}
    total = 0.0
    for p in groups:
        group = [row for row in g.rows if row.group == p and row.n]
        for positive in (True, False):
            half = [row for row in group if (row.advantage > 0) == positive]
            mine = [row for row in rows if row.group == p and row.n and (row.advantage > 0) == positive]
            if half:
                total += len(half) / len(group) * _sum(mine) / _tokens(half) / len(groups)
    return total * g.dp


def _rlinf_rows(rows: list[Row], g: Global, rank: Rank) -> float:
    return _mean([row.s / row.n for row in rows]) / rank.micro_batches


def _tunix(inner: Callable[[Row, Global], float], kept: Callable[[list[Row]], list[Row]]) -> Local:
    """Numerators and denominators are added over micro-batches, and divided once."""
    return lambda rows, g, rank: sum(inner(row, g) for row in rows) / len(kept(g.rows)) * g.dp


def _easyr1_seq(rows: list[Row], g: Global, rank: Rank) -> float:
    """average_loss(mode=seq) * sum(mask) * world / total tokens."""
    return _mean([row.s / max(row.n, 1) for row in rows]) * _tokens(rows) * g.dp / g.tokens


def _siblings(row: Row, g: Global) -> int:
    return sum(other.rollout == row.rollout for other in g.rows)


def _sessions(rows: list[Row], g: Global, rank: Rank) -> float:
    sessions = {row.rollout for row in g.rows}
    return sum(row.s / max(row.n, 1) / _siblings(row, g) for row in rows) / len(sessions) * g.dp


def _turns(rows: list[Row], g: Global, rank: Rank) -> float:
    mean_tokens = g.tokens / len(g.rows)
    return sum(row.s / (_siblings(row, g) * mean_tokens) for row in rows) / len({row.rollout for row in g.rows}) * g.dp


def _per_trajectory(rows: list[Row], g: Global, rank: Rank) -> float:
    mean = _mean([1 / _siblings(row, g) for row in g.rows])
    return sum(row.s / _siblings(row, g) / mean for row in rows) / g.tokens * g.dp


LOOPS: dict[str, Local] = {
    "slime:sample_mean": _slime,
    "slime:per_token": _slime_per_token,
    "miles:sample_mean": _slime,
    "miles:per_token": _slime_per_token,
    "verl:token-mean": _verl_token_mean,
    "verl:token-sum": lambda rows, g, rank: _sum(rows) * g.dp,
    "verl:seq-mean-token-sum": lambda rows, g, rank: _sum(rows) / len(g.rows) * g.dp,
    "verl:seq-mean-token-mean": _verl_sequences,
    "verl:seq-mean-token-sum-norm": lambda rows, g, rank: _sum(rows) / len(g.rows) / g.width * g.dp,
    "verl-legacy:token-mean": _legacy(lambda rows, g: _sum(rows) / _tokens(rows)),
    "verl-legacy:seq-mean-token-sum": _legacy(lambda rows, g: _mean([row.s for row in _kept(rows)])),
    "verl-legacy:seq-mean-token-mean": _legacy(lambda rows, g: _mean([row.s / (row.n + 1e-8) for row in _kept(rows)])),
    "verl-legacy:seq-mean-token-sum-norm": _legacy(lambda rows, g: _sum(rows) / g.width),
    "trl:grpo": _trl_grpo,
    "trl:bnpo": _trl_bnpo,
    "trl:dr_grpo": _trl_dr_grpo,
    "trl:dapo": _trl_dapo,
    "trl:luspo": lambda rows, g, rank: _mean([row.s for row in rows]) / rank.micro_batches,
    "trl:cispo": _trl_dapo,
    "trl:vespo": _trl_dapo,
    "trl:sapo": _trl_grpo,
    "ms-swift:grpo": _trl_grpo,
    "ms-swift:bnpo": _trl_bnpo,
    "ms-swift:dr_grpo": _trl_dr_grpo,
    "ms-swift:dapo": _swift_dapo,
    "openrlhf:token": _verl_token_mean,
    "openrlhf:sequence": _sequences_over_valid,
    "nemo-rl:token": _nemo_token,
    "nemo-rl:sequence": _nemo_sequence,
    "skyrl:token_mean": _verl_token_mean,
    "skyrl:sequence_mean": lambda rows, g, rank: sum(row.s / max(row.n, 1) for row in rows) / len(g.rows) * g.dp,
    "skyrl:seq_mean_token_sum_norm": lambda rows, g, rank: _sum(rows) / (len(g.rows) * g.length) * g.dp,
    "skyrl:prompt_mean": _skyrl_prompt_mean,
    "skyrl:token_mean_legacy": _skyrl_legacy,
    "roll:seq-mean-token-mean": _roll_sequences,
    "roll:token-mean": _verl_token_mean,
    "roll:seq-mean-token-sum": lambda rows, g, rank: _sum(rows) / (len(_kept(g.rows)) + 1e-8) * g.dp,
    "roll:seq-mean-token-sum-norm": lambda rows, g, rank: _sum(rows) / g.width * g.dp,
    "oat:drgrpo": _trl_dr_grpo,
    "oat:grpo": lambda rows, g, rank: _mean([row.s / row.n for row in rows]) / rank.micro_batches,
    "open-instruct:token": _verl_token_mean,
    "open-instruct:constant": lambda rows, g, rank: _sum(rows) / g.length * g.dp,
    "torchforge:simple-grpo": _trl_grpo,
    "torchforge:reinforce": _trl_bnpo,
    "areal": lambda rows, g, rank: _sum(rows) / max(_tokens(rows), 1) * _tokens(rows) / g.tokens * g.dp,
    "prime-rl": _prime_rl,
    "tinker": lambda rows, g, rank: _sum(rows) * g.dp,
    "delta-l": _delta_l,
    "delta-l:repo": _delta_l_repo,
    "balanced": _balanced,
    "torchrl:token_mean": _trl_bnpo,
    "torchrl:prompt_mean": _trl_grpo,
    "rlinf:token-mean": _trl_bnpo,
    "rlinf:seq-mean-token-sum": lambda rows, g, rank: _mean([row.s for row in rows]) / rank.micro_batches,
    "rlinf:seq-mean-token-mean": _rlinf_rows,
    "cosmos-rl:token-mean": _trl_bnpo,
    "trl-sdpo:dapo": _trl_bnpo,
    "tunix:token-mean": _verl_token_mean,
    "tunix:sequence-mean-token-mean": _tunix(lambda row, g: row.s / max(row.n, 1), _kept),
    "tunix:sequence-mean-token-scale": _tunix(lambda row, g: row.s / g.width, _kept),
    "tunix:seq-mean-token-sum": _tunix(lambda row, g: row.s, _kept),
    "tunix:sequence-mean-token-sum-norm": _tunix(lambda row, g: row.s, list),
    "unsloth:grpo": _trl_grpo,
    "unsloth:bnpo": _trl_bnpo,
    "unsloth:dr_grpo": _trl_dr_grpo,
    "unsloth:dapo": _trl_dapo,
    "axolotl:grpo": _trl_grpo,
    "axolotl:bnpo": _trl_bnpo,
    "axolotl:dr_grpo": _trl_dr_grpo,
    "axolotl:dapo": _trl_dapo,
    "easyr1:token": _verl_token_mean,
    "easyr1:seq": _easyr1_seq,
    "agent-lightning:per_rollout_mean": _slime,
    "proposal:session-balanced": _sessions,
    "proposal:turn-denominator": _turns,
    "proposal:per-trajectory": _per_trajectory,
}
