"""For other projects' test suites: does a reducer give the same gradient however the step is cut?

from aggcli.testing import assert_layout_invariant

def test_my_loss_does_not_depend_on_the_layout():
    assert_layout_invariant(my_reducer)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from aggcli.auditing import CustomRule, diagnose, reducer_rule, smallest_counterexample
from aggcli.auditing.reducers import Signature


def assert_layout_invariant(
    reducer: Callable[..., Any],
    *,
    signature: Signature | None = None,
    ranks: Literal["mean", "sum"] | None = None,
    divisor: float | None = None,
    uneven: bool = False,
    tolerance: float = 1e-6,
) -> None:
    """Raise `AssertionError`, with every fault and the smallest counterexample, unless the reducer's weights are layout-proof.

    `reducer`: slime's `(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)`, a masked matrix
    `(loss_BT, mask_BT, **counts)` (`aggcli.auditing.reducers.COUNTS` lists the counts it may ask for), or `(loss_T)` alone; it
    is called once per micro-batch. `ranks`: whether your framework averages ranks (the matrix form's default) or sums them.
    `divisor`: offered as `loss_scale_factor` and `max_completion_length`, in tokens. `uneven`: also refuse a reducer that is
    exact for equal micro-batches only. `tolerance`: relative, on each token's weight.

    Raises `SettingError` (a ValueError) when the signature cannot be recognised.
    """
    rule = reducer_rule(reducer, signature, ranks=ranks, divisor=divisor)
    findings = diagnose(rule)
    equal_only = not uneven and any(finding.kind == "needs equal micro-batches" for finding in findings)
    faults = [str(f) for f in findings if f.fault or (uneven and f.kind == "needs equal micro-batches")]
    broken = {"fails", "not linear", "not finite"} & {f.kind for f in findings}
    found = None if broken else smallest_counterexample(CustomRule(rule, equal_only=equal_only), tolerance)
    if faults or found is not None:
        lines = [f"{rule.name} is not layout-invariant" if found else f"{rule.name} cannot be trusted as a reducer"]
        lines += [f"  - {fault}" for fault in faults]
        if found is not None:
            lines.append(f"  smallest counterexample: {found}")
        raise AssertionError("\n".join(lines))
