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
from aggcli.policy.protocol import Noise, Sampled, all_finite, joined_runs
from aggcli.policy.weights import Optimizer
from aggcli.world import World

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
    trained = _trained(module)
    start = CausalStart(module, torch.cat([value.detach().flatten() for value in trained]), config)
    _need_known_logits(module)
    return start


def _trained(module: Any) -> list[Tensor]:
    return [value for value in module.parameters() if value.requires_grad]


class CausalPolicy:
    """See `Policy`. `flat_RQ`: the trained parameters of each run."""

    def __init__(self, start: CausalStart, lr: Sequence[float]) -> None:
        self.start = start
        self.flat_RQ = start.initial_Q.repeat(len(lr), 1)
        self.optimizer = Optimizer(self.flat_RQ, lr, start.config.training)

    @property
    def device(self) -> torch.device:
        return self.flat_RQ.device

    @property
    def dtype(self) -> torch.dtype:
        return self.flat_RQ.dtype

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        return self.start.threads()

    def sample(
        self, prompts_RPL: Tensor, prompt_length_RP: Tensor, noise: Noise, limit: int, *, end_id: int, pad_id: int
    ) -> Sampled:
        """See `Policy.sample`."""
        need_context(self.start.module, int(prompt_length_RP.max()) + limit)
        parts = []
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
            is_initial = torch.equal(value_Q, self.start.initial_Q)
            found = self.start.sampled.get(asked) if is_initial else None
            if found is None:
                found = self._generated(value_Q, prompts_PL, length_P, keys_of(noise, run), limit, end_id, pad_id)
            if is_initial:
                self.start.sampled[asked] = found
            parts.append(found)
        return joined_runs(parts, pad_id)

    def _generated(
        self, value_Q: Tensor, prompts_PL: Tensor, length_P: Tensor, key_B: Tensor, limit: int, end_id: int, pad_id: int
    ) -> Sampled:
        module, temperature = self.start.module, self.start.config.training.temperature
        _hold(module, value_Q)
        with _told_memory(), self._autocast():
            prompts = prompts_PL.to(self.device), length_P.to(self.device)
            return generate(
                module, *prompts, key_B.to(self.device), limit, end_id=end_id, pad_id=pad_id, temperature=temperature
            )

    def passes(self, *, reference: bool = False) -> Iterator[_OneRun]:
        """See `Policy.passes`: one run at a time."""
        for run in range(len(self.flat_RQ)):
            _hold(self.start.module, self.start.initial_Q if reference else self.flat_RQ[run])
            yield _OneRun(slice(run, run + 1), self.start.module, self.start.config, self.dtype, self._autocast())

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.start.config.dtype == "bfloat16")

    def no_gradient(self) -> Tensor:
        """See `Policy.no_gradient`."""
        return torch.zeros_like(self.flat_RQ)

    def step(self, gradient_RQ: Tensor, stepping_R: Tensor) -> Tensor:
        """See `Policy.step`."""
        with _told_memory():
            return self.optimizer.step(self.flat_RQ, gradient_RQ, stepping_R.to(self.device))

    def sizes(self) -> dict[str, int]:
        """See `Policy.sizes`."""
        named = self.start.module.named_parameters()
        return {name: value.numel() for name, value in named if value.requires_grad}

    def finite(self) -> Tensor:
        """See `Policy.finite`."""
        return all_finite(self.flat_RQ).cpu()

    def keep(self, runs_R: Tensor) -> None:
        """See `Policy.keep`."""
        if len(runs_R) == len(self.flat_RQ):
            return
        self.flat_RQ = self.flat_RQ[runs_R.to(self.device)]
        self.optimizer.keep(runs_R.to(self.device))

    def state(self) -> dict[str, Tensor]:
        """See `Policy.state`."""
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return {"parameters": self.flat_RQ, **moments}

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Policy.load`."""
        self.flat_RQ.copy_(state["parameters"])
        moments = {name.removeprefix("optimizer."): value for name, value in state.items() if "." in name}
        self.optimizer.load({name: value.to(self.device) for name, value in moments.items()})


@torch.no_grad()
def _hold(module: Any, value_Q: Tensor) -> None:
    """Let the module's trained parameters be views of these numbers."""
    start = 0
    for value in _trained(module):
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
        with _told_memory(), self.autocast:
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

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_last: bool = True) -> None:
        mine_Q, start, trained = gradient_RQ[self.runs.start], 0, _trained(self.module)
        with _told_memory():
            for part in torch.autograd.grad(loss, trained, retain_graph=not is_last, allow_unused=True, materialize_grads=True):
                mine_Q[start : start + part.numel()] += part.flatten()
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
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token of right-padded rows of prompt and response, and the entropy there, [B, C]; 0 past
    the end of a response.

    Rows go through the model sorted by length, in bins padded to their longest, so that padding costs little; a causal model
    needs no mask for padding that stands behind. Only places that predict a response token are projected to the vocabulary.
    """
    device = next(module.parameters()).device
    total_B = torch.where(length_B > 0, prompt_B + length_B, 0)
    order_B = total_B.argsort(stable=True)
    columns = max(int(length_B.max()), 1)
    column_C = torch.arange(columns)
    hidden, targets, places = [], [], []
    for start, end in cuts(total_B[order_B].numpy()):
        rows_b = order_B[start:end]
        width = int(total_B[rows_b].max())
        tokens_bl = tokens_BL[rows_b, :width].to(device)
        hidden_blD = _body(module)(input_ids=tokens_bl, use_cache=False).last_hidden_state
        valid_bC = column_C < length_B[rows_b, None]
        row, column = valid_bC.nonzero(as_tuple=True)
        place = prompt_B[rows_b][row] + column
        hidden.append(hidden_blD[row.to(device), (place - 1).to(device)])
        targets.append(tokens_BL[rows_b[row], place])
        places.append(rows_b[row] * columns + column)
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
    at_T = torch.cat(places).to(device)
    zeros = torch.zeros(len(tokens_BL) * columns, dtype=dtype, device=device)
    shape = (len(tokens_BL), columns)
    return zeros.index_put((at_T,), log_prob_T).view(shape), zeros.index_put((at_T,), entropy_T).view(shape)


def _body(module: Any) -> Any:
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


def _need_known_logits(module: Any) -> None:
    """The logits of two tokens by the model itself and by `project` must be the same."""
    ids_BL = torch.tensor([[0, 1]], device=next(module.parameters()).device)
    with torch.no_grad():
        own = module(input_ids=ids_BL, use_cache=False).logits
        made = project(module, _body(module)(input_ids=ids_BL, use_cache=False).last_hidden_state)
    if own.shape != made.shape or not torch.allclose(own.float(), made.float(), rtol=1e-4, atol=1e-4):
        kind = type(module).__name__
        raise SettingError(f"--model: {kind} makes its logits in a way of its own, which aggcli does not know; give another")


@contextlib.contextmanager
def _told_memory() -> Iterator[None]:
    """An error of the device's memory in one line, with what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise SettingError(f"the device has too little memory ({first}); {TOO_LITTLE_MEMORY}") from error
