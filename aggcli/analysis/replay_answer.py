"""The answer of a replay: what the modes do to these rollouts, scale apart from direction, and whether a layout changes a loss.

It is made of what `--json` prints and what metrics.jsonl and layouts.jsonl hold, so that a page can be made from records alone.
The norm of a mode's gradient over the baseline's is, step by step, the ratio of their total weights (sum w) times what is left
at equal total weight: the first is a matter of scale, which a learning rate takes away; the second is where the weight goes.
With a KL term the gradient is not that of the weights alone, and is not split; an entropy term is not in it, as entropy is no
function of the log-probabilities of the tokens taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aggcli.analysis.answer import Answer
from aggcli.analysis.reading import read_lines, run_directories, run_manifest
from aggcli.analysis.tolerance import tolerance_of
from aggcli.analysis.units import LENGTH_UNITS
from aggcli.errors import some
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.words import at_most, listed, percent, plural, short
from aggcli.records import LAYOUTS, METRICS
from aggcli.rules import CUSTOM, recorded_rule

Step = Mapping[str, Any]
Steps = Sequence[Step]
_SAME = 1e-9
"""What rounding may make of two numbers that are the same."""
_LEAST_SAID = 1e-15
"""Differences of less are called at most this: a few last bits, which depend on the processor."""
_NORM = "grad_norm_log_probs"
_TELLING = 0.01
"""A difference of two shares of the weight that is worth a word."""


ANSWERED_FROM = frozenset({"modes", "settings", "max_response_length"})
"""What `replay_answer` reads of the head in any case."""


def recorded_replay(directories: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head and the steps of a replay as its `--json` has them, of its results directories. Raises `RecordError`."""
    head: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    for directory in run_directories(directories):
        manifest = run_manifest(directory)
        head = head or dict(manifest)
        mode = str(manifest.get("mode", CUSTOM.name))
        for line in read_lines(directory / METRICS).rows:
            step = steps.setdefault(line["step"], {"step": line["step"], "modes": {}, "layout_deviation": 0.0})
            apart = (step["layout_deviation"], line.get("layout_deviation"))
            step["layout_deviation"] = max((one for one in apart if one is not None), default=None)
            step["modes"][mode] = {**line, "layouts": {}}
        for line in read_lines(directory / LAYOUTS).rows:
            found = steps.get(line["step"], {}).get("modes", {}).get(mode)
            if found is not None:
                found["layouts"][line["layout"]] = line
    return head, [steps[number] for number in sorted(steps)]


def replay_answer(head: Mapping[str, Any], steps: Steps) -> Answer:
    """The answer to these steps, in the order of the modes of the head, the first of which is the baseline."""
    return Answer(tuple(filter(None, (*_on_modes(head, steps), _on_layouts(head, steps)))))


# -- modes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """A mode against the baseline, step by step: the steps in which both are."""

    mode: str
    baseline: str
    head: Mapping[str, Any]
    steps: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
    of: int
    """Steps that there are, those that only one of the two has or that hold no trained token included."""
    moved: frozenset[str]
    """The rules whose loss depends on the layout, by definition or as it was found here."""

    def values(self, of: Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]) -> list[float]:
        found = (of(mine, theirs) for mine, theirs in self.steps)
        return [value for value in found if value is not None]

    @property
    def ratios(self) -> list[float]:
        return self.values(_ratio)

    @property
    def cosines(self) -> list[float]:
        return self.values(lambda mine, theirs: mine.get("gradient_cosine"))

    @property
    def scales(self) -> list[float]:
        return self.values(lambda mine, theirs: _over(mine.get("total_weight"), theirs.get("total_weight")))

    @property
    def under(self) -> list[str]:
        """The layout that the numbers are of, where the mode or the baseline depends on it."""
        if not self.moved & {self.mode, self.baseline}:
            return []
        return [f"under {listed(list(dict.fromkeys(next(iter(mine['layouts']), '') for mine, _ in self.steps)), 'or')}"]

    @property
    def is_same(self) -> bool:
        """Whether every number that says what the mode does is the baseline's, in every step."""
        names = ("total_weight", "effective_tokens", _NORM, *(name for name in self.steps[0][0] if "weight_share/" in name))
        same = all(_equal(mine.get(name), theirs.get(name)) for mine, theirs in self.steps for name in names)
        return same and all(abs(cosine - 1) < _SAME for cosine in self.cosines)

    def with_gradient(self) -> _Pair:
        """The steps whose gradients are compared, so that every number of a sentence is of the same ones; all where none is."""
        found = tuple(one for one in self.steps if _ratio(*one) is not None)
        return replace(self, steps=found) if found else self


def _on_modes(head: Mapping[str, Any], steps: Steps) -> list[str]:
    rules = [rule for rule in head["modes"] if any(rule in step["modes"] for step in steps)]
    baseline = rules[0]
    own = [step["modes"][baseline] for step in steps if baseline in step["modes"]]
    if not any(one.get("tokens") for one in own):
        return ["There is no trained token in any step, so no mode does anything here."]
    norms = [one[_NORM] for one in own if one.get(_NORM) is not None]
    if len(rules) == 1:
        return [_alone(head, baseline, own)]
    moved = frozenset(
        rule for rule in rules if _depends_on_layout(rule) or is_beyond_rounding(largest_between_layouts(steps, rule), head)
    )
    pairs = [_pair(head, steps, baseline, rule, moved) for rule in rules[1:]]
    pairs = [pair for pair in pairs if pair.steps]
    if norms and not any(norms) and not any(pair.values(lambda mine, theirs: mine.get(_NORM) or None) for pair in pairs):
        return [f"The gradient is 0 under {_modes(rules)}{_why_zero(own)}: no mode does anything to this batch."]
    return _differences(pairs)


def _depends_on_layout(name: str) -> bool:
    rule = recorded_rule(name)
    return rule is not None and rule.depends_on_layout


def _pair(head: Mapping[str, Any], steps: Steps, baseline: str, mode: str, moved: frozenset[str]) -> _Pair:
    both = [step["modes"] for step in steps if baseline in step["modes"] and mode in step["modes"]]
    found = tuple((modes[mode], modes[baseline]) for modes in both if modes[mode].get("tokens"))
    return _Pair(mode, baseline, head, found, len(steps), moved)


def _differences(pairs: Sequence[_Pair]) -> list[str]:
    """The mode that differs most: by how much, and what makes it; then the others."""
    same = [pair for pair in pairs if pair.is_same]
    others = sorted((pair.with_gradient() for pair in pairs if pair not in same), key=_rank)
    if not others:
        if any(pair.under for pair in same):
            said = "; ".join(_in_one(same))
            return [f"{said[0].upper() if said.startswith('under ') else said[0]}{said[1:]}."]
        return [f"No difference between the modes here: {_in_one(same)[0]}."]
    parts = []
    if others[1:]:
        more = [f"{len(others) - 4} more in the table"] if len(others) > 4 else []
        steps = len(others[0].steps)
        parts.append(f"The others: {', '.join([*(_in_short(pair, steps) for pair in others[1:4]), *more])}")
    parts += _in_one(same)
    return [*_sentences(others[0]), *([f"{'; '.join(parts)}."] if parts else [])]


def _in_one(same: Sequence[_Pair]) -> list[str]:
    """`token_mean and constant have the same gradient, ... as sample_mean, because ...`; what holds under a layout alone is
    said apart: `under dp1 trl:bnpo has ...`."""
    groups: dict[str, list[_Pair]] = {}
    for pair in same:
        groups.setdefault(" ".join(pair.under), []).append(pair)
    said = []
    for under, pairs in groups.items():
        what = f"the same {'gradient, ' if pairs[0].ratios else ''}total weight and shares of the weight as {pairs[0].baseline}"
        why = _why_same(pairs)
        has = f"{_modes([pair.mode for pair in pairs])} {'has' if len(pairs) == 1 else 'have'} {what}"
        said.append(f"{under and under + ' '}{has}" + (f", because {why}" if why else ""))
    return said


def _rank(pair: _Pair) -> tuple[float, float]:
    """By the norm of the gradient, where it is known by the total weight; then by direction."""
    ratio = _mean(pair.ratios) or _mean(pair.scales)
    return (-abs(math.log(ratio)) if ratio else 0.0, _mean(pair.cosines) or 0.0)


def _sentences(pair: _Pair) -> list[str]:
    """`prompt_mean: gradient norm 0.102x sample_mean's.` and `0.125x is ...; responses of more than 12 tokens get ...`."""
    ratio, scale, cosines = _mean(pair.ratios), _mean(pair.scales), pair.cosines
    has, what = len(pair.steps), "trained tokens" if ratio is None else "a gradient"
    over = (
        [f"mean of {has} steps" if has == pair.of else f"mean of the {has} of {pair.of} steps with {what}"]
        if pair.of > 1
        else []
    )
    over += pair.under
    over += ["without the entropy term"] if ratio is not None and pair.head["settings"].get("entropy_coef") else []
    over = f" ({', '.join(over)})" if over else ""
    if ratio is None:
        total = "" if scale is None else f"total weight {short(scale)}x {pair.baseline}'s; "
        lead = f"{pair.mode}: {total}there is no gradient to compare{over}"
        parts = [_why_scale(pair).strip(" ()")]
    else:
        lead = f"{pair.mode}: gradient norm {short(ratio)}x {pair.baseline}'s{_range(pair.ratios)}{over}"
        parts = [_split(pair, ratio, scale, cosines)]
    parts += [] if ratio is not None and _is_flat(pair) else _where(pair)
    why = "; ".join(filter(None, parts))
    return [f"{lead}.", *([f"{why[0].upper()}{why[1:]}."] if why else [])]


def _split(pair: _Pair, ratio: float, scale: float | None, cosines: Sequence[float]) -> str:
    """The norm apart into its scale and its direction, in words."""
    cosine = _mean(cosines)
    of = f", of {plural(len(cosines), 'step')}" if len(cosines) != len(pair.steps) else ""
    towards = "" if cosine is None else f"cosine {_cosine(cosine)}{of}"
    kl = pair.head["settings"].get("kl_coef")
    if kl and _is_flat(pair):
        return f"{towards and towards + ', '}both of the KL term alone, as every advantage is 0"
    if kl or scale is None or min(pair.scales) <= 0 or len(pair.scales) < len(pair.steps):
        total = "" if scale is None else f"total weight {short(scale)}x{_why_scale(pair)}"
        return ", ".join(filter(None, (towards + " (both of the loss with its KL term)" if towards and kl else towards, total)))
    both = pair.values(lambda mine, theirs: _rest(mine, theirs))
    rest = _mean(both)
    if rest is None:
        return towards
    straight = cosine is not None and all(abs(one - 1) < _SAME for one in cosines)
    if all(abs(one - 1) < _SAME for one in pair.scales):
        return f"its total weight is the same, so this comes from where the weight goes ({towards})"
    if straight and all(abs(one - 1) < _SAME for one in both):
        return f"all of it is its total weight{_why_scale(pair)}, and the direction is the same (cosine 1)"
    if max(pair.scales) - min(pair.scales) < _SAME * scale:
        return (
            f"{short(scale)}x is its total weight{_why_scale(pair)} and the other {short(rest)}x comes from where the weight"
            f" goes ({towards})"
        )
    return (
        f"its total weight is {short(scale)}x{_why_scale(pair)}; at equal total weight the norm would be {short(rest)}x"
        f" ({towards})"
    )


def _is_flat(pair: _Pair) -> bool:
    """Whether every advantage is 0, so that the gradient is of the KL term alone."""
    return all(_equal(one.get("weight_share/zero_advantage"), 1.0) for step in pair.steps for one in step)


def _ratio(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    return _over(mine.get(_NORM), theirs.get(_NORM))


def _rest(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    """The ratio of the norms at equal total weight."""
    scale = _over(mine.get("total_weight"), theirs.get("total_weight"))
    ratio = _ratio(mine, theirs)
    return ratio / scale if ratio is not None and scale is not None and scale > 0 else None


def _why_scale(pair: _Pair) -> str:
    """` (0.125 against 1: P/N, ...)`: the two total weights, and what makes the one that is not 1, where that is known."""
    mine, theirs = (_mean([one.get("total_weight") for one in side]) for side in zip(*pair.steps, strict=True))
    if mine is None or theirs is None or all(_equal(one, 1.0) for one in pair.scales):
        return ""
    why = _definition(pair.mode, [step[0] for step in pair.steps], pair.head)
    why = why or _definition(pair.baseline, [step[1] for step in pair.steps], pair.head, of=pair.baseline)
    scale = _mean(pair.scales)
    means = "" if scale is None or abs(scale * theirs - mine) < _SAME * abs(mine) else "in the mean "
    return f" ({means}{short(mine)} against {short(theirs)}{why})"


def _definition(mode: str, values: Sequence[Mapping[str, Any]], head: Mapping[str, Any], of: str = "") -> str:
    """What a total weight is by the definition of its mode, where the numbers bear it out; blank elsewhere."""
    rule, whose = recorded_rule(mode), f"{of}'s is " if of else ""
    if rule is None or not rule.is_mode:
        return ""
    by_rollouts = rule.reads("prompt_mean_scale") and head["settings"].get("prompt_mean_scale") == "rollouts"
    if by_rollouts and _holds(values, lambda one: _over(one.get("prompts"), one.get("rollouts"))):
        counts = {(one["prompts"], one["rollouts"]) for one in values}
        of = "prompts over rollouts" if len(counts) > 1 else "{:g} prompts over {:g} rollouts".format(*counts.pop())
        return f": {whose}P/N by definition, {of}; --prompt-mean-scale prompts makes it 1"
    divisor, unit = head.get("divisor"), _unit(head)
    of = f"{divisor or 0:g} {unit if divisor != 1 else unit.removesuffix('s')}"
    if rule.takes_divisor and divisor and _holds(values, lambda one: _over(one.get("tokens"), one["rollouts"] * divisor)):
        return f": {whose}trained {unit} over N x L by definition; --loss-aggregation-divisor sets L, here {of}"
    return ""


def _holds(values: Sequence[Mapping[str, Any]], formula: Callable[[Mapping[str, Any]], float | None]) -> bool:
    return all(
        weight is not None and (made := formula(one)) is not None and abs(weight - made) < _SAME * abs(made)
        for one in values
        for weight in (one.get("total_weight"),)
    )


def _where(pair: _Pair) -> list[str]:
    """`responses of more than 12 tokens get 17 % of the weight instead of 9.4 %`: what differs most, of equals the longest;
    nothing where nothing does by a hundredth."""
    shares = {f"weight_share/length_{bin_}": _bin_words(bin_, pair.head) for bin_ in LENGTH_BINS if length_bin(bin_, pair.head)}
    shares |= {"weight_share/correct": "correct rollouts"}
    gaps: dict[str, tuple[float, float]] = {}
    for name in shares:
        sides = [[one.get(name) for one in side] for side in zip(*pair.steps, strict=True)]
        mine, theirs = map(_mean, sides)
        if mine is not None and theirs is not None and abs(mine - theirs) >= _TELLING:
            gaps[name] = (mine, theirs)
    if not gaps:
        return []
    longest = f"weight_share/length_{LENGTH_BINS[-1]}"
    name = max(gaps, key=lambda one: (round(abs(gaps[one][0] - gaps[one][1]), 9), one == longest))
    mine, theirs = gaps[name]
    return [f"{shares[name]} get {percent(mine)} of the weight instead of {percent(theirs)}"]


def _bin_words(bin_: str, head: Mapping[str, Any]) -> str:
    return f"responses of {length_bin(bin_, head)}"


def length_bin(bin_: str, head: Mapping[str, Any]) -> str:
    """`more than 12 tokens`: a quarter of the maximum response length, in whole lengths and their unit; blank for one that no
    whole length from 1 lies in."""
    at, unit = LENGTH_BINS.index(bin_), _unit(head).removesuffix("s")
    low, high = (part * head["max_response_length"] // 4 for part in (at, at + 1))
    if at == len(LENGTH_BINS) - 1:
        return f"more than {plural(low, unit)}"
    if low == high:
        return ""
    if not at and high > 1:
        return f"at most {plural(high, unit)}"
    return plural(high, unit) if low + 1 == high else f"{low + 1} to {plural(high, unit)}"


def _in_short(pair: _Pair, steps: int) -> str:
    """`token_mean 0.811x (total weight 1x, cosine 0.847)`; how many steps it is of unless it has as many as the first."""
    ratio, scale, cosine = _mean(pair.ratios), _mean(pair.scales), _mean(pair.cosines)
    is_weighed = ratio is None or not _is_flat(pair)
    parts = [f"total weight {short(scale)}x" if scale is not None and is_weighed else ""]
    parts += [
        f"cosine {_cosine(cosine)}" if cosine is not None else "",
        "" if ratio is not None else _effective(pair),
        *pair.under,
    ]
    parts += [f"mean of {len(pair.steps)} of {pair.of} steps"] if len(pair.steps) != steps else []
    beside = ", ".join(filter(None, parts))
    return " ".join(filter(None, (pair.mode, f"{short(ratio)}x" if ratio is not None else "", beside and f"({beside})")))


def _effective(pair: _Pair) -> str:
    """`effective sample size 9.39 instead of 16 tokens`; blank where it is the same."""
    mine, theirs = (_mean([one.get("effective_tokens") for one in side]) for side in zip(*pair.steps, strict=True))
    if mine is None or theirs is None or _equal(mine, theirs):
        return ""
    return f"effective sample size {short(mine)} instead of {short(theirs)} {_unit(pair.head)}"


def _why_same(pairs: Sequence[_Pair]) -> str:
    """Why these modes are the baseline on this batch, where the counts say so."""
    lines = [one for pair in pairs for step in pair.steps for one in step]
    if all(_equal(one.get("effective_tokens"), one.get("tokens")) for one in lines):
        return "every trained token weighs the same under each of them"
    names = {pair.mode for pair in pairs} | {pairs[0].baseline}
    if names == {"sample_mean", "prompt_mean"} and all(one.get("prompts") == one.get("rollouts") for one in lines):
        return "every prompt has one rollout"
    return ""


def _why_zero(own: Sequence[Mapping[str, Any]]) -> str:
    groups = sum(one.get("groups") or 0 for one in own)
    flat = sum(one.get("zero_variance_groups") or 0 for one in own)
    if groups and groups == flat:
        which = "the one prompt group" if groups == 1 else f"all {int(groups)} prompt groups"
        return f" (every advantage is 0 in {which}: rewards are equal, or it has one rollout)"
    return ""


def _alone(head: Mapping[str, Any], mode: str, own: Sequence[Mapping[str, Any]]) -> str:
    """One mode without another to compare it with."""
    over = f" (means of {len(own)} steps)" if len(own) > 1 else ""
    loss, norm, total, longest = (
        _mean([one.get(name) for one in own])
        for name in ("pg_loss", _NORM, "total_weight", f"weight_share/length_{LENGTH_BINS[-1]}")
    )
    parts = [] if loss is None else [f"pg_loss {short(0.0 if abs(loss) < 1e-12 else loss)}"]
    parts += [] if norm is None else [f"gradient norm {short(norm)}"]
    parts += [] if total is None else [f"total weight {short(total)}"]
    if longest is not None:
        parts.append(f"{_bin_words(LENGTH_BINS[-1], head)} get {percent(longest)} of the weight")
    return f"{mode} alone{over}: {', '.join(parts)}; `aggcli compare` sets it beside other modes."


# -- layouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutGap:
    """pg_loss of a step under two layouts. `share`: of the sum of its absolute terms."""

    share: float
    step: int
    layouts: tuple[str, str]
    values: tuple[float | None, float | None]
    size: float

    @property
    def far(self) -> str:
        """`22 %` of the value under the first layout, or where that is near 0 `0.0123 apart`."""
        a, b = self.values
        if a is None or b is None:
            return "only one has it"
        return percent(abs(a - b) / abs(a)) if abs(a) > self.size / 1000 else f"{short(abs(a - b))} apart"

    @property
    def text(self) -> str:
        """`dp2:interleaved gives a pg_loss of -0.0225 instead of -0.0184 under dp1:first-fit (22.4 %)`."""
        a, b = self.values
        if a is None or b is None:
            has, lacks = self.layouts if b is None else self.layouts[::-1]
            return f"there is a pg_loss under {has} and none under {lacks}"
        return f"{self.layouts[1]} gives a pg_loss of {b:.4g} instead of {a:.4g} under {self.layouts[0]} ({self.far})"


def largest_between_layouts(steps: Steps, rule: str, layout: str | None = None) -> LayoutGap | None:
    """How far pg_loss is apart between the first layout of a step and another (or this one), at most; None where nothing was
    compared."""
    found = []
    for step in steps:
        layouts: Mapping[str, Mapping[str, Any]] = step["modes"].get(rule, {}).get("layouts", {})
        first = next(iter(layouts), "")
        for other in layouts if layout is None else {layout} & layouts.keys():
            a, b = layouts[first].get("pg_loss"), layouts[other].get("pg_loss")
            if other != first and (a, b) != (None, None):
                sizes = [(layouts[name].get("sizes") or {}).get("pg_loss") or 0.0 for name in (first, other)]
                found.append(LayoutGap(_share(a, b, max(sizes)), step["step"], (first, other), (a, b), max(sizes)))
    return max(found, key=lambda one: one.share, default=None)


def is_beyond_rounding(gap: LayoutGap | None, head: Mapping[str, Any]) -> bool:
    """Whether a layout changed the loss by more than rounding in the dtype of the replay explains."""
    return gap is not None and gap.share > tolerance_of(head["settings"])[1]


def _share(a: float | None, b: float | None, size: float) -> float:
    if a is None or b is None:
        return math.inf
    return abs(a - b) / max(size, abs(a), abs(b)) if a != b else 0.0


def _on_layouts(head: Mapping[str, Any], steps: Steps) -> str:
    rules = [rule for rule in head["modes"] if rule != CUSTOM.name and any(rule in step["modes"] for step in steps)]
    if not rules:
        return "The custom reducer was called once on the whole step, so no layout was compared; `aggcli audit --reducer` does."
    names = list(dict.fromkeys(name for step in steps for rule in step["modes"].values() for name in rule["layouts"]))
    if len(names) < 2:
        only = f"Only the layout {names[0]} was evaluated" if names else "No layout was evaluated"
        return f"{only}, so nothing is said of others (--layouts names them)."
    dtype, limit = tolerance_of(head["settings"])
    apart = {rule: largest_between_layouts(steps, rule) for rule in rules}
    moved = {rule: one for rule, one in apart.items() if one is not None and is_beyond_rounding(one, head)}
    kept = {rule: one for rule, one in apart.items() if one is not None and rule not in moved}
    if not moved and not kept:
        return f"There is no pg_loss to compare the layouts by ({some(names, 6)})."
    evaluated = f"layouts evaluated ({some(names, 6)})"
    if moved:
        rule = max(moved, key=lambda one: moved[one].share)
        step = f" in step {moved[rule].step}" if len(steps) > 1 else ""
        said = [f"Under {rule} the loss depends on the layout{_fault(moved)}: of the {evaluated} {moved[rule].text}{step}"]
        said += [f"it depends on it under {_modes([other for other in moved if other != rule])} too"] if len(moved) > 1 else []
        said += [f"under {_modes(list(kept))} none changes it{_how_equal(kept, dtype)}"] if kept else []
        return f"{'; '.join(said)}."
    everywhere = len(kept) == len(rules) > 1 and CUSTOM.name not in head["modes"]
    which = "any of these modes" if everywhere else listed(list(kept), "or")
    said = [f"None of the {evaluated} changes the loss under {which}{_how_equal(kept, dtype)}"]
    beyond = [step["step"] for step in steps if (step.get("layout_deviation") or 0.0) > limit]
    said += [f"but a layout changed another number, which none may, in step {some(beyond)}"] if beyond else []
    return f"{'; '.join(said)}."


def _fault(moved: Iterable[str]) -> str:
    """Said where a rule moved that no layout may move."""
    exact = [name for name in moved if recorded_rule(name) is not None and not _depends_on_layout(name)]
    return f" (a fault: none may under {_modes(exact)})" if exact else ""


def _how_equal(kept: Mapping[str, LayoutGap], dtype: str) -> str:
    worst = max(one.share for one in kept.values())
    if worst == 0:
        return " (equal to the last bit)"
    return f" (apart by at most {max(at_most(worst, 1), _LEAST_SAID):g} of its absolute terms, as rounding in {dtype} is)"


# -- numbers --------------------------------------------------------------------------------------------------------


def _modes(rules: Sequence[str]) -> str:
    return listed(list(rules)) if len(rules) <= 4 else some(rules, 4)


def _unit(head: Mapping[str, Any]) -> str:
    return LENGTH_UNITS.get(str(head.get("length_unit")), "tokens")


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _equal(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= _SAME * max(abs(a), abs(b))


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _cosine(value: float) -> str:
    """Three decimals; 1 only where it is, but for rounding."""
    return "1" if abs(value - 1) < _SAME else f"{min(value, 0.999):.3g}" if value > 0.9995 else f"{value:.3g}"


def _range(values: Sequence[float]) -> str:
    """` (0.3x to 0.44x)` where the steps are more than a tenth apart."""
    low, high = min(values), max(values)
    return f" ({short(low)}x to {short(high)}x)" if high - low > 0.1 * high else ""
