"""How is the per-token policy loss averaged, and did my parallel layout change it?

    import aggcli

    aggcli.replay("dumps/*.pt")                            # recorded rollouts under every mode and layout
    aggcli.audit(rules=["token_mean", "trl:bnpo"])         # which rules a layout changes, and why
    trained = aggcli.train(seeds=3, steps=50)              # small loops, modes x seeds as one stack
    aggcli.gradients("dumps/*.jsonl", model="a/model")      # what each mode does to the parameters of a model
    aggcli.compare(trained.directory)                      # what differs, by how much, how sure
    aggcli.plot(trained.directory, html=True)              # figures and one page to send
    aggcli.advantage_factors(lengths, groups, mode="prompt_mean", under="trl:dapo")  # a mode in a trainer that has another

Nothing is imported before it is used, so `import aggcli` is free of torch and pandas.

Words, each for one thing:

    rule            one way to aggregate the policy loss, a weight per token (`aggcli.rules.Rule`)
    mode            one of this project's own rules; frameworks and papers have rules too
    scope           where a rule counts what it divides by: the step, the rank, the micro-batch
    layout          how an optimizer step is spread over ranks and micro-batches, as asked for: dp2:balanced:mb4
    schedule        what a layout makes of one step: integers only
    rollout         one sampled response, of one or several training samples; group: the rollouts of one prompt
    trained token   a response token whose loss mask is 1
    step            one optimizer step; a rollout step may hold several
    report          the numbers of one step under every rule and layout
    run             one rule and seed, trained or replayed; stack: runs that train as one batch
    results         a directory of records: of one run, or of a comparison of several
    metric          a number of the catalogue (`aggcli.measurement.catalogue`); outcome: what runs are compared by
    figure          a drawing; verdict: what a comparison says in words
    job             what a command does (`aggcli.jobs`); result: what a job returns
    share           the runs of a stack that one process trains

Axis letters at the end of a tensor's name, the same in every file:

    S  training samples             T  tokens, flat, sample after sample (of a batch: response tokens)
    U  prompt and response tokens   G  rollouts, each once
    P  prompts (prompt groups)      R  runs of a stack
    B  rows of a micro-batch        L  positions of a row: of the prompt, the response or both
    C  response columns             V  vocabulary
    D  width of the policy          H  heads, d = D / H, X = 3 * D
    W  positions of a chunk         Q  numbers of a run's parameters
    N  prefixes of sampled rows     K  what stands beside it says: keys, digits, response tokens before a split
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aggcli.version import __version__

if TYPE_CHECKING:
    from aggcli.interface import advantage_factors, audit, compare, gradients, load_results, plot, read_rollouts, replay, train

__all__ = [
    "__version__",
    "advantage_factors",
    "audit",
    "compare",
    "gradients",
    "load_results",
    "plot",
    "read_rollouts",
    "replay",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aggcli' has no attribute '{name}'")
    from aggcli import interface

    return getattr(interface, name)


def __dir__() -> list[str]:
    return sorted(__all__)
