"""`aggcli env`: versions and devices, for bug reports."""

from __future__ import annotations

from aggcli.cli.console import out
from aggcli.cli.options import JsonOption


def env(json: JsonOption = False) -> None:
    """Print versions and devices, for bug reports."""
    import torch

    from aggcli.records import environment, to_json
    from aggcli.report.tables import facts_table

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {**environment("cuda" if devices else "cpu", torch.get_num_threads()), "cuda_devices": devices}
    if json:
        print(to_json({"schema": 1, **found}))
        return
    packages = [f"{name} {version}" for name, version in found["packages"].items()]
    out().print(facts_table(found | {"packages": packages}))
