"""What can the code choose between that is no function of a kernel package? Hub layers, attention, experts and others.

A fast path is bound when a module is imported, and a worker can look at it. These are decided later, when the model is
built or called, from a setting, the configuration or the GPU; `judge/modes.py` says what a run makes of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsWindow:
    """Which releases of the `kernels` package this transformers takes for installed: minimum <= release < maximum."""

    minimum: Version | None
    maximum: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOption:
    """One entry of the hub mapping: which repository serves a layer on which device and in which mode."""

    device: str
    """`cuda`, `rocm`, `xpu`, `cpu`, ..."""
    training: bool
    """It is taken while the model trains."""
    repository: str
    wrong_gradient: str = ""
    """What is wrong with its backward; empty: nothing that is known."""
    minimum_capability: tuple[int, int] | None = None
    maximum_capability: tuple[int, int] | None = None
    versioned: bool = False
    """It is asked for by a version number, which only the hub can turn into a commit."""

    def serves(self, capabilities: Iterable[tuple[int, int]]) -> bool:
        """Whether it is for GPUs of all these compute capabilities; of none: it may be."""
        lowest, highest = self.minimum_capability or (0, 0), self.maximum_capability or (99, 9)
        return all(lowest <= capability <= highest for capability in capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLayer:
    """One class or function that `use_kernels=True` can replace."""

    layer: str
    """The name that the mapping knows it by, `RMSNorm`."""
    name: str
    """The decorated class or function."""
    model_type: str
    file: str
    line: int
    mapped: bool
    """The mapping has that name; False: it is never replaced."""
    options: tuple[HubOption, ...] = ()
    package: str = ""
    """The installed package that serves the function when the hub does not; empty: PyTorch code does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLayers:
    """Everything that `use_kernels=True` can replace in this model, and when it can at all."""

    layers: tuple[HubLayer, ...]
    window: KernelsWindow
    obeys_switch: bool
    """`USE_HUB_KERNELS=0` takes the decorators away (not yet in 4.57)."""
    unread: tuple[str, ...] = ()
    """What of the mapping could not be read; it matters only to a run that asks for hub kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLoad:
    """A hub kernel that a layer of the model fetches by itself when it is built or first called."""

    repository: str
    name: str
    """The module global that holds it."""
    model_type: str
    file: str
    line: int
    window: KernelsWindow
    needs_ninja: bool
    """Without the ninja package (or a GPU) it is not even tried, and nothing is said."""
    level: str | None
    """At which level a failure is logged."""
    in_training: bool
    """False: only used after the forward pass, in inference."""
    effect: str
    """What happens without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which attention implementations one (sub-)model's class supports. None: the flag is no literal."""

    path: str
    """Of the part in config.json; empty for the top."""
    model_type: str
    model_class: str
    file: str
    line: int
    sdpa: bool | None
    flash: bool | None
    flex: bool | None
    compatible: tuple[str, ...]
    """The only flash implementations it works with, best first; empty: any."""
    own: tuple[str, ...]
    """Attention classes that this part alone brings in; empty: it has none."""
    configured: str | None
    """What the configuration itself asks for."""
    surely_built: bool
    """The model's code builds this class; False: it could not be told."""
    window: KernelsWindow
    hub_flash: tuple[tuple[str, str], ...]
    """Which repository replaces a flash attention that is not installed, by implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a mixture-of-experts layer computes its experts."""

    model_type: str
    experts_class: str
    file: str
    line: int
    selectable: bool
    """The model's class lets an implementation be chosen, `grouped_mm` by default."""
    decorated: bool
    """The experts class itself does."""
    checks_capability: bool
    """An older GPU gets the Python loop without a word; False: torch raises there."""
    configured: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """A checkpoint whose experts are stored in mxfp4."""

    path: str
    model_type: str
    dequantize: bool
    """The configuration asks for bf16 itself."""
    minimum_capability: tuple[int, int]
    minimum_triton: Version
    window: KernelsWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerSupport:
    """What liger-kernel does with this model's type."""

    model_type: str
    """As `model.config.model_type` will be."""
    releases: tuple[tuple[Version, bool], ...]
    """Releases that were read, oldest first, and whether each knows the type."""
    minimum: Version
    """transformers takes anything older for absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysSlow:
    """A part that runs PyTorch code whatever is installed; nothing in the source would tell."""

    model_type: str
    what: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSplit:
    """A fused kernel that is only called in training while no cache is passed along."""

    symbol: str
    model_type: str
    owner: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMask:
    """A text part that asks for its attention mask without `position_ids`: no packed sample gets one of its own."""

    path: str
    """Of the part in config.json; empty for the top."""
    model_type: str
    file: str
    line: int
    is_library_mask: bool = True
    """False: it asks transformers for none; how it makes its own, or that it makes none, was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashBoundary:
    """A text part whose attention keeps `position_ids` to itself: flash attention does not learn of samples by them."""

    path: str
    """Of the part in config.json; empty for the top."""
    model_type: str
    attention: str
    """The layer's class."""
    file: str
    line: int
    hands_on: bool
    """The layer hands on what it does not name, such as `cu_seq_lens_q`, if it gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriesState:
    """A part that carries state over a whole row and takes no sample boundaries; known from reading it."""

    model_type: str
    what: str
    source: str


ModeFact = (
    HubLayers
    | HubLoad
    | Attention
    | Experts
    | Mxfp4
    | LigerSupport
    | AlwaysSlow
    | CacheSplit
    | SampleMask
    | FlashBoundary
    | CarriesState
)
