"""A Hugging Face causal language model as a policy: one module, and the trained parameters of every run beside it.

Its trained parameters are views of one row of a flat [R, Q] tensor: the run in hand is the one that they look at. So a stack of
runs shares the module (with LoRA all that is frozen of it), the optimizer and the checkpoints of the small policies. Dropout is
off: the log-probabilities of a rollout are those of the policy that sampled it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.errors import SettingError
from aggcli.policy.chunked import chunked_log_probs
from aggcli.policy.generation import generate, keys_of
from aggcli.policy.packing import cuts
from aggcli.policy.protocol import Noise, Pass, Sampled, Shards, joined_runs
from aggcli.policy.weights import Optimizer
from aggcli.world import ALONE, World

BIN_COST = 60
"""What one more pass of a model costs, counted in tokens."""
TOO_LITTLE_MEMORY = (
    "lower --micro-batch-size or --max-tokens-per-gpu, --rollout-batch-size or --max-response-length, name fewer --modes, or"
    " give --gradient-checkpointing, --lora-rank or --optimizer sgd"
)


@dataclass(frozen=True, eq=False)
class CausalStart:
    """`module`: the model, on the device; `initial_Q`: its trained parameters as they are before training, flat; `sampled`:
    what they have sampled, which every run begins with: modes of a seed sample their first rollouts once."""

    module: Any
    initial_Q: Tensor
    config: RunConfig
    sampled: dict[tuple[Any, ...], Sampled] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        return False

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        return contextlib.nullcontext()

    def on(self, device: torch.device) -> CausalStart:
        """See `Start.on`."""
        return dataclasses.replace(self, module=self.module.to(device), initial_Q=self.initial_Q.to(device))

    def stack(self, lr: Sequence[float], world: World) -> CausalPolicy:
        """See `Start.stack`."""
        return CausalPolicy(self, lr)


def causal_start(module: Any, config: RunConfig) -> CausalStart:
    """A model whose trained parameters are those that require a gradient. Raises `SettingError` for a model whose logits are
    not a projection of its last hidden states."""
    start = CausalStart(module, torch.cat([value.detach().flatten() for value in trained(module).values()]), config)
    need_known_logits(module)
    return start


def trained(module: Any) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


class CausalPolicy:
    """See `Policy`. `flat_RQ`: the trained parameters of each run."""

    def __init__(self, start: CausalStart, lr: Sequence[float], shards: Shards = Shards()) -> None:
        self.start, self.shards = start, shards
        self.flat_RQ = start.initial_Q.repeat(len(lr), 1)
        self.optimizer = Optimizer(self.flat_RQ, lr, start.config.training)

    @property
    def device(self) -> torch.device:
        return self.flat_RQ.device

    @property
    def dtype(self) -> torch.dtype:
        return self.flat_RQ.dtype

    @property
    def fewest_apart(self) -> int | None:
        """See `Policy.fewest_apart`."""
        return 1 if self.shards.world.size == 1 else None

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        return self.start.threads()

    def sample(
        self, prompts_RPL: Tensor, prompt_length_RP: Tensor, noise: Noise, limit: int, *, end_id: int, pad_id: int
    ) -> Sampled:
        """See `Policy.sample`."""
        if noise.count:
            need_context(self.start.module, int(prompt_length_RP.max()) + limit)
        parts, cached = [], self.start.sampled
        for run, value_Q in enumerate(self.flat_RQ):
            prompts_PL, length_P = prompts_RPL[run], prompt_length_RP[run]
            asked = (
                noise.seeds[run],
                noise.step,
                noise.first,
                noise.count,
                limit,
                *length_P.tolist(),
                *prompts_PL.flatten().tolist(),
            )
            changed, missing = self.shards.world.max(
                [not torch.equal(value_Q, self.start.initial_Q), asked not in cached]
            )  # a rank that samples needs the parts of all
            if changed or missing:
                found = self._generated(value_Q, prompts_PL, length_P, keys_of(noise, run), limit, end_id, pad_id)
            else:
                found = cached[asked]
            if not changed:
                cached[asked] = found
            parts.append(found)
        return joined_runs(parts, pad_id)

    def _generated(
        self, value_Q: Tensor, prompts_PL: Tensor, length_P: Tensor, key_B: Tensor, limit: int, end_id: int, pad_id: int
    ) -> Sampled:
        temperature = self.start.config.training.temperature
        with self._whole(value_Q) as module, told_memory(), self._autocast():
            if not len(key_B):
                return Sampled.none(1)
            prompts = prompts_PL.to(self.device), length_P.to(self.device)
            return generate(
                module, *prompts, key_B.to(self.device), limit, end_id=end_id, pad_id=pad_id, temperature=temperature
            )

    @contextlib.contextmanager
    def _whole(self, value_Q: Tensor) -> Iterator[Any]:
        """The model with these numbers, to be sampled from."""
        _hold(self.start.module, value_Q)
        yield self.start.module

    def passes(self, *, reference: bool = False) -> Iterator[Pass]:
        """See `Policy.passes`: one run at a time."""
        for run in range(len(self.flat_RQ)):
            _hold(self.start.module, self.start.initial_Q if reference else self.flat_RQ[run])
            yield _OneRun(slice(run, run + 1), self.start.module, self.start.config, self.dtype, self._autocast())

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.start.config.dtype == "bfloat16")

    def no_gradient(self) -> Tensor:
        """See `Policy.no_gradient`."""
        return torch.zeros_like(self.flat_RQ)

    def summed(self, gradient_RQ: Tensor, world: World) -> Tensor:
        """See `Policy.summed`."""
        return world.add_up(gradient_RQ)

    def step(self, gradient_RQ: Tensor, norm_R: Tensor, stepping_R: Tensor) -> None:
        """See `Policy.step`."""
        with told_memory():
            self.optimizer.step(self.flat_RQ, gradient_RQ, norm_R, stepping_R.tolist())

    def sizes(self) -> dict[str, int]:
        """See `Policy.sizes`."""
        return {name: shape.numel() for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, torch.Size]:
        """Of what this rank holds of each trained parameter."""
        return {name: value.shape for name, value in trained(self.start.module).items()}

    def keep(self, runs_R: Tensor) -> None:
        """See `Policy.keep`."""
        if len(runs_R) == len(self.flat_RQ):
            return
        self.flat_RQ = self.flat_RQ[runs_R.to(self.device)]
        self.optimizer.keep(runs_R.to(self.device))

    def state(self) -> dict[str, Tensor]:
        """See `Policy.state`: what is as large as the parameters is cut into them, the same however many ranks hold it."""
        found: dict[str, Tensor] = {}
        for name, value in self._held().items():
            if value.dim() < 2:
                found[name] = value
                continue
            parts = value.split([shape.numel() for shape in self._shapes().values()], 1)
            for (parameter, shape), part in zip(self._shapes().items(), parts, strict=True):
                found[f"{name}.{parameter}"] = self._to_state(parameter, part.view(len(value), *shape))
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Policy.load`."""
        loaded: dict[str, Tensor] = {}
        for name, value in self._held().items():
            if value.dim() < 2:
                loaded[name] = state[name].to(self.device)
                continue
            parts = [self._from_state(state[f"{name}.{parameter}"]).flatten(1) for parameter in self._shapes()]
            loaded[name] = torch.cat(parts, 1).to(self.device)
        self.flat_RQ.copy_(loaded.pop("parameters"))
        self.optimizer.load({name.removeprefix("optimizer."): value for name, value in loaded.items()})

    def _held(self) -> dict[str, Tensor]:
        return {"parameters": self.flat_RQ, **{f"optimizer.{name}": it for name, it in self.optimizer.state().items()}}

    def _to_state(self, parameter: str, value_RX: Tensor) -> Tensor:
        """What this rank holds of a parameter, as it stands in a state."""
        return value_RX

    def _from_state(self, value_RX: Tensor) -> Tensor:
        """What this rank holds of a parameter that stands in a state."""
        return value_RX


@torch.no_grad()
def _hold(module: Any, value_Q: Tensor) -> None:
    """Let the module's trained parameters be views of these numbers."""
    start = 0
    for value in trained(module).values():
        value.data = value_Q[start : start + value.numel()].view(value.shape)
        start += value.numel()


@dataclass(frozen=True, eq=False)
class _OneRun:
    """See `Pass`."""

    runs: slice
    module: Any
    config: RunConfig
    dtype: torch.dtype
    autocast: AbstractContextManager[Any]

    def log_probs(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        with told_memory(), self.autocast:
            found = row_log_probs(
                self.module,
                tokens_RBL[0],
                prompt_RB[0],
                length_RB[0],
                self.dtype,
                temperature=self.config.training.temperature,
                entropy_gradient=bool(self.config.objective.entropy_coef),
            )
        return found[0][None], found[1][None], None

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_first: bool = False, is_last: bool = True) -> None:
        mine_Q, start, by = gradient_RQ[self.runs.start], 0, list(trained(self.module).values())
        with told_memory():
            for part in torch.autograd.grad(loss, by, retain_graph=not is_last, allow_unused=True, materialize_grads=True):
                own_N = mine_Q[start : start + part.numel()]
                own_N.copy_(part.flatten()) if is_first else own_N.add_(part.flatten())
                start += part.numel()


def row_log_probs(
    module: Any,
    tokens_BL: Tensor,
    prompt_B: Tensor,
    length_B: Tensor,
    dtype: torch.dtype,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    world: World = ALONE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token of right-padded rows of prompt and response, and the entropy there, [B, C]; 0 past
    the end of a response.

    Rows go through the model sorted by length, in bins padded to their longest, so that padding costs little; a causal model
    needs no mask for padding that stands behind. Only places that predict a response token are projected to the vocabulary.
    The ranks of `world` run the model equally often, as they must where each holds a part of it: some on a token of no row.
    """
    device = next(module.parameters()).device
    total_B = torch.where(length_B > 0, prompt_B + length_B, 0)
    order_B = total_B.argsort(stable=True)
    columns = max(int(length_B.max()), 1)
    column_C = torch.arange(columns)
    hidden, targets, places = [], [], []
    bins = cuts(total_B[order_B].numpy(), BIN_COST)
    bins += [(0, 0)] * (int(world.max([float(len(bins))])[0]) - len(bins))
    for start, end in bins:
        rows_b = order_B[start:end]
        width = int(total_B[rows_b].max()) if end else 1
        tokens_bl = (tokens_BL[rows_b, :width] if end else tokens_BL.new_zeros(1, 1)).to(device)
        hidden_blD = body(module)(input_ids=tokens_bl, use_cache=False).last_hidden_state
        valid_bC = column_C < length_B[rows_b, None]
        row, column = valid_bC.nonzero(as_tuple=True)
        place = prompt_B[rows_b][row] + column
        hidden.append(hidden_blD[row.to(device), (place - 1).to(device)])
        targets.append(tokens_BL[rows_b[row], place])
        places.append(torch.stack([rows_b[row], column]))
    if not hidden:
        nothing = torch.zeros(len(tokens_BL), columns, dtype=dtype, device=device)
        return nothing, nothing
    log_prob_T, entropy_T = chunked_log_probs(
        lambda hidden_TD: project(module, hidden_TD),
        torch.cat(hidden),
        torch.cat(targets).to(device),
        vocabulary_of(module),
        dtype,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )
    row_T, column_T = torch.cat(places, 1).to(device)
    zeros = torch.zeros(len(tokens_BL), columns, dtype=dtype, device=device)
    return zeros.index_put((row_T, column_T), log_prob_T), zeros.index_put((row_T, column_T), entropy_T)


def body(module: Any) -> Any:
    """The model without its vocabulary projection."""
    return getattr(module, module.base_model_prefix)


def project(module: Any, hidden_TD: Tensor) -> Tensor:
    """Hidden states [..., D] -> logits [..., V], with what a model may do to them."""
    config = module.config.get_text_config()
    logits = module.get_output_embeddings()(hidden_TD)
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def vocabulary_of(module: Any) -> int:
    """Entries of the vocabulary projection, padding entries among them."""
    return module.get_output_embeddings().weight.shape[0]


def need_context(module: Any, length: int) -> None:
    """Raise `SettingError` where the model cannot hold rows of so many tokens."""
    most = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most:
        raise SettingError(
            f"prompt and response have up to {length} tokens together, and the model holds {most}; lower --max-response-length"
            " or give shorter prompts"
        )


def need_known_logits(module: Any) -> None:
    """The logits of two tokens by the model itself and by `project` must be the same."""
    ids_BL = torch.tensor([[0, 1]], device=next(module.parameters()).device)
    with torch.no_grad():
        own = module(input_ids=ids_BL, use_cache=False).logits
        made = project(module, body(module)(input_ids=ids_BL, use_cache=False).last_hidden_state)
    if own.shape != made.shape or not torch.allclose(own.float(), made.float(), rtol=1e-4, atol=1e-4):
        kind = type(module).__name__
        raise SettingError(f"--model: {kind} makes its logits in a way of its own, which aggcli does not know; give another")


@contextlib.contextmanager
def told_memory() -> Iterator[None]:
    """An error of the device's memory in one line, with what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise SettingError(f"the device has too little memory ({first}); {TOO_LITTLE_MEMORY}") from error
