"""The newest release of a framework, read for what its rules are there; read and not run.

Source: the packages on PyPI on the day named, the code of their loss beside each rule's formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aggcli.rules.rule import Rule

READ_ON = "2026-12-01"
"""The day on which these releases were the newest on PyPI."""


@dataclass(frozen=True)
class Release:
    """A framework's newest release. `is_same`: whether it weighs tokens as the rule says; `says`: what was found there besides,
    and where it is not the same, what there is instead."""

    package: str
    version: str
    is_same: bool = True
    says: str = ""

    @property
    def words(self) -> str:
        """`ms-swift 4.6.0 on 2026-12-01 (read, not run): the policy loss is aggregated the same`."""
        how = f"the same{'; ' * bool(self.says)}" if self.is_same else "otherwise: "
        return f"{self.package} {self.version} on {READ_ON} (read, not run): the policy loss is aggregated {how}{self.says}"


_UNSLOTH = Release("unsloth-zoo", "2026.10.9", says="its chunked path was not read")
_TUNIX = "the quotient is taken in each call, whose own tokens and rows are counted"
RELEASES: dict[str, Release] = {
    "trl": Release("trl", "1.16.0"),
    "trl-sdpo": Release("trl", "1.16.0"),
    "verl": Release("verl", "0.9.1"),
    "torchrl": Release("torchrl", "0.14.1"),
    "openrlhf": Release("openrlhf", "0.11.2", says="dynamic batches were not read"),
    "skyrl": Release("skyrl", "0.4.0"),
    "areal": Release("areal", "1.0.4", says="a step without a trained token stops with an error"),
    "rlinf": Release("rlinf", "0.3.0", says="read for the FSDP worker, which divides by the accumulation steps"),
    "axolotl": Release("axolotl", "0.21.0", says="read for async training"),
    "axolotl:dapo": Release(
        "axolotl",
        "0.21.0",
        is_same=False,
        says="T counts every response token of what was generated at once, also those that a mask leaves out; else the same;"
        " read for async training",
    ),
    "unsloth": _UNSLOTH,
    "unsloth:dapo": Release("unsloth-zoo", "2026.10.9", is_same=False, says="T is at least 1; else the same"),
    "ms-swift": Release("ms-swift", "4.6.0", says="the Megatron backend was not read"),
    "ms-swift:dapo": Release(
        "ms-swift",
        "4.6.0",
        is_same=False,
        says="sum_t l_t / T, since the loss is multiplied by the accumulation steps before the trainer divides by them; T still"
        " counts the tokens that overlong_filter masks; the Megatron backend was not read",
    ),
    "cosmos-rl": Release(
        "cosmos-rl",
        "0.4.7",
        is_same=False,
        says="sum l_t / (T + 1e-8) of the call, T over all ranks with balance_dp_token, and nothing keeps T at 1; it has"
        " seq-mean-token-mean, seq-mean-token-sum and token-sum besides, which are no rules here",
    ),
    "tunix": Release("google-tunix", "0.1.7", is_same=False, says=_TUNIX),
    "tunix:sequence-mean-token-sum-norm": Release(
        "google-tunix", "0.1.7", is_same=False, says=f"rows without a trained token are not counted, and {_TUNIX}"
    ),
    "agent-lightning": Release(
        "agentlightning",
        "1.0.2",
        is_same=False,
        says="1/B sum_r [ sum_(t in r) l_t / n_r ], B rows of the batch before it is cut into optimizer steps: the same where"
        " each rollout is one row and the batch one step",
    ),
}
"""By the name of a rule, or of all a framework's other rules. A framework that is not here was not read in a release."""


def newest_release(rule: Rule) -> str:
    """The newest release of the rule's framework on PyPI and what the rule is there, in words; blank where none was read."""
    release = RELEASES.get(rule.name, RELEASES.get(rule.framework))
    if release is None:
        return ""
    if re.split("[;, ]", rule.version)[0] == release.version:
        return f"{release.package} {release.version} on {READ_ON}, which is the version named"
    return release.words
