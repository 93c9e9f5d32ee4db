"""Runs that TRL itself made, as `aggcli compare --curves` reads them: two loss types, three seeds of each, three steps.

    python experiments/07-curves-of-trl.py tests/data/trl_runs      # needs the extra `trl`; half a minute

TRL's own GRPOTrainer on a tiny random Llama writes `trainer_state.json` and TensorBoard event files, which tests hold to the
verdict of our own records of the same numbers. So few steps say nothing about the loss types.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.trl_worker import LIMIT, reward, tiny_llama, tokenizer

datasets: Any = importlib.import_module("datasets")  # of an extra, which may not be there when types are checked
trl: Any = importlib.import_module("trl")


def main(folder: Path) -> None:
    prompts = datasets.Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 2})
    for loss_type in ("dapo", "dr_grpo"):
        for seed in range(3):
            place = folder / f"{loss_type}-seed{seed}"
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(place / "events")
            config = trl.GRPOConfig(
                output_dir=str(place),
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=LIMIT,
                max_steps=3,
                learning_rate=0.01,
                loss_type=loss_type,
                report_to=["tensorboard"],
                logging_steps=1,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                seed=seed,
                disable_tqdm=True,
            )
            trainer = trl.GRPOTrainer(
                model=tiny_llama(), reward_funcs=reward, args=config, train_dataset=prompts, processing_class=tokenizer()
            )
            trainer.train()
            trainer.save_state()
            for path in place.iterdir():
                if path.is_dir() and path.name != "events":
                    shutil.rmtree(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
