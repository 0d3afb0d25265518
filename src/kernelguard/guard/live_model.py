"""What is the running model bound to and set to: now, after step 1, and beside the models of the other ranks?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kernelguard.guard import batch, live_choices, live_functions, live_layers
from kernelguard.guard.expectation import Expectation, Finding
from kernelguard.workers.bound import dotted


class LiveModel:
    """One model in training, and what was last read from it."""

    def __init__(self, model: Any, expected: Expectation) -> None:
        self.model = model
        self.bound: tuple[live_functions.Bound, ...] = ()
        self.hub: dict[str, str] = {}
        """By layer of the hub, what runs in its place; empty: its own forward."""
        self._expected = expected

    def read(self) -> Iterator[Finding]:
        """Everything that can be read from it now."""
        model, expected = self.model, self._expected
        self.bound = live_functions.read_bound(model, expected)
        replaced = ((name, live_layers.replaced_by(layer)) for name, layer in live_layers.hub_layers(model))
        self.hub = {name: "" if function is None else dotted(function) for name, function in replaced}
        yield from chain(
            live_functions.judge_bound(self.bound, expected),
            live_functions.judge_layers(model, expected),
            live_functions.judge_globals(model),
            live_layers.judge_hub(model, expected),
            live_layers.judge_liger(model, expected),
            live_layers.judge_classes(model, expected),
            live_choices.judge_attention(model, expected),
            live_choices.judge_experts(model, expected),
            live_choices.judge_quantization(model),
            live_choices.judge_export(model),
        )

    def read_again(self) -> Iterator[Finding]:
        """The same, and what is bound to something else than before (row 8)."""
        was_bound = {(entry.module, entry.symbol): entry.value for entry in self.bound}
        was_hub = dict(self.hub)
        yield from self.read()
        now_bound = {(entry.module, entry.symbol): entry.value for entry in self.bound}
        for key, was in was_bound.items():
            is_now = now_bound.get(key, "a function of somebody else's")
            if was != is_now:
                what = f"{key[1]} was {was} when the model was built, and is {is_now} after step 1"
                yield Finding("rebound", "fail", what, "another model in this process rebinds what all share")
        for name, now in self.hub.items():
            if name in was_hub and was_hub[name] != now:
                own = "its own forward"
                what = f"{name} ran {was_hub[name] or own} when the model was built, and {now or own} after step 1"
                yield Finding("rebound", "fail", what, "call model.train() once, before training")

    def judge_batch(self, seen: batch.Seen) -> Iterator[Finding]:
        """What the first batch lacks, or should not have."""
        needed = [batch.SIGNAL_OF_ARGUMENT[name] for name in self._boundary_arguments()]
        # Of the part that reads the tokens.
        config = vars(live_choices.language_part(self.model)[0]).get("config")
        attention = str(getattr(config, "_attn_implementation", "") or "")
        eos = getattr(config, "eos_token_id", None)
        ends = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,) if isinstance(eos, int) else ()
        yield from batch.judge_batch(seen, self._expected, needed, attention, ends)
        symbols = [entry.symbol for entry in self.bound]
        yield from live_choices.judge_cache(symbols, mixer_got_cache=seen.mixer_got_cache)

    def _boundary_arguments(self) -> Iterable[str]:
        """The kernel arguments that keep samples apart, of the kernels that are bound."""
        names = []
        for entry in self.bound:
            if entry.package == "mamba_ssm" or entry.symbol == "causal_conv1d_fn":
                names.append("seq_idx")
            elif entry.package == "fla":
                names.append("cu_seqlens")
        return dict.fromkeys(names)

    def named(self) -> dict[str, str]:
        """What each kernel is bound to, by the names that outcomes and attestations use."""
        return {f"{entry.symbol} in {entry.module.rpartition('.')[2]}": entry.value for entry in self.bound}

    def chosen(self) -> dict[str, str]:
        """What every rank has to have chosen alike, of this rank's model; nothing once the model has been let go."""
        if self.model is None:
            return {}
        found = self.named()
        for name, part in live_choices.sub_models(self.model):
            for what in ("_attn_implementation", "_experts_implementation"):
                found[f"{what.strip('_')} of {name}"] = str(getattr(part.config, what, None))
        return {**found, **{f"hub layer {name}": value or "its own" for name, value in self.hub.items()}}

    def unlike_others(self, folder: Path) -> Iterator[Finding]:
        """Ranks whose models differ, as far as the run's folder shows: the last to write sees them all."""
        mine = self.chosen()
        rank = os.environ.get("RANK", "0") or "0"
        for path in sorted(folder.glob("*.training.json")):
            other = path.name.partition(".")[0]
            try:
                theirs = json.loads(path.read_text("utf-8"))["chosen"]
                differing = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                # It is being written, or is none.
                continue
            for name in differing if other != rank else ():
                what = f"rank {rank} has {name} {mine[name]}, rank {other} has {theirs[name]}"
                yield Finding("ranks-differ", "fail", what, "build the model in one way in every rank")
