"""Which configurations can Triton's autotuner pick for the kernels of one call, and what does each of them compute?

What the autotuner picks depends on timing and changes from machine to machine and from day to day, so a call that was
right today proves nothing. While a `Forcing` is active each autotuned kernel that is launched is known, with the
configurations that its own pruning leaves at these shapes, and any of them can be pinned.
"""

from __future__ import annotations

from typing import Any


class Forcing:
    """Sees every autotuned launch of this process, and decides the configuration while `pins` is set."""

    def __init__(self) -> None:
        from triton.runtime import autotuner

        self._class = autotuner.Autotuner
        self._original = autotuner.Autotuner.run
        self._refusals = _refusals()
        self.candidates: dict[str, list[str]] = {}
        """By kernel and tuning key, `chunk_fwd_kernel_o[48,128,64]`: the configurations that can be picked."""
        self.picked: dict[str, str] = {}
        """By that name: the configuration that the autotuner itself took."""
        self.refused: dict[str, set[int]] = {}
        """By that name: the configurations that this GPU cannot run (the autotuner leaves them out as well)."""
        self.row: int | None = None
        """Pin every kernel to its candidate of this number, counted around; None: leave the choice alone."""
        self.pins: dict[str, int] = {}
        """Exceptions from `row`."""
        self.used: dict[str, int] = {}
        """What the last pinned call really ran."""
        self.judged: dict[str, dict[str, str]] = {}
        """By that name, what earlier inputs told about each configuration. A kernel of which everything is known is
        not swept again: it takes a right one, so that only what these inputs bring anew costs time."""

    def take(self) -> None:
        """Stand between every autotuner of this process and its launches, for good."""
        forcing = self

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return forcing._run(tuner, args, kwargs)

        self._class.run = run

    @property
    def rows(self) -> int:
        """How many rows it takes until every configuration of every kernel that is not settled was pinned once."""
        return max((len(c) for n, c in self.candidates.items() if self.settled(n) is None), default=0)

    def settled(self, name: str) -> "int | None":
        """The configuration that a kernel of which everything is known takes; None: it has to be swept."""
        known, configs = self.judged.get(name, {}), self.candidates[name]
        if not all(config in known for config in configs):
            return None
        return next((i for i, config in enumerate(configs) if known[config] == "right"), 0)

    def learn(self, states: "dict[int, str]") -> None:
        """Keep what the rows of these inputs told, for the inputs after them."""
        for name, configs in self.candidates.items():
            if self.settled(name) is not None:
                continue
            for row, state in states.items():
                if state in {"right", "wrong", "error"}:
                    known = self.judged.setdefault(name, {})
                    config = configs[row % len(configs)]
                    # In a row that is not right another kernel may be to blame; a right row clears all of its own.
                    known[config] = "right" if "right" in {state, known.get(config)} else state
            for index in self.refused.get(name, ()):
                self.judged.setdefault(name, {}).setdefault(configs[index], "refused")

    def _run(self, tuner: Any, args: Any, kwargs: Any) -> Any:
        configs = self._configs(tuner, args, kwargs)
        name = self._name(tuner, args, kwargs)
        self.candidates.setdefault(name, [describe(c) for c in configs])
        if self.row is None or len(configs) < 1:
            result = self._original(tuner, *args, **kwargs)
            self.picked[name] = describe(tuner.best_config)
            return result
        settled = self.settled(name)
        first = self.pins.get(name, self.row if settled is None else settled) % len(configs)
        error: BaseException | None = None
        for step in range(len(configs)):
            index = (first + step) % len(configs)
            if index in self.refused.get(name, ()):
                continue
            kept, tuner.configs = tuner.configs, [configs[index]]
            try:
                result = self._original(tuner, *args, **kwargs)
            except self._refusals as refusal:
                self.refused.setdefault(name, set()).add(index)
                error = refusal
                continue
            finally:
                tuner.configs = kept
            self.used[name] = index
            self.picked.setdefault(name, describe(configs[index]))
            return result
        raise error if error is not None else RuntimeError(f"no configuration of {name} can run on this GPU")

    @staticmethod
    def _configs(tuner: Any, args: Any, kwargs: Any) -> list[Any]:
        if len(tuner.configs) == 1:
            return list(tuner.configs)
        # As Autotuner.run does it: pruning looks at the arguments through `nargs`.
        tuner.nargs = dict(zip(tuner.arg_names, args))
        return list(tuner.prune_configs(kwargs))

    @staticmethod
    def _name(tuner: Any, args: Any, kwargs: Any) -> str:
        """The kernel and what its choice is remembered under: the values of its key, and the dtypes of its tensors."""
        named = {k: v for k, v in {**dict(zip(tuner.arg_names, args)), **kwargs}.items() if k in tuner.arg_names}
        key = [str(named[k]) for k in tuner.keys if k in named]
        key.extend(str(v.dtype).replace("torch.", "") for v in named.values() if hasattr(v, "dtype"))
        base = getattr(getattr(tuner, "base_fn", None), "__name__", "kernel")
        return f"{base}[{','.join(key)}]"


def describe(config: Any) -> str:
    """`BK=64 BV=128 num_warps=4 num_stages=3`."""
    if config is None:
        return ""
    words = [f"{name}={value}" for name, value in sorted(config.kwargs.items())]
    words += [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    if getattr(config, "num_ctas", 1) != 1:
        words.append(f"num_ctas={config.num_ctas}")
    if getattr(config, "maxnreg", None):
        words.append(f"maxnreg={config.maxnreg}")
    return " ".join(words)


def _refusals() -> tuple[type[BaseException], ...]:
    """The exceptions that Triton's own autotuner answers by leaving a configuration out, in this version of it."""
    import importlib

    found: list[type[BaseException]] = []
    for module, name in (
        ("triton.runtime.errors", "OutOfResources"),
        ("triton.runtime.errors", "PTXASError"),
        ("triton.compiler.errors", "CompileTimeAssertionFailure"),
    ):
        error = getattr(importlib.import_module(module), name, None)
        if error is not None:
            found.append(error)
    return tuple(found)
