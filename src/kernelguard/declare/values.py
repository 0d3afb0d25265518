"""What `declare` hands on: the model's configuration, what the run intends, and the fast paths its code can use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernelguard.declare.modes import KernelsWindow, ModeFact


class Phase(StrEnum):
    """When a kernel is called."""

    TRAINING = "training"
    DECODING = "decoding"


class Requirement(StrEnum):
    """What the model does without the kernel."""

    AUTOMATIC = "automatic"
    """Used whenever it can be loaded; otherwise the model quietly runs PyTorch code."""
    OPT_IN = "opt-in"
    """Used only when the run asks for it (`use_kernels`, liger, an attention implementation)."""
    HARD = "hard"
    """The model refuses to run without it."""


class BindingKind(StrEnum):
    """Where, in the imported modeling module, the function that really runs is found."""

    CLOSURE = "closure"
    """`name` is a decorated module-level function; the choice is in the decorator's closure (transformers >= 5.15)."""
    GLOBAL = "global"
    """`name` is a module global, set when the module is imported (`None` or absent: the slow path)."""
    GLOBAL_AFTER_INIT = "global-after-init"
    """`name` is a module global that is set when `owner` (a class of the module) is constructed."""
    FUNCTION_RESULT = "function-result"
    """Calling the module-level function `loader` returns a tuple; element `index` is the kernel (transformers 4.57)."""
    AT_CALL = "at-call"
    """A function of the module imports it each time it runs: whether the import works is all there is to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSite:
    """How the bound function of one fast path is read inside the observed interpreter."""

    kind: BindingKind
    module: str
    """Dotted name, for example `transformers.models.qwen3_5.modeling_qwen3_5`."""
    name: str
    owner: str | None = None
    """The class whose forward calls the kernel, when one could be told."""
    loader: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A flag of the modeling code over several symbols, such as `is_fast_path_available`."""

    name: str
    members: tuple[str, ...]
    """The binding names that must all be there."""
    decides: bool
    """True: the forward takes the slow path unless all members are there. False: only a warning depends on it."""
    needs_cuda_tensors: bool = False
    blocked_by_compile: bool = False
    """The fast path is refused while torch.compile traces (the Mamba family up to 5.14)."""
    module_global: bool = True
    """The flag is a global of the modeling module; False: a local of a method, so only the members can be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """How a packed batch's sample boundaries reach one kernel argument, read from the modeling source.

    The kernel is told through its `argument`; `signals` are the keyword arguments of the model's own forward that end
    up there (`cu_seq_lens_q` for `cu_seqlens`). An empty `signals` with `known` means that this transformers never
    passes the argument. `known=False`: the code has a shape that could not be followed.
    """

    argument: str
    signals: tuple[str, ...]
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackNotice:
    """What a user gets to see when the slow path is taken; `level=None` means nothing at all."""

    level: str | None
    """`warning_once`, `warning`, `info`, `error` (an exception), or None."""
    when: str
    """`import`, `build`, `first call`, `packed call`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """One kernel symbol that the model's code can use."""

    symbol: str
    """The kernel's own name, `chunk_gated_delta_rule`."""
    package: str
    """Import name, `fla`."""
    distribution: str
    """What is installed to get it, `flash-linear-attention`."""
    import_module: str
    """Dotted module that holds the symbol, `fla.ops.gated_delta_rule`."""
    mechanism: str
    """Name of the file in `declare/mechanisms/` that found it."""
    requirement: Requirement
    phases: tuple[Phase, ...]
    model_type: str
    """The (sub-)config that brings the code in, `qwen3_5_text`."""
    file: str
    """Relative to the transformers folder, `models/qwen3_5/modeling_qwen3_5.py`."""
    line: int
    binding: BindingSite
    layers: int | None
    """How many layers of this config call it; None: could not be told from the source."""
    fallback: str
    """What runs instead, for a person: `torch_chunk_gated_delta_rule (PyTorch, same file)`."""
    notices: tuple[FallbackNotice, ...] = ()
    gate: Gate | None = None
    availability_check: str | None = None
    """The `is_*_available` helper that guards it, when one does."""
    availability_needs_gpu: bool = False
    """That helper says False without a visible GPU, so the binding cannot be judged there."""
    boundaries: tuple[Boundary, ...] = ()
    availability_missing: bool = False
    """The code asks for that helper by name, but this transformers has none: the installed package is never used."""
    hub_first: bool = False
    """With a usable `kernels` package the hub is asked first and the installed package is not tried."""
    hub_window: KernelsWindow | None = None
    """Which releases of `kernels` are usable, where the hub is asked first."""
    optional: bool = False
    """A small gain beside the model's main work: its absence is worth a remark, not a refusal."""
    repeats_heads: bool | None = None
    """The layers that call it repeat key heads to as many as value heads first; None: no such layer was found."""
    disabled_by: str = ""
    """The setting of this config that switches the kernel off, `use_mamba_kernels=False`; empty when none does."""
    detail: str = ""
    """What else a person should know, one sentence."""

    @property
    def import_path(self) -> str:
        """The symbol's full dotted path."""
        return f"{self.import_module}.{self.symbol}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubModel:
    """One (nested) configuration that brings modeling code with it."""

    path: str
    """Where in config.json: empty for the top, else `text_config`."""
    model_type: str
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A parsed config.json."""

    source: str
    """The path or hub id it was read from."""
    model_type: str
    architectures: tuple[str, ...]
    parts: tuple[SubModel, ...]
    """The top configuration first, then every nested one that has a model_type."""
    raw: Mapping[str, Any] = field(repr=False)
    remote_code: tuple[str, ...] = ()
    """`auto_map` targets: code that is not in transformers and that kernelguard cannot vouch for."""
    folder: Path | None = None
    """The folder the config lies in, when it is local (remote code may lie beside it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCode:
    """The code that a configuration names for its model in `auto_map`."""

    targets: tuple[str, ...]
    """As written there, `modeling_x.XForCausalLM`."""
    runs: bool
    """The run uses it. False: transformers' own class is built instead, or nothing can be."""
    shipped: bool
    """transformers has a class of its own for this model_type."""
    folder: str = ""
    """Where the configuration lies; empty: on the hub."""
    files: tuple[str, ...] = ()
    """What was read, below `transformers_modules/`."""
    unread: tuple[str, ...] = ()
    """Why some of it could not be read, one sentence each."""
    gone: tuple[str, ...] = ()
    """What it imports unguarded from transformers that this release does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersTree:
    """A transformers source tree on disk, found without importing it."""

    root: Path
    """The folder that holds `models/`."""
    version: Version
    origin: str
    """`interpreter`, `path` or `wheel`, for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layer that is really present, and how often."""

    name: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Everything the model's code declares, as far as the source tells."""

    config: ModelConfig
    transformers: TransformersTree
    fast_paths: tuple[FastPath, ...]
    """Declared by code that this config's classes can reach; includes decode-only ones and ones with zero layers."""
    layer_kinds: tuple[LayerKind, ...] = ()
    unknowns: tuple[str, ...] = ()
    """What could not be read, one sentence each. A non-empty list can never be a pass."""
    modes: tuple[ModeFact, ...] = ()
    """What the code chooses when the model is built or called: hub layers, attention, experts, ..."""
    remote: RemoteCode | None = None
    """None: the configuration names no model code of its own."""

    @property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of each layer, the first one first; empty: the config does not list them, or lists others."""
        counts = Counter({kind.name: kind.count for kind in self.layer_kinds if kind.count})
        for part in self.config.parts:
            for key in ("layer_types", "layers_block_type"):
                listed = part.raw.get(key)
                if isinstance(listed, list) and counts and Counter(map(str, listed)) == counts:
                    return tuple(map(str, listed))
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the user's run will do that a config.json does not say. None means: not said and not assumed."""

    phase: Phase = Phase.TRAINING
    dtype: str = "bfloat16"
    packed: bool = False
    signals: tuple[str, ...] | None = None
    """Keyword arguments with sample boundaries that a packed run sends: `position_ids`, `cu_seq_lens_q`, `seq_idx`."""
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    use_kernels: bool = False
    liger: bool = False
    compile: bool = False
    use_cache: bool = False
    grouped_heads: bool = False
    """A gated delta rule gets fewer key heads than value heads as they are; transformers repeats them up to 5.22."""
    own_convolution: bool = False
    """The bundled trainer's own short convolution takes the place of the model's, where that trainer is installed."""
    trust_remote_code: bool = False
    """Code that the checkpoint brings along is run instead of transformers' own."""
    assumed: tuple[str, ...] = ()
    """Names of the fields above that nobody said."""
    source: str = "command line"
