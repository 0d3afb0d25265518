"""What are the layers of a model called with, the first time? Seen through hooks on a few of them."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

from kernelguard.guard import batch, live_choices, live_functions


@dataclass
class Hooks:
    """Everything that has to be taken away again."""

    handles: list[Any] = field(default_factory=list)

    def add(self, handle: Any) -> None:
        """One more."""
        self.handles.append(handle)

    def remove(self) -> None:
        """All of them."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


class Eyes:
    """What was seen of the first batch."""

    def __init__(self) -> None:
        self.seen = batch.Seen()

    def look(self, model: Any, entries: Iterable[live_functions.Bound], hooks: Hooks) -> None:
        """Remember what the embedding, one recurrent layer and one attention layer are first called with."""
        parts = live_choices.sub_models(model)
        language, embedding = live_choices.language_part(model)
        if embedding is not None:
            hooks.add(embedding.register_forward_pre_hook(self._saw_ids))
        for _, part in parts:
            if part is not model:
                hooks.add(part.register_forward_pre_hook(self._saw_call, with_kwargs=True))
        owners = live_functions.owners_of(model, entries)
        for layer in owners:
            hooks.add(layer.register_forward_pre_hook(self._saw_mixer, with_kwargs=True))
        # A vision tower's attention has no mask, and needs none.
        attention = next((m for m in language.modules() if type(m).__name__.endswith("Attention")), None)
        if attention is not None:
            hooks.add(attention.register_forward_pre_hook(self._saw_attention, with_kwargs=True))
        for layer in live_functions.decoder_layers(language):
            hooks.add(layer.register_forward_pre_hook(self._saw_call, with_kwargs=True))

    def saw_the_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], mixers: Sized, *, whole: bool) -> None:
        """What the model itself was called with; of a compiled one (`whole`) nothing else can be seen."""
        tensors = {name: value.detach() for name, value in kwargs.items() if hasattr(value, "detach")}
        self.seen.input_ids = tensors.get("input_ids", args[0].detach() if args and hasattr(args[0], "dim") else None)
        self.seen.position_ids = tensors.get("position_ids")
        if whole:
            self.seen.mixers = len(mixers)
            self.seen.mixer = {name: tensors[name] for name in ("seq_idx", "cu_seq_lens_q") if name in tensors}

    def _saw_ids(self, _module: Any, args: Any) -> None:
        if self.seen.input_ids is None and args and hasattr(args[0], "dim"):
            self.seen.input_ids = args[0].detach()

    def _saw_call(self, _module: Any, _args: Any, kwargs: Any) -> None:
        ids = kwargs.get("position_ids")
        if self.seen.position_ids is None and hasattr(ids, "dim"):
            self.seen.position_ids = ids.detach()

    def _saw_mixer(self, _module: Any, _args: Any, kwargs: Any) -> None:
        self.seen.mixers += 1
        if any(kwargs.get(name) is not None for name in ("cache", "cache_params", "past_key_values", "past_key_value")):
            self.seen.mixer_got_cache = True
        for name in ("seq_idx", "cu_seq_lens_q", "cu_seqlens"):
            if name not in self.seen.mixer and hasattr(kwargs.get(name), "dim"):
                self.seen.mixer[name] = kwargs[name].detach()

    def _saw_attention(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self.seen.attention:
            return
        names = live_functions.signature_names(type(_module).forward)[1:]
        given = {**dict(zip(names, args)), **kwargs}
        self.seen.attention = {name: given.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids")}
