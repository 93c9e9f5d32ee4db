"""The answer of a comparison of trained runs: what differs and by how much, how sure that is, and what to do about it.

Every paired difference of every outcome and mode is tested, all are corrected together (`aggcli.analysis.comparison`), and
those that are shown are what the table marks and what the answer counts. They are named the largest first, by standardised
difference (`aggcli.analysis.effects`). Success at equal steps is always named; where no difference in it is shown, with what
this comparison could have shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aggcli.analysis.answer import Answer
from aggcli.analysis.comparison import Comparison, Pair
from aggcli.analysis.effects import Effect, effects_of
from aggcli.analysis.evaluations import behind_accuracy
from aggcli.analysis.histories import History
from aggcli.analysis.power import MOST_SEEDS
from aggcli.analysis.verdict import Ranking, Verdict, rankings_of
from aggcli.measurement.words import listed, number, plural, signed

_MOST = 3
"""Effects, and modes, that a sentence names; the rest are counted."""
FEW_SEEDS = 4
"""Up to so many seeds a comparison is said to be small."""


def verdict(comparison: Comparison, runs: Sequence[History] = ()) -> Verdict:
    """The verdict of a comparison of runs that sampled their own rollouts. `runs`: those that it is of, for the number of
    prompts behind an accuracy.
    """
    rankings = rankings_of(comparison)
    of_one = (name for name in ("accuracy_on_fresh_prompts", "accuracy") if name in comparison.outcomes)
    outcome = rankings[0].outcome if rankings else next(of_one, "")
    return Verdict(_answer(comparison, rankings, behind_accuracy(runs, comparison, outcome)), rankings)


def _answer(comparison: Comparison, rankings: Sequence[Ranking], behind: str) -> Answer:
    effects, base = effects_of(comparison), comparison.baseline
    if len(comparison.labels) == 1:
        return Answer(
            (_alone(comparison, behind), f"{base} is the only {comparison.arm} here: there is nothing to compare it with.")
        )
    if not comparison.outcomes:
        return Answer(("No verdict: no accuracy, reward or length was recorded, and pg_loss says nothing about success.",))
    if not effects:
        return Answer(
            (f"No verdict: no other {comparison.arm} can be {'paired' if comparison.paired else 'compared'} with {base}.",)
        )
    if not comparison.tests:
        return Answer((*_untested(comparison, rankings, effects), f"Give more {comparison.each}s."))
    shown = [one for one in effects if one.shown]
    if not any(_can_tell(pair) for pair in _all_pairs(comparison)) and not comparison.ratios:
        modes = listed(_few([label for label in comparison.labels if label != base]), "or")
        two = "paired over two seeds" if comparison.paired else "of two runs"
        alike = f"each outcome {two} or more is the same under {modes} as under {base}"
        return Answer((f"No difference has a spread to test by: {alike}.", *_success_untested(comparison)))
    if not shown:
        power = _power(comparison, rankings)
        said = (
            *_nothing_shown(comparison, rankings),
            *_success_untested(comparison),
            power and f"{power[0].upper()}{power[1:]}.",
            _sureness(comparison, behind),
        )
        return Answer(tuple(filter(None, said)))
    rest = _success_not_shown(comparison, rankings, {(one.outcome, one.label) for one in shown[:_MOST]})
    return Answer(
        tuple(filter(None, (*_shown(comparison, shown), *_success_untested(comparison), rest, _sureness(comparison, behind))))
    )


def _alone(comparison: Comparison, behind: str) -> str:
    """What the only mode came to."""
    success = next(
        (name for name in ("accuracy_on_fresh_prompts", "accuracy", "raw_reward") if name in comparison.outcomes), ""
    )
    if not success:
        return "Neither accuracy nor reward was recorded."
    one = comparison.outcomes[success][comparison.baseline]
    bounds = "" if one.low is None or one.high is None else f" [{number(one.low, 4)}, {number(one.high, 4)}]"
    seeds = plural(len(one.values), comparison.each)
    of = f", {behind}" if behind else ""
    return f"{comparison.baseline}: {comparison.named(success)} {number(one.mean, 4) or '0'}{bounds} over {seeds}{of}."


def _untested(comparison: Comparison, rankings: Sequence[Ranking], effects: Sequence[Effect]) -> tuple[str, ...]:
    """One seed, or differences of which each has one; of runs that are not paired, an arm of one, or arms without a spread."""
    base = comparison.baseline
    success = rankings[0].outcome if rankings else effects[0].outcome
    own = [one for one in effects if one.outcome == success]
    labels = listed(_few([one.label for one in own]), "or") if own else f"another {comparison.arm}"
    sizes = "; ".join(f"{one.label}, {one.text}" for one in own[:_MOST])
    why = "One seed" if comparison.paired else _why_untested(comparison, success)
    said = f"{why}: no interval and no test, so no difference can be shown between {base} and {labels}."
    return (said, f"Untested: {sizes}.") if sizes else (said,)


def _why_untested(comparison: Comparison, outcome: str) -> str:
    """Of runs that are not paired: `grpo and dapo have one run each`."""
    lone = [label for label, one in comparison.outcomes[outcome].items() if len(one.values) == 1]
    if not lone:
        return "The runs of an arm do not differ"
    return f"{listed(_few(lone))} {'has one run' if len(lone) == 1 else 'have one run each'}"


def _shown(comparison: Comparison, shown: Sequence[Effect]) -> list[str]:
    """`2 of 26 differences from a are shown; the largest against its spread over seeds: b, accuracy +0.107 [+0.078, +0.135]
    (0.612 against 0.505).` and those that come next."""
    several = len(comparison.labels) > 2
    named = [f"{one.label}, {one.text}" if several else one.text for one in shown[:_MOST]]
    under = "" if several else f" under {shown[0].label}"
    of = f"{len(shown)} of {plural(comparison.tests, 'difference')} from {comparison.baseline}{under}"
    if len(shown) == 1:
        return [f"{of} is shown: {named[0]}."]
    more = [f"{len(shown) - _MOST} more in the table"] if len(shown) > _MOST else []
    first = f"{of} are shown; the largest against its spread over {comparison.each}s: {named[0]}."
    return [first, f"Next: {'; '.join([*named[1:], *more])}."]


def _nothing_shown(comparison: Comparison, rankings: Sequence[Ranking]) -> list[str]:
    """`No difference from a is shown under b, in any of 13 outcomes that were tested.` and
    `Accuracy ...: +0.001 [-0.003, +0.005].`"""
    outcomes = sum(any(_is_tested(one.pair) for one in of.values()) for of in comparison.outcomes.values())
    outcomes += any(one.test.p is not None for one in comparison.ratios)
    modes = [label for label in comparison.labels if label != comparison.baseline]
    under = f" under {listed(_few(modes), 'or')}"
    many = plural(outcomes, "outcome that was tested", "outcomes that were tested")
    first = f"No difference from {comparison.baseline} is shown{under}, in any of {many}."
    if not rankings:
        return [first]
    own = [pair for pair in _pairs(comparison, rankings[0].outcome).items() if _is_tested(pair[1])]
    sizes = [f"{label} {_size(pair)}" if len(modes) > 1 else _size(pair) for label, pair in own[:_MOST]]
    head = comparison.named(rankings[0].outcome)
    return [first, f"{head[0].upper()}{head[1:]}: {'; '.join(sizes)}."] if sizes else [first]


def _success_untested(comparison: Comparison) -> list[str]:
    """`Raw reward in training rollouts, equal steps, was not tested under b: a has no number of it in its last steps.`"""
    said = []
    for name in ("accuracy", "raw_reward"):
        own = comparison.outcomes.get(name, {})
        why: dict[str, list[str]] = {}
        for label in comparison.labels if own else ():
            one = own.get(label)
            if label != comparison.baseline and (one is None or not _is_tested(one.pair)):
                bare = [arm for arm in (label, comparison.baseline) if arm not in own]
                reason = (
                    f"{listed(bare)} {'has' if len(bare) == 1 else 'have'} no number of it in the last steps" if bare else ""
                )
                few = f"too few {comparison.each}s have a number, or they have no spread"
                why.setdefault(reason or (one.unpaired if one is not None else "") or few, []).append(label)
        head = comparison.named(name)
        for reason, labels in why.items():
            said.append(f"{head[0].upper()}{head[1:]}, was not tested under {listed(_few(labels), 'or')}: {reason}.")
    return said


def _success_not_shown(comparison: Comparison, rankings: Sequence[Ranking], named: set[tuple[str, str]]) -> str:
    """What became of success at equal steps, where it is not among the effects that were named."""
    if not rankings:
        return ""
    outcome, said = rankings[0].outcome, []
    pairs = {label: pair for label, pair in _pairs(comparison, outcome).items() if _is_tested(pair)}
    beyond = {label: pair for label, pair in pairs.items() if pair.shown and (outcome, label) not in named}
    if beyond:
        sizes = "; ".join(f"{label} {_size(pair)}" for label, pair in list(beyond.items())[:_MOST])
        said.append(f"shown under {listed(_few(list(beyond)))}: {sizes}")
    hidden = {label: pair for label, pair in pairs.items() if not pair.shown}
    if hidden:
        sizes = "; ".join(f"{label} {_size(pair)}" for label, pair in list(hidden.items())[:_MOST])
        said.append(f"no difference shown under {listed(_few(list(hidden)), 'or')}: {sizes}")
    if not said:
        return ""
    head, power = comparison.named(outcome), _power(comparison, rankings)
    return f"{head[0].upper()}{head[1:]}, {', and '.join(said)}{f'; {power}' if power else ''}."


def _power(comparison: Comparison, rankings: Sequence[Ranking]) -> str:
    """What success at equal steps could have shown, where no difference is."""
    if not rankings:
        return ""
    outcome = rankings[0].outcome
    pairs, word = _pairs(comparison, outcome), "accuracy" if outcome.startswith("accuracy") else "raw reward"
    found = {label: pair.power for label, pair in pairs.items() if not pair.shown and pair.power is not None}
    if not found:
        return ""
    able = [one for one in found.values() if one.possible]
    never = [label for label, one in found.items() if not one.possible]
    under = f" under {listed(_few(never), 'or')}" if able and never else ""
    n = plural(min(pairs[label].test.difference.n for label in never), comparison.each) if never else ""
    none = f"no possible difference in {word} would have been shown{under} with 80 % power: {n} at this spread"
    if not able:
        return none
    smallest = sorted(able, key=lambda one: one.smallest)
    sizes = list(dict.fromkeys(number(one.smallest, 2) for one in (smallest[0], smallest[-1])))
    seeds = [one.seeds_for_half for one in able]
    most = max((MOST_SEEDS + 1 if one is None else one) for one in seeds)
    takes = f"{f'more than {MOST_SEEDS}' if most > MOST_SEEDS else most} {able[0].each}"
    by_mode = f" to {sizes[-1]}, by {comparison.arm}" if len(sizes) > 1 else ""
    return (
        f"the smallest difference in {word} that would have been shown with 80 % power is {sizes[0]}{by_mode}, and half of that"
        f" takes {takes} if the spread stays as it is{f'; {none}' if never else ''}"
    )


def _sureness(comparison: Comparison, behind: str) -> str:
    """`3 seeds, so only large differences can be shown; an accuracy is of 512 fresh prompts a seed; p < 5 % ...`"""
    counts = sorted({pair.test.difference.n for pair in _all_pairs(comparison) if _is_tested(pair)})
    seeds = (
        plural(counts[-1], "seed")
        if len(counts) == 1
        else f"{counts[0]} to {counts[-1]} seeds, by outcome and {comparison.arm}"
    )
    seeds = seeds if comparison.paired else _runs(comparison)
    few = ", so few that only large differences can be shown" if counts[-1] <= FEW_SEEDS else ""
    if not comparison.paired:
        few += "; they are not paired, since their seeds are not known to be the same"
    corrected = f", corrected by Holm over all {comparison.tests} tests," if comparison.tests > 1 else ""
    of = f"; accuracy at equal steps is of {behind}" if behind else ""
    test = "paired t-test" if comparison.paired else "Welch t-test"
    return f"{seeds}{few}{of}; a difference is shown where the p of its {test}{corrected} is below 5 %."


def _runs(comparison: Comparison) -> str:
    """`3 runs an arm`, or `3 to 5 runs an arm`: of arms that are not paired."""
    counts = sorted({len(one.values) for of in comparison.outcomes.values() for one in of.values()})
    return f"{plural(counts[0], 'run') if len(counts) == 1 else f'{counts[0]} to {counts[-1]} runs'} an arm"


def _can_tell(pair: Pair | None) -> bool:
    """Whether a pair that was tested has anything to tell by: its differences are not 0 in all seeds."""
    return pair is not None and pair.test.p is not None and bool(pair.test.std or pair.test.difference.mean)


def _is_tested(pair: Pair | None) -> bool:
    return pair is not None and pair.test.p is not None


def _pairs(comparison: Comparison, outcome: str) -> dict[str, Pair]:
    return {label: one.pair for label, one in comparison.outcomes[outcome].items() if one.pair is not None}


def _all_pairs(comparison: Comparison) -> Iterable[Pair]:
    return (pair for name in comparison.outcomes for pair in _pairs(comparison, name).values())


def _size(pair: Pair) -> str:
    """`+0.001 [-0.003, +0.005]`."""
    found = pair.test.difference
    bounds = "" if found.low is None or found.high is None else f" [{signed(found.low, 3)}, {signed(found.high, 3)}]"
    return f"{signed(found.mean, 3)}{bounds}"


def _few(labels: Sequence[str]) -> list[str]:
    """The labels, the rest of many as a number."""
    return list(labels) if len(labels) <= _MOST + 1 else [*labels[:_MOST], f"{len(labels) - _MOST} more"]
