"""How fast is it, how good is that, and is the GPU well?

Trained tokens have a label, valid tokens belong to a sample, computed tokens include padding. MFU counts the work a
step has to do, not what is computed again: 6 (P v + O t) / (s peak), with P the parameters of the layers that take part
in a matrix product for each token (of experts those that are active; the embedding table is left out), v valid tokens,
O the output layer's parameters, t trained tokens (no other needs logits), s seconds. Where every token is trained this
is the usual 6 (P + O) v / (s peak).
`mfu_with_attention` adds 6 L H D sum(n^2) for L attention layers of H heads of size D and samples of n tokens:
two products of 2 H D n^2 / 2 operations forward (causal), twice that backward.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelguard_train.batches import Batch

PEAKS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "GH200": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0,
         "L4": 121.0, "A10G": 70.0, "B200": 2250.0, "GB200": 2500.0, "RTX 4090": 165.0}  # fmt: skip
"""Dense bf16 TFLOP/s by what the device's name holds, from NVIDIA's data sheets (SXM where there are several)."""


def peak_tflops(name: str, configured: float) -> float | None:
    """The peak of a GPU; None when it is not known."""
    if configured:
        return configured
    matches = [(len(key), peak) for key, peak in PEAKS.items() if key in name]
    return max(matches)[1] if matches else None


def expert_count(text: Any) -> int:
    """Routed experts of a layer, under whichever name the configuration has them; 0: it is no mixture."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(text, name, None))), 0)


def matmul_parameters(lm: Any, text: Any) -> tuple[int, int]:
    """Parameters that a token is multiplied with: in the layers, and in the output layer."""
    active = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    experts = expert_count(text)
    total = 0.0
    for name, parameter in lm.named_parameters():
        share = active / experts if active and experts and ".experts." in name else 1.0
        total += parameter.numel() * share
    embedding, output = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    total -= output.numel() if embedding is output else embedding.numel() + output.numel()
    return round(total), output.numel()


def attention_width(layers: Sequence[nn.Module], text: Any) -> int:
    """L H D: attention layers times heads times head size."""
    count = sum(1 for layer in layers if hasattr(layer, "self_attn"))
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(count * text.num_attention_heads * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a step is made of, on this rank or on all."""

    trained: int
    valid: int
    computed: int
    squared: int
    samples: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Amounts:
        """The sums over some batches."""
        return cls(
            trained=sum(batch.trained_at.numel() for batch in batches),
            valid=sum(batch.tokens for batch in batches),
            computed=sum(batch.size for batch in batches),
            squared=sum(batch.squared for batch in batches),
            samples=sum(batch.samples for batch in batches),
        )


class Meter:
    """Rates of the steps so far. The first ones, in which kernels are compiled and tuned, do not count."""

    def __init__(self, parameters: tuple[int, int], width: int, *, peak: float | None, world: int, warmup: int) -> None:
        self.parameters, self.width, self.peak, self.world, self.warmup = parameters, width, peak, world, warmup
        self.seen = 0
        self.seconds: deque[float] = deque(maxlen=1000)
        self.waits: deque[float] = deque(maxlen=1000)
        self.totals = dict.fromkeys(("seconds", "trained", "valid", "computed", "squared", "steps"), 0.0)

    def add(self, amounts: Amounts, seconds: float, wait: float, *, counted: bool = True) -> dict[str, float]:
        """What to report of one step: rates per GPU. One that is not counted stays out of the run's."""
        self.seen += 1
        if self.seen > self.warmup and counted:
            self.seconds.append(seconds)
            self.waits.append(wait)
            for name in ("trained", "valid", "computed", "squared"):
                self.totals[name] += getattr(amounts, name)
            self.totals["seconds"] += seconds
            self.totals["steps"] += 1
        return {"step_s": seconds, "data_wait_s": wait, **self._rates(vars_of(amounts), seconds)}

    def _rates(self, amounts: dict[str, float], seconds: float) -> dict[str, float]:
        per_gpu = seconds * self.world
        rates = {
            "trained_tokens_per_s": amounts["trained"] / per_gpu,
            "tokens_per_s": amounts["valid"] / per_gpu,
            "computed_tokens_per_s": amounts["computed"] / per_gpu,
            "density": amounts["valid"] / max(1, amounts["computed"]),
        }
        if self.peak:
            work = 6 * (self.parameters[0] * amounts["valid"] + self.parameters[1] * amounts["trained"])
            rates["mfu"] = work / per_gpu / (self.peak * 1e12)
            rates["mfu_with_attention"] = (work + 6 * self.width * amounts["squared"]) / per_gpu / (self.peak * 1e12)
        return rates

    def summary(self) -> dict[str, Any]:
        """Rates over the whole run, warm-up left out; empty when there was nothing else."""
        if not self.totals["steps"]:
            return {}
        ordered = sorted(self.seconds)
        return {
            "loop": "kernelguard_train",
            "steps": int(self.totals["steps"]),
            "step_s": self.totals["seconds"] / self.totals["steps"],
            "step_p50_s": statistics.median(ordered),
            "step_p95_s": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
            "data_wait_s": statistics.fmean(self.waits),
            **self._rates(self.totals, self.totals["seconds"]),
            **memory(),
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "gpus": self.world,
        }


def vars_of(amounts: Amounts) -> dict[str, float]:
    """The numbers that rates are made of."""
    return {name: getattr(amounts, name) for name in ("trained", "valid", "computed", "squared")}


def memory() -> dict[str, float]:
    """Peak GPU memory so far and how often the allocator had to start over; nothing without CUDA."""
    if not torch.cuda.is_available():
        return {}
    statistics_ = torch.cuda.memory_stats()
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "alloc_retries": statistics_.get("num_alloc_retries", 0),
    }


WORST: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu_utilization": min,
    "gpu_temperature": max,
    "gpu_power_w": max,
    "gpu_sm_mhz": min,
    "gpu_ecc_corrected": max,
    "gpu_ecc_uncorrected": max,
    "data_wait_max_s": max,
    "peak_max_gib": max,
}
"""What is compared between ranks, and which of them is the worst."""


def worst_of(readings: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of each number in `WORST`, the worst of all ranks, and which rank has it; NaN is "not known".

    A run is as fast as its slowest GPU, which is rarely that of rank 0.
    """
    found: dict[str, float] = {}
    for name, values in zip(WORST, zip(*readings, strict=True), strict=True):
        known = [(value, rank) for rank, value in enumerate(values) if value == value]  # noqa: PLR0124 - not NaN
        if known:
            found[name] = WORST[name]([value for value, _ in known])
            if len(readings) > 1:
                found[f"{name}_rank"] = next(rank for value, rank in known if value == found[name])
    return found


class Health:
    """The GPU's own account of itself, through NVML."""

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = None
        self.note = "no GPU"
        if device.type != "cuda":
            return
        try:
            import pynvml  # noqa: PLC0415 - optional
        except ImportError:
            self.note = "GPU health is not reported: pip install nvidia-ml-py"
            return
        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
            # By identity: NVML's numbers do not follow CUDA_VISIBLE_DEVICES.
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self.note = ""
        except pynvml.NVMLError as error:
            self.note = f"GPU health is not reported: NVML says {error}"

    def read(self) -> dict[str, float]:
        """Utilization in percent, degrees Celsius, watts, MHz, memory errors since boot; as far as NVML tells."""
        if self.handle is None:
            return {}
        nvml, handle = self.nvml, self.handle
        readings: dict[str, Callable[[], Any]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "gpu_ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        found: dict[str, float] = {}
        for name, read in readings.items():
            try:
                found[name] = float(read())
            except nvml.NVMLError as error:  # not every GPU tells everything
                if not isinstance(error, nvml.NVMLError_NotSupported):
                    self.note = f"{name}: {error}"
        return found
