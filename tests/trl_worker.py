"""Steps of TRL's own GRPOTrainer on a tiny random Llama, each beside the gradient of the mode's closed form.

    python -m tests.trl_worker CASES.json FOLDER

CASES.json: a list of cases (the fields of `Case`). Rank 0 prints a JSON list of what was found; `RANK` and `WORLD_SIZE` are as
torchrun sets them. The second route shares nothing with the integration: one sample at a time through a copy of the model from
before the step, without padding, and weights token by token from `tests.closed_form`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aggcli.errors import SettingError
from aggcli.integrations.trl import with_aggregation
from tests import closed_form

VOCABULARY = 24
LIMIT = 12


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    mode: str | None = None
    loss_type: str = "dr_grpo"
    accumulation: int = 1
    steps: int = 1
    per_device: int | None = None
    probe: bool = False
    write: bool = True
    plain: bool = False
    """TRL's own class, as it is."""
    own_loss: bool = False
    """A subclass with a loss of its own."""
    with_tools: bool = False
    """Completions with the answers of tools in them, which are not trained."""
    from_folder: bool = False
    """The model read from a folder, as the reference of a KL term must be; the parameters after training are kept beside it."""
    double: bool = False
    """The model in float64: TRL's advantages and log-probabilities stay in float32."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `with_aggregation`."""
    trl: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of GRPOConfig."""


def _package(name: str) -> Any:
    """A package of an extra, which may not be there when types are checked."""
    return importlib.import_module(name)


def tiny_llama(*, double: bool = False) -> Any:
    transformers = _package("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2, 3]  # so that lengths vary
    return model.double() if double else model


def tokenizer() -> Any:
    tokenizers = _package("tokenizers")
    words = ["<pad>", "<end>", *(chr(ord("a") + at) for at in range(VOCABULARY - 2))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = _package("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", padding_side="left")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 5) + 0.25 * len(ids) for ids in completion_ids]


def rollout_with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Random completions of 2 to 12 tokens, of which a random stretch is a tool's."""
    draw = torch.Generator().manual_seed(trainer.accelerator.process_index)
    ids: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "env_mask": []}
    for prompt in prompts:
        length = int(torch.randint(2, LIMIT + 1, (1,), generator=draw))
        first, last = sorted(torch.randint(0, length, (2,), generator=draw).tolist())
        ids["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        ids["completion_ids"].append(torch.randint(4, VOCABULARY, (length,), generator=draw).tolist())
        ids["env_mask"].append([0 if first <= at < last else 1 for at in range(length)])
    return {**ids, "logprobs": None}


class Gradients:
    """The parameters' gradients of each optimizer step, as the optimizer would take them."""

    def __init__(self, trainer: Any) -> None:
        self.found: list[dict[str, torch.Tensor]] = []
        self.before: list[Any] = []
        step = trainer.accelerator.unwrap_model(trainer.model)
        kept, found, before = trainer.create_optimizer, self.found, self.before

        def create_optimizer(*args: Any) -> Any:
            optimizer = kept(*args)
            own = optimizer.step

            def keeping(*given: Any, **more: Any) -> Any:
                before.append({name: p.detach().clone() for name, p in step.named_parameters()})
                found.append({name: p.grad.detach().clone() for name, p in step.named_parameters() if p.grad is not None})
                return own(*given, **more)

            optimizer.step = keeping
            return optimizer

        trainer.create_optimizer = create_optimizer


def closed_gradient(
    parameters: dict[str, Any], samples: list[dict[str, Any]], case: Case, divisor: float
) -> tuple[dict[str, Any], float]:
    """The gradient and the value of the mode's clipped loss on these samples, each alone and without padding."""
    scale = case.options.get("prompt_mean_scale", "rollouts")
    weights = closed_form.weights(samples, case.mode or "", divisor, scale)
    model = tiny_llama(double=case.double)
    model.load_state_dict(parameters, strict=False)
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        ids = torch.tensor([sample["tokens"]])
        length = sample["response_length"]
        logits = model(input_ids=ids).logits[0, -length - 1 : -1]
        current = torch.log_softmax(logits, -1).gather(1, ids[0, -length:, None])[:, 0]
        ratio = torch.exp(current - torch.tensor(sample["old_log_probs"], dtype=logits.dtype))
        advantage = torch.tensor(sample["advantage"], dtype=logits.dtype)
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = (losses * torch.tensor(weight, dtype=logits.dtype)).sum()
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


def run(case: Case, folder: Path) -> dict[str, Any]:
    trl = _package("trl")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    where = folder / case.name
    per_device = case.per_device or 16 // world // case.accumulation
    config = trl.GRPOConfig(
        output_dir=str(where / "trl"),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=case.accumulation,
        num_generations=4,
        max_completion_length=LIMIT,
        max_steps=case.steps,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        loss_type=case.loss_type,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        seed=7,
        bf16=False,
        disable_tqdm=True,
        **{"save_strategy": "no", **case.trl},
    )
    rows = _package("datasets").Dataset.from_list([{"prompt": "abcdefghijklmnop"[at : at + 3 + at % 3]} for at in range(12)])
    made = trl.GRPOTrainer
    if case.own_loss:
        made = type("Own", (trl.GRPOTrainer,), {"_compute_loss": lambda self, model, inputs: None})
    if not case.plain:
        options = {"write_rollouts": where / "rollouts" if case.write else None, "probe": case.probe, **case.options}
        made = with_aggregation(made, case.mode, **options)
    _package("transformers").set_seed(7)
    more = {"rollout_func": rollout_with_tools} if case.with_tools else {}
    model = tiny_llama(double=case.double)
    if case.from_folder:
        model.save_pretrained(where / "model")
        tokenizer().save_pretrained(where / "model")
        model = str(where / "model")
    trainer = made(model, reward, args=config, train_dataset=rows, processing_class=tokenizer(), **more)
    gradients = Gradients(trainer)
    trainer.train()
    final = [p.detach().cpu() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()]
    logs = [line for line in trainer.state.log_history if "loss" in line]
    found: dict[str, Any] = {
        "name": case.name,
        "losses": [line["loss"] for line in logs],
        "logs": [{k: v for k, v in line.items() if k.startswith("aggcli/")} for line in logs],
        "parameters": hashlib.sha256(torch.cat([p.flatten() for p in final]).numpy().tobytes()).hexdigest(),
    }
    if case.from_folder:
        _package("safetensors.torch").save_file({"parameters": torch.cat([p.flatten() for p in final])}, where / "after")
    if "save_steps" in case.trl:
        found |= _resumed(made, config, rows, where)
    if trainer.accelerator.is_main_process and not case.plain and case.write:
        found["steps"] = [_compared(gradients, step, where, case) for step in range(case.steps)] if case.mode else []
        found["rollouts"] = str(where / "rollouts")
    return found


def _resumed(made: Any, config: Any, rows: Any, where: Path) -> dict[str, Any]:
    """The same run again from its second step, and from its first."""

    def trained(**options: Any) -> None:
        trainer = made(tiny_llama(), reward, args=config, train_dataset=rows, processing_class=tokenizer())
        trainer.train(**options)

    folder = where / "rollouts"
    (folder / "000009.jsonl").write_text("left over from a longer run")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    trained(resume_from_checkpoint=str(where / "trl" / "checkpoint-2"))
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = ""
    try:
        trained()
    except SettingError as error:
        again = str(error)
    changed = sorted(name for name, at in after.items() if at != before.get(name))
    return {"files": sorted(after), "rewritten": changed, "again": again}


def _compared(gradients: Gradients, step: int, where: Path, case: Case) -> dict[str, float]:
    samples = [json.loads(line) for line in (where / "rollouts" / f"{step + 1:06d}.jsonl").read_text().splitlines()]
    samples = [{**one, "advantage": one["advantage"][0]} for one in samples]
    wanted, loss = closed_gradient(gradients.before[step], samples, case, case.options.get("divisor", LIMIT))
    given = gradients.found[step]
    assert set(given) == set(wanted), (len(given), len(wanted), set(given) ^ set(wanted))
    apart = max(float((given[name] - wanted[name]).abs().max()) for name in wanted)
    size = max(float(wanted[name].abs().max()) for name in wanted)
    lengths = sorted({one["response_length"] for one in samples})
    masked = sum(0 in one.get("loss_mask", []) for one in samples)
    return {"apart": apart, "largest": size, "loss": loss, "samples": len(samples), "lengths": len(lengths), "masked": masked}


def _run_or_refused(case: Case, folder: Path) -> dict[str, Any]:
    try:
        return run(case, folder)
    except SettingError as error:
        return {"name": case.name, "refused": str(error)}


def main() -> None:
    cases = [Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())]
    torch.set_num_threads(1)
    _ = _package("trl").GRPOTrainer, _package("datasets").Dataset  # lazy packages: this imports them
    gc.freeze()  # each trainer collects garbage, which would walk all that was imported
    found = [_run_or_refused(case, Path(sys.argv[2])) for case in cases]
    if os.environ.get("RANK", "0") == "0":
        print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
