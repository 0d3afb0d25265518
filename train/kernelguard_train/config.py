"""What can be configured, and what each key means.

Every key is a field below; its text is what `--print-config` writes above it. `configfile` reads a TOML file and
dotted overrides into this, and refuses what is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def key(default: Any, doc: str) -> Any:
    """A field with its default and the text that explains it."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and which implementations it runs on."""

    path: str = key("", "Folder with config.json (and safetensors), a config.json, or a hub id.")
    tokenizer: str = key("", "Folder or hub id of the tokenizer; empty: the model's.")
    init: Literal["pretrained", "random"] = key("pretrained", "Load the weights, or draw them from train.seed.")
    layers: int = key(0, "Keep only the first N decoder layers (a slice for measuring); 0: all.")
    text_only: bool = key(True, "Of a vision-language checkpoint, train the text model alone.")
    compute_dtype: Literal["bfloat16", "float32"] = key(
        "bfloat16", "What the matrix products run in. Parameters and optimizer state are float32 in any case."
    )
    attention: Literal["auto", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa"] = key(
        "auto", "auto: torch's varlen_attn for packed batches on CUDA, otherwise sdpa."
    )
    flash: Literal["auto", "default", "FA3", "FA4"] = key(
        "auto",
        "Which flash attention torch routes varlen and sdpa to; auto: FA3 on Hopper and FA4 on Blackwell where they "
        "are installed, otherwise torch's own (default).",
    )
    kernels: Literal["auto", "fused", "reference"] = key(
        "auto",
        "Linear-attention layers: auto is fused on CUDA and the segment-by-segment reference on the CPU. "
        "A fused kernel that is missing is an error, never a silent fallback.",
    )
    convolution: Literal["auto", "causal_conv1d", "fla"] = key(
        "auto",
        "Fused convolution: auto takes the trainer's own in fused gated delta layers, elsewhere causal-conv1d if it "
        "imports, otherwise fla's.",
    )
    liger: Literal["auto", "on", "off"] = key("auto", "Liger's norms and SwiGLU; auto: on CUDA, where installed.")
    fused: Literal["auto", "on", "off"] = key(
        "auto",
        "Linear, SwiGLU and gated delta layers as fewer, larger steps with the same result; auto: on CUDA.",
    )
    fp8: bool = key(
        False, "With fused: forward and input-gradient products in float8 (less accurate; Hopper or later)."
    )
    recompute: Literal["auto", "full", "selective", "none"] = key(
        "full", "Activation checkpointing; auto chooses per layer from the memory measured in a first pass (CUDA)."
    )
    torchao_float8: tuple[str, ...] = key(
        (), 'Submodules of each layer whose linear layers compute in float8 through torchao, e.g. ["mlp"].'
    )
    compile: tuple[str, ...] = key((), 'Submodules of each layer to compile in place, e.g. ["mlp"].')
    compile_backend: str = key("inductor", "torch.compile backend.")
    check_isolation: bool = key(True, "Before a packed run, prove on this model that no gradient crosses a sample.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which samples, and what is done with those that do not fit."""

    path: str = key(
        "",
        "JSONL or parquet file or glob, a folder of them, a save_to_disk folder, an fsspec URL or a hub id; "
        "synthetic: random tokens with UltraChat-like lengths.",
    )
    split: str = key("train", "Split of a hub data set.")
    column: str = key("messages", "Column that holds the conversation: a list of {role, content}.")
    streaming: bool = key(False, "Read front to back without an index; needs train.steps. Shuffles within a buffer.")
    shuffle: bool = key(True, "Another order each epoch, drawn from train.seed.")
    shuffle_buffer: int = key(10_000, "Samples that a streamed source is shuffled within.")
    chat_template: str = key(
        "",
        "Path of a Jinja template; empty: the tokenizer's; trl: the prefix-safe equivalent that the trl package ships.",
    )
    max_length: int = key(0, "Longest sample in tokens; 0: batch.tokens.")
    too_long: Literal["error", "truncate", "split", "drop"] = key(
        "truncate", "For longer samples. split trains every piece, later pieces without their beginning."
    )
    bad_rows: Literal["stop", "skip"] = key("stop", "For rows that are malformed or have nothing to train on.")
    max_bad_rows: int = key(1000, "With skip: stop all the same after this many.")
    retries: int = key(5, "How often a failed read is repeated, with doubling pauses from 1 s.")
    workers: Literal[0, 1] = key(1, "1: samples are prepared in a process of their own, ahead of the training.")
    synthetic_samples: int = key(100_000, "Size of the synthetic source.")
    synthetic_trained: float = key(1.0, "Part of each synthetic sample, at its end, that is trained.")
    synthetic_median: int = key(1175, "Median length of synthetic samples, in tokens (log-normal, sigma 0.33).")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How samples become batches."""

    mode: Literal["packed", "padded", "sorted"] = key(
        "packed",
        "packed: whole samples side by side, kept apart by boundaries. padded: one sample a row. sorted: padded, with "
        "samples of similar length together (less padding, but the samples of a step are then alike: a bias).",
    )
    tokens: int = key(8192, "Tokens of one batch of one rank, padding included; a multiple of 128.")
    window: int = key(2048, "Look-ahead: samples that are packed or sorted together.")
    per_step: int = key(0, "Batches of one optimizer step over all ranks; 0: one per rank. Must divide by the ranks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW, its schedule, and the guards around it."""

    lr: float = key(1e-5, "Peak learning rate.")
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas.")
    eps: float = key(1e-8, "AdamW epsilon.")
    weight_decay: float = key(0.0, "Decoupled weight decay of matrices; vectors are never decayed.")
    clip: float = key(1.0, "Largest global gradient norm; 0: no clipping.")
    warmup: float = key(0.03, "Part of the run over which the rate rises linearly from 0.")
    decay: Literal["cosine", "linear", "constant"] = key("cosine", "How it falls afterwards.")
    min_lr_ratio: float = key(0.1, "Where it ends, relative to the peak.")
    nonfinite_limit: int = key(3, "Steps in a row whose loss or gradients may be non-finite (skipped by all ranks).")
    loss: Literal["chunked", "liger"] = key("chunked", "Linear cross entropy: built in, or liger's fused one.")
    loss_chunk: int = key(4096, "Trained tokens whose logits exist at once.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, from where, to where."""

    output: str = key("runs/latest", "Folder for checkpoints, the log and the exported model.")
    epochs: int = key(1, "Passes over the data; without meaning when steps is set.")
    steps: int = key(0, "Optimizer steps; 0: as many as the epochs give.")
    seed: int = key(0, "Of weights, order and dropout.")
    resume: Literal["auto", "never"] = key("auto", "auto: go on from the newest readable checkpoint in output.")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: CUDA if there is one.")
    deterministic: bool = key(False, "Ask torch for deterministic algorithms (slower on a GPU).")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over ranks."""

    shard: int = key(0, "Ranks that share one copy of the model (HSDP: world size / shard copies); 0: all.")
    one_rank: Literal["auto", "plain", "fsdp"] = key(
        "auto", "A run of one rank: auto and plain do without FSDP and its copies; fsdp uses it all the same."
    )
    prefetch: int = key(1, "Layers gathered ahead of the one that computes.")
    reshard: bool = key(True, "Drop a layer's gathered weights between its forward and backward pass (less memory).")
    layers_per_unit: int = key(1, "Layers that are gathered and reduced together.")
    timeout: int = key(1800, "Seconds after which a collective that hangs ends the run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = key(200, "Steps between checkpoints; 0: only on SIGTERM and, if configured, at the end.")
    at_end: bool = key(True, "Save the last step too.")
    keep: int = key(2, "Newest checkpoints that stay.")
    background: bool = key(True, "Write while training goes on (a copy of the state is taken first).")
    export: bool = key(True, "At the end, write output/model: bf16, loadable with from_pretrained.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """What is reported, and where to. The JSONL log of every step is always written."""

    every: int = key(10, "Steps between lines on the console.")
    progress: bool = key(True, "A progress bar with the time left, on a terminal.")
    profile: int = key(0, "Record this step with torch's profiler: output/profile.json and its trace; 0: none.")
    tensorboard: bool = key(False, "Write TensorBoard events to output/tensorboard.")
    mlflow: bool = key(False, "Log to MLflow (its own environment variables say where).")
    peak_tflops: float = key(0.0, "Dense bf16 peak of one GPU for MFU; 0: from its name, none if unknown.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    @property
    def max_length(self) -> int:
        """Longest sample that is kept whole, in tokens."""
        return self.data.max_length or self.batch.tokens
