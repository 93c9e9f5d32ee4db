"""The layouts that each optimizer step is recorded under."""

from __future__ import annotations

from aggcli.config import DEFAULT_LAYOUTS, LayoutConfig
from aggcli.layout.schedule import RECORDED, Layout, parse_layout


def layouts_of(config: LayoutConfig, *, has_recorded: bool) -> list[Layout]:
    """The layout in force, then the others that each step is recorded under, none twice.

    In force: the ranks asked for (--dp, --cp), else the first of --layouts, else the recorded one, else `dp1:first-fit`.
    Raises `SettingError` for a layout that cannot be read.
    """
    texts = list(config.layouts) if config.layouts else list(DEFAULT_LAYOUTS)
    if has_recorded and not config.layouts:
        texts.insert(0, RECORDED)
    if config.dp * config.cp > 1:
        ranks = f"dp{config.dp}cp{config.cp}" if config.cp > 1 else f"dp{config.dp}"
        texts.insert(0, f"{ranks}:{config.partition}")
    elif config.partition != "first-fit" and not config.layouts:
        texts.insert(0, f"dp1:{config.partition}")
    return [
        parse_layout(text, max_tokens=config.max_tokens_per_gpu, micro_batch_size=config.micro_batch_size)
        for text in dict.fromkeys(texts)
    ]
