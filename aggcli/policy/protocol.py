"""What a policy is: what it does. The training loop, the sampler and the evaluation know nothing else of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from aggcli.tasks.chance import SAMPLING, uniform
from aggcli.world import ALONE, World


@dataclass(frozen=True)
class Noise:
    """The noise of rows `first` to `first + count - 1` of a rollout step, of runs of these seeds: row i of a seed depends on
    (seed, step, i) alone."""

    seeds: tuple[int, ...]
    step: int
    first: int
    count: int

    def rows(self, start: int, end: int) -> Noise:
        """The noise of some of these rows."""
        return Noise(self.seeds, self.step, self.first + start, end - start)

    def uniforms(self, length: int) -> Tensor:
        """One number for each (run, row, position): float64 [R, B, length] in [0, 1), on the CPU. A longer `length` only
        appends."""
        index_B = torch.arange(self.first, self.first + self.count)
        found = {seed: uniform(seed, SAMPLING, self.step, index_B, length) for seed in dict.fromkeys(self.seeds)}
        return torch.stack([found[seed] for seed in self.seeds])


@dataclass(frozen=True, eq=False)
class Sampled:
    """Responses, right-padded to the longest: `tokens_RBL` ids (`pad_id` after the end), `length_RB` with the end token,
    `log_probs_RBL` in nats at the sampling temperature (0 after the end), `truncated_RB` true where no end token came."""

    tokens_RBL: Tensor
    length_RB: Tensor
    log_probs_RBL: Tensor
    truncated_RB: Tensor

    @staticmethod
    def none(runs: int) -> Sampled:
        """Of a rank without rows."""
        tokens_RBL, of_row_RB = torch.zeros(runs, 0, 1, dtype=torch.int64), torch.zeros(runs, 0, dtype=torch.int64)
        return Sampled(tokens_RBL, of_row_RB, tokens_RBL.double(), of_row_RB.bool())


def joined_runs(parts: list[Sampled], pad_id: int) -> Sampled:
    """The runs of all parts, padded to the longest."""
    width = max(part.tokens_RBL.shape[-1] for part in parts)

    def together(name: str, padding: float) -> Tensor:
        values = [getattr(part, name) for part in parts]
        return torch.cat([pad(value, (0, width - value.shape[-1]), value=padding) for value in values])

    return Sampled(
        together("tokens_RBL", pad_id),
        torch.cat([part.length_RB for part in parts]),
        together("log_probs_RBL", 0.0),
        torch.cat([part.truncated_RB for part in parts]),
    )


CONVERTED_AT_ONCE = 2**20
"""Numbers whose norm is taken together, in a copy of a wider type."""


@dataclass(frozen=True)
class Shards:
    """Where the Q numbers of a run are: each rank of `world` holds a part of them; in a world of one every rank holds all."""

    world: World = ALONE

    def norm(self, value_RQ: Tensor) -> Tensor:
        """The 2-norm of all numbers of each run, float64 [R]; of this rank's part, given by every rank."""
        held = torch.empty(min(value_RQ.shape[1], CONVERTED_AT_ONCE), dtype=torch.float64, device=value_RQ.device)
        norms = []
        for part in (part for value_Q in value_RQ for part in value_Q.split(CONVERTED_AT_ONCE)):
            wide = held[: part.numel()].copy_(part)
            norms.append(torch.linalg.vector_norm(wide))
        return self._joined(torch.linalg.vector_norm(torch.stack(norms).view(len(value_RQ), -1), dim=1))

    def _joined(self, norm_R: Tensor) -> Tensor:
        """The norm of all numbers, from that of each rank's part."""
        if self.world.size == 1:
            return norm_R
        return torch.linalg.vector_norm(torch.stack(self.world.tensors(norm_R)), dim=0)

    def finite(self, value_RQ: Tensor, norm_R: Tensor | None = None) -> Tensor:
        """Whether all numbers of a run are finite, bool [R] on the CPU: their norm is, unless it overflows. `norm_R`: theirs,
        where it is known."""
        if norm_R is None:
            norm_R = self._joined(torch.linalg.vector_norm(value_RQ, dim=1))
        finite_R = torch.isfinite(norm_R)
        if not finite_R.all():
            own_R = torch.isfinite(value_RQ).all(1).double()
            finite_R = torch.stack(self.world.tensors(own_R)).amin(0) > 0
        return finite_R.cpu()


class Pass(Protocol):
    """Some runs of a stack, whose rows go through one forward pass together."""

    @property
    def runs(self) -> slice:
        """Which runs of the stack."""
        ...

    def log_probs(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies [R, B, C] in nats of the response tokens of right-padded rows of prompt (`prompt_RB`
        tokens) and response (`length_RB`), at the sampling temperature, and which of them this context-parallel rank has
        computed (None: all). Differentiable, unless gradients are switched off."""
        ...

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_first: bool = False, is_last: bool = True) -> None:
        """Add d loss / d parameters of these runs to their rows of the stack's gradient [R, Q]. `loss`: a weighted sum of what
        `log_probs` has given, one number for all the runs; `is_first`: these rows are 0 yet; `is_last`: no further gradient is
        taken through the same log-probabilities.

        Where parameters are cut into shards, the gradient is at once the sum of all ranks' losses."""
        ...


class Policy(Protocol):
    """The parameters of R runs, what they sample and how they learn. Every rank holds all their numbers, or its part of them:
    Q is how many this rank holds of a run. Where it holds a part, every rank calls the same methods in the same order."""

    @property
    def shards(self) -> Shards:
        """Where the numbers of a run are."""
        ...

    @property
    def flat_RQ(self) -> Tensor:
        """The parameters that this rank holds, in the order of the gradient's."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of gradients and of per-token numbers."""
        ...

    @property
    def fewest_apart(self) -> int | None:
        """How many rows without a gradient are worth a pass of their own, that takes none; None where every rank must make the
        same passes."""
        ...

    def threads(self) -> AbstractContextManager[None]:
        """The threads of torch's operations on this policy."""
        ...

    def sample(
        self, prompts_RPL: Tensor, prompt_length_RP: Tensor, noise: Noise, limit: int, *, end_id: int, pad_id: int
    ) -> Sampled:
        """One response of at most `limit` tokens for each row of the noise, on the CPU; row b continues prompt `b // (B // P)`
        of its run, whose ids are the first `prompt_length_RP` of its (right-padded) row. A rank without rows calls it too."""
        ...

    def passes(self, *, reference: bool = False) -> Iterator[Pass]:
        """All runs, as many at a time as go through one pass; `reference`: the policy that they all began as."""
        ...

    def no_gradient(self) -> Tensor:
        """A gradient of zeros, [R, Q]."""
        ...

    def summed(self, gradient_RQ: Tensor, world: World) -> Tensor:
        """The sum over the ranks of a world of what each has added to its gradient, on every rank."""
        ...

    def step(self, gradient_RQ: Tensor, norm_R: Tensor, stepping_R: Tensor) -> None:
        """Take an optimizer step, which may clip the gradient in its place; runs that are not `stepping` stay as they are, to
        the bit. `norm_R`: see `Shards.norm`."""
        ...

    def sizes(self) -> dict[str, int]:
        """The parameters of one run by name, in the order of [Q]: how many numbers each has."""
        ...

    def keep(self, runs_R: Tensor) -> None:
        """Go on with these runs (positions) only."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit, each [R, ...]; what this rank holds a part of is a `DTensor`."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of as many runs."""
        ...


class Start(Protocol):
    """Where every run of a stack begins."""

    @property
    def is_small(self) -> bool:
        """Whether shares of the runs can be trained side by side on one machine, each on one thread."""
        ...

    def on(self, device: torch.device) -> Start:
        """The same beginning on a device."""
        ...

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        ...

    def stack(self, lr: Sequence[float], world: World) -> Policy:
        """As many runs as there are learning rates, each with parameters of its own. With context parallelism every rank of the
        world must call it."""
        ...
