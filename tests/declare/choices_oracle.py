"""Runs inside an observed interpreter: what the really built models run, and what the real hub mapping holds.

Written without a look at kernelguard. A fake `kernels` package stands beside transformers, whose repositories only
remember what they were given.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def mapping() -> dict[str, list[list[Any]]]:
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    build = getattr(hub, "_build_kernel_mapping", None)
    table = build() if build is not None else hub._KERNEL_MAPPING
    found: dict[str, list[list[Any]]] = {}
    for layer, devices in table.items():
        rows = found.setdefault(layer, [])
        for device, entry in devices.items():
            kind, low, high = (device, None, None) if isinstance(device, str) else device.described()
            for mode, repository in entry.items() if isinstance(entry, dict) else [(None, entry)]:
                rows.append([kind, low, high, mode is None or mode.name_has("TRAINING"), repository.repo_id])
    return found


def built(case: dict[str, Any]) -> dict[str, Any]:
    import transformers

    raw = dict(case["config"])
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    request = case.get("request", {})
    for key, value in request.items():
        setattr(config, f"_{key}", value)
    with torch.device("meta"):
        model = getattr(transformers, case["class"])(config)
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            parts[name] = {
                "type": module.config.model_type,
                "attention": module.config._attn_implementation,
                "experts": getattr(module.config, "_experts_implementation", None),
            }
    return {"parts": parts}


def main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    import transformers

    out: dict[str, Any] = {"mapping": mapping(), "models": {}, "flags": {}}
    for name in spec["classes"]:
        cls = getattr(transformers, name, None)  # not every class is public
        if cls is not None:
            out["flags"][name] = [getattr(cls, f"_supports_{flag}") for flag in ("sdpa", "flash_attn", "flex_attn")]
    for case in spec["cases"]:
        try:
            out["models"][case["name"]] = built(case)
        except (ValueError, ImportError) as error:
            out["models"][case["name"]] = {"raised": f"{type(error).__name__}: {error}"}
        except Exception:  # noqa: BLE001 - reported, and the tests fail on it
            out["models"][case["name"]] = {"error": traceback.format_exc()}
    Path(out_path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
