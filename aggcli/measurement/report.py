"""What a step reports, once, for replay and training: under every rule, under every layout, and by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aggcli.measurement.comparison import LayoutComparison

Values = dict[str, float | None]
TWIN = "in-process twin"
"""How the layout in force was evaluated a second time, to check the real ranks; never recorded."""


@dataclass(frozen=True)
class RankReport:
    """One data-parallel rank of a layout: its values by rule (`sizes`: as of `LayoutReport`), its tokens per context-parallel
    rank, and its samples."""

    rank: int
    values: dict[str, Values]
    sizes: dict[str, dict[str, float]]
    cp_tokens: list[int]
    partition: list[int]
    correct_lengths: list[int] | None


@dataclass(frozen=True)
class LayoutReport:
    """A step under one layout: reduced values by rule, and what each rank had.

    `sizes`: by rule, the sum of the absolute terms of every number whose terms may have either sign, divided as the number is.
    `misplaced`: in words, samples that are not where the layout says, or not once; `shared`: numbers of the whole step, which
    no layout could change.
    """

    layout: str
    evaluated: str
    """`in-process`, `processes` when each rank was a real one, or `TWIN`."""
    values: dict[str, Values]
    sizes: dict[str, dict[str, float]]
    misplaced: list[str] = field(default_factory=list)
    shared: Values = field(default_factory=dict)
    ranks: list[RankReport] = field(default_factory=list)
    correct_lengths: list[int] | None = None

    @property
    def name(self) -> str:
        """The layout in words."""
        return f"{self.layout} in one process" if self.evaluated == TWIN else self.layout

    def as_json(self, rule: str) -> dict[str, Any]:
        """The layout's numbers under a rule, and those of its ranks."""
        ranks = [
            {
                "rank": rank.rank,
                **rank.values[rule],
                "cp_tokens": rank.cp_tokens,
                "partition": rank.partition,
                **_lengths(rank.correct_lengths),
            }
            for rank in self.ranks
        ]
        sizes = {"sizes": self.sizes[rule]}
        return {**self.values[rule], **self.shared, **_lengths(self.correct_lengths), **sizes, "ranks": ranks}


def _lengths(lengths: list[int] | None) -> dict[str, list[int]]:
    return {} if lengths is None else {"correct/lengths": lengths}


@dataclass(frozen=True)
class StepReport:
    """One optimizer step under every rule and layout.

    `values[rule]`: the numbers under the layout in force, with those of whole groups and of the rule's influence;
    `layouts`: those recorded, the layout in force first; `comparison`: how far they are apart, real processes and their
    in-process twin included; `skipped`: metric -> what it would need; `samples`: per-sample columns, by name; `weights[rule]`:
    the total weight of each sample.
    """

    step: int
    source: str
    rules: tuple[str, ...]
    values: dict[str, Values]
    layouts: list[LayoutReport]
    comparison: LayoutComparison
    advantages: str
    empty: bool
    notes: list[str]
    skipped: dict[str, str]
    samples: dict[str, list[Any]]
    weights: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """The step as `--json` prints it: modes -> numbers and layouts -> numbers and ranks."""
        modes = {
            rule: {**self.values[rule], "layouts": {report.layout: report.as_json(rule) for report in self.layouts}}
            for rule in self.rules
        }
        return {
            "step": self.step,
            "source": self.source,
            "advantages": self.advantages,
            "empty": self.empty,
            "layout_deviation": self.comparison.deviation,
            "modes": modes,
            "skipped": self.skipped,
            "notes": self.notes,
        }

    def metrics_line(self, rule: str) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        return {
            **self._head(rule),
            "layout": self.layouts[0].layout,
            **self.values[rule],
            "advantages": self.advantages,
            "empty": self.empty,
            "layout_deviation": self.comparison.deviation,
            "skipped": self.skipped,
            "notes": self.notes,
        }

    def layout_lines(self, rule: str) -> list[dict[str, Any]]:
        """The lines of layouts.jsonl for this step."""
        return [
            {**self._head(rule), "layout": report.layout, "evaluated": report.evaluated, **report.as_json(rule)}
            for report in self.layouts
        ]

    def sample_columns(self, rule: str) -> dict[str, list[Any]]:
        """The columns of the step's sample file."""
        return {**self.samples, "weight": self.weights[rule]}

    def _head(self, rule: str) -> dict[str, Any]:
        return {"step": self.step, "source": self.source, "mode": rule}
