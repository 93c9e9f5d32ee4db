"""Peak memory of log-probabilities and their gradient at a vocabulary of 151,936, in chunks and by all logits at once.

    python -m experiments.benchmarks.chunked_memory > results/reference/benchmarks/chunked_memory.txt

A random Llama of one layer and width 64 on the CPU, float32; rows of 16 prompt and 112 response tokens. Each number is the peak
of a process of its own above what it held before the pass: the model is in neither, its gradient is in both.
"""

from __future__ import annotations

import multiprocessing
import resource
from importlib import import_module
from typing import Any

import torch

VOCABULARY, PROMPT, RESPONSE = 151_936, 16, 112
BATCHES = (1, 2, 4, 8)


def main() -> None:
    """One line a batch size."""
    print(f"vocabulary {VOCABULARY}, {RESPONSE} response tokens a row, float32, torch {torch.__version__}")
    print("rows   in chunks, MiB   all logits at once, MiB   logits alone, MiB")
    context = multiprocessing.get_context("spawn")
    for rows in BATCHES:
        peaks = []
        for path in ("chunked", "plain"):
            with context.Pool(1) as pool:
                peaks.append(pool.apply(_peak, (path, rows)))
        logits = rows * (PROMPT + RESPONSE) * VOCABULARY * 4 / 2**20
        print(f"{rows:4}   {peaks[0]:14.0f}   {peaks[1]:23.0f}   {logits:17.0f}", flush=True)


def _peak(path: str, rows: int) -> float:
    """Most memory during forward and backward, MiB above what there was."""
    from aggcli.policy.causal_lm import row_log_probs

    torch.set_num_threads(1)
    library: Any = import_module("transformers")
    torch.manual_seed(0)
    config = library.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    module = library.LlamaForCausalLM(config).eval()
    tokens_BL = torch.randint(VOCABULARY, (rows, PROMPT + RESPONSE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if path == "chunked":
        lengths = torch.full((rows,), PROMPT), torch.full((rows,), RESPONSE)
        log_probs, _ = row_log_probs(module, tokens_BL, *lengths, torch.float32)
    else:
        all_BLV = torch.log_softmax(module(input_ids=tokens_BL, use_cache=False).logits, -1)
        log_probs = all_BLV[:, PROMPT - 1 : -1].gather(2, tokens_BL[:, PROMPT:, None])
    torch.autograd.grad(log_probs.sum(), list(module.parameters()))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    main()
