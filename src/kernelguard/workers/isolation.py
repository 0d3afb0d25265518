"""Do the samples of a packed batch stay apart in this model, with these boundary signals?

Run by the observed interpreter as `python isolation.py request.json result.jsonl`. Standard library, torch and
transformers only. A model of the real configuration, cut down to one layer of each kind, gets several samples in one
row, with slow-decay gates: a freshly made model forgets within a few tokens, so that a leak hides in the rounding.
For each set of signals, and with each layer alone:

- the gradient of one sample's loss with respect to every other sample's embeddings is exactly 0;
- replacing one sample leaves the other samples' logits bit-identical, or moves them by no more than a rounding of the
  embeddings does: Mamba-2's scan adds up across a boundary and subtracts again, which no gradient sees;
- packed equals one sample at a time: the loss, and the gradient of every parameter.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib
import importlib.util
import itertools
import json
import math
import re
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_LAYER = re.compile(r"^(?:[a-z_]+\.)*?(?:layers|h|blocks)\.\d+$")
_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def _sibling(name: str) -> Any:
    """A module of `probes/`, loaded by path."""
    spec = importlib.util.spec_from_file_location(f"kernelguard_{name}", os.path.join(_HERE, "probes", f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{_HERE} has no probes/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorder(path: str) -> Any:
    """What writes records to this file."""
    return _sibling("records").Recorder(path)


def _pin_first(out: Any) -> None:
    """Let every autotuned kernel take its first configuration that runs here.

    Leaving a signal out makes the model call kernels that its training never calls; tuning them would take minutes, and
    whether samples stay apart does not depend on it.
    """
    if "triton.runtime.autotuner" not in sys.modules:
        return
    try:
        forcing = _sibling("autotune").Forcing()
        forcing.row = 0
        forcing.take()
    except Exception as error:
        out.error("autotuner", error)


class Model:
    """The cut-down model, its samples, and what is computed with them."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        import torch

        self.torch = torch
        self.out = out
        self.device = request.get("device", "cuda")
        self.dtype = getattr(torch, request["dtype"])
        self.lengths = list(request["lengths"])
        self.cuts = list(itertools.accumulate(self.lengths, initial=0))
        out.stage("import transformers")
        self.config = _config(request)
        out.stage("build the model")
        torch.manual_seed(request.get("seed", 0))
        self.model = _build(self.config, request).to(self.device).train()
        if request.get("grouped_heads") and self.device == "cuda":
            keep_groups(self.model)
        self.vocabulary = int(self.config.vocab_size)
        _slow_gates(torch, self.model)
        generator = torch.Generator().manual_seed(request.get("seed", 0))
        total = self.cuts[-1]
        self.ids = torch.randint(0, self.vocabulary, (total,), generator=generator).to(self.device)
        self.other_ids = torch.randint(0, self.vocabulary, (total,), generator=generator).to(self.device)
        self.labels = torch.randint(0, self.vocabulary, (total,), generator=generator).to(self.device)
        self.embed = self.model.get_input_embeddings()

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of every sample."""
        return list(zip(self.cuts, self.cuts[1:]))

    def signals(self, names: Any) -> dict[str, Any]:
        """The keyword arguments of the model's forward that carry these signals."""
        torch = self.torch
        found: dict[str, Any] = {}
        if "position_ids" in names:
            found["position_ids"] = torch.cat([torch.arange(n) for n in self.lengths])[None].to(self.device)
        if any(n.startswith("cu_seq_lens") for n in names):
            cuts = torch.tensor(self.cuts, dtype=torch.int32, device=self.device)
            found.update(cu_seq_lens_q=cuts, cu_seq_lens_k=cuts)
            found.update(max_length_q=max(self.lengths), max_length_k=max(self.lengths))
        if "seq_idx" in names:
            numbers = [i for i, n in enumerate(self.lengths) for _ in range(n)]
            found["seq_idx"] = torch.tensor([numbers], dtype=torch.int32, device=self.device)
        return found

    def logits(self, embedded: Any, signals: Any) -> Any:
        """[T, vocabulary] in fp32."""
        return self.model(inputs_embeds=embedded, use_cache=False, **signals).logits[0].float()

    def loss(self, logits: Any, labels: Any) -> Any:
        """The sum over tokens, so that samples add up."""
        return self.torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def check(self, names: Any) -> dict[str, Any]:
        """Everything about one set of signals."""
        torch = self.torch
        signals = self.signals(names)
        self.out.stage(f"{'+'.join(names) or 'no signal'}: gradients")
        embedded = self.embed(self.ids)[None].detach().requires_grad_()
        captured = _Capture(self.model)
        captured.start()
        logits = self.logits(embedded, signals)
        captured.stop()
        _finite("logits", logits)
        leak, own = 0.0, 0.0
        for a, b in self.spans():
            loss = self.loss(logits[a:b], self.labels[a:b])
            (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
            _finite("a sample's own gradient", gradient[0, a:b])
            leak = max(leak, _largest(torch.cat([gradient[0, :a], gradient[0, b:]])))
            own = max(own, _largest(gradient[0, a:b]))
        self.out.stage(f"{'+'.join(names) or 'no signal'}: logits")
        with torch.no_grad():
            before = logits.detach()
            tremor = _largest(self.logits(embedded.detach(), signals) - before)
            shaken = self.logits(self.shaken(embedded.detach(), torch.finfo(self.dtype).eps / 2), signals)
            _finite("logits", shaken)
            rounding = _largest(shaken - before)
            moved = 0.0
            for a, b in self.spans():
                ids = self.ids.clone()
                ids[a:b] = self.other_ids[a:b]
                after = self.logits(self.embed(ids)[None], signals)
                difference = after - before
                difference[a:b] = 0.0
                moved = max(moved, _largest(difference))
        self.out.stage(f"{'+'.join(names) or 'no signal'}: layers")
        layers = captured.leaks(torch, self.spans())
        return {
            "leak_gradient": leak, "own_gradient": own, "leak_logit": moved, "tremor": tremor,
            "allowed_logit": 2.0 * max(tremor, rounding), "layers": layers,
        }  # fmt: skip

    def shaken(self, embedded: Any, wobble: float) -> Any:
        """The embeddings, each moved by about that relative amount: always the same numbers."""
        torch = self.torch
        generator = torch.Generator(device=self.device).manual_seed(1)
        noise = torch.randn(embedded.shape, generator=generator, device=self.device, dtype=torch.float32)
        return embedded + (embedded.float() * noise * wobble).to(embedded.dtype)

    def gradients(self, signals: Any) -> tuple[float, dict[str, Any]]:
        """Loss and parameter gradients of the packed row."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(self.logits(self.embed(self.ids)[None], signals), self.labels) / self.cuts[-1]
        loss.backward()
        return float(loss.detach()), self._grads()

    def gradients_apart(self, wobble: float = 0.0) -> tuple[float, dict[str, Any]]:
        """The same, one sample at a time; `wobble` moves each embedding by that relative amount."""
        torch = self.torch
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for a, b in self.spans():
            embedded = self.embed(self.ids[a:b])[None]
            if wobble:
                embedded = self.shaken(embedded, wobble)
            positions = {"position_ids": torch.arange(b - a, device=self.device)[None]}
            loss = self.loss(self.logits(embedded, positions), self.labels[a:b]) / self.cuts[-1]
            loss.backward()
            total += float(loss.detach())
        return total, self._grads()

    def _grads(self) -> dict[str, Any]:
        return {n: p.grad.detach().double() for n, p in self.model.named_parameters() if p.grad is not None}


class _Capture:
    """Remembers what each layer of the model was called with, to run it again alone."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[str, Any, Any, Any]] = []
        self._handles: list[Any] = []
        # `model.layers.0`, and not the modules of a list inside it (`model.layers.0.experts.3`).
        self._layers = [(n, m) for n, m in model.named_modules() if _LAYER.match(n)]

    def start(self) -> None:
        """From now on."""
        for name, module in self._layers:

            def remember(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                self.calls.append((name, module, args, kwargs))

            self._handles.append(module.register_forward_pre_hook(remember, with_kwargs=True))

    def stop(self) -> None:
        """Not any more."""
        for handle in self._handles:
            handle.remove()

    def leaks(self, torch: Any, spans: Any) -> list[dict[str, Any]]:
        """For each layer alone: the largest gradient that one sample's output has in another sample's input."""
        found = []
        for name, module, args, kwargs in self.calls:
            hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
            output = module(hidden, *args[1:], **kwargs) if args else module(**{**kwargs, "hidden_states": hidden})
            output = output[0] if isinstance(output, tuple) else output
            weights = torch.linspace(0.5, 1.5, output.shape[-1], device=output.device, dtype=output.dtype)
            leak = 0.0
            for a, b in spans:
                (gradient,) = torch.autograd.grad((output[:, a:b] * weights).sum(), hidden, retain_graph=True)
                leak = max(leak, _largest(gradient[:, :a]), _largest(gradient[:, b:]))
            kind = getattr(module, "layer_type", "") or getattr(module, "attention_type", "")
            inside = [type(m).__name__ for _, m in module.named_children() if "Norm" not in type(m).__name__]
            found.append({"layer": name, "kind": str(kind or "+".join(inside)), "leak": leak})
        return found


def _largest(values: Any) -> float:
    """The largest size; one that is no finite number is larger than all, where `max` would pass over NaN."""
    if not values.numel():
        return 0.0
    found = float(values.abs().max())
    return found if math.isfinite(found) else 1e30


def _finite(what: str, values: Any) -> None:
    """Nothing can be told from numbers that are none."""
    if not bool(values.isfinite().all()):
        raise ValueError(f"{what}: not finite in the cut-down model")


def _config(request: dict[str, Any]) -> Any:
    """The model's own configuration class, cut down."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    tried = []
    for part in request["parts"]:
        model_type = part["model_type"]
        if model_type not in CONFIG_MAPPING:
            tried.append(f"{model_type}: unknown to this transformers")
            continue
        config = CONFIG_MAPPING[model_type].from_dict(cut(part["raw"], request.get("vocabulary", 512)))
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            config.use_cache = False
            return config
        tried.append(f"{model_type}: no causal language model")
    raise ValueError("no part of this configuration is a language model: " + "; ".join(tried))


def cut(raw: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The configuration with one layer of each kind (two at least), and a small vocabulary."""
    short = dict(raw)
    count = int(raw.get("num_hidden_layers") or raw.get("n_layer") or 2)
    name = next((n for n in _KINDS if isinstance(raw.get(n), (list, str)) and len(raw[n]) == count), "")
    if name:
        kinds = list(raw[name])
        keep = sorted({kinds.index(kind) for kind in kinds})
    elif isinstance(raw.get("attn_layer_indices"), list) and raw["attn_layer_indices"]:
        attention = raw["attn_layer_indices"][0]
        keep = sorted({attention, next((i for i in range(count) if i not in raw["attn_layer_indices"]), attention)})
        short["attn_layer_indices"] = [keep.index(attention)]
    else:
        period = next((int(raw[n]) for n in ("attn_layer_period", "full_attention_interval") if raw.get(n)), 2)
        keep = list(range(min(max(period, 2), count)))
    if len(keep) < 2:
        keep = (keep + [i for i in range(count) if i not in keep])[:2]
    for key, value in raw.items():
        if isinstance(value, (list, str)) and len(value) == count and (key in _KINDS or isinstance(value, list)):
            chosen = [value[i] for i in keep]
            short[key] = "".join(chosen) if isinstance(value, str) else chosen
    short["num_hidden_layers"] = len(keep)
    short["vocab_size"] = min(vocabulary, int(raw.get("vocab_size") or vocabulary))
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if key in short:
            short[key] = None
    return short


def _build(config: Any, request: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {}
    if request.get("attn_implementation"):
        options["attn_implementation"] = request["attn_implementation"]
        if request["attn_implementation"] == "varlen":
            _sibling("varlen").register()
    if request.get("experts_implementation"):
        options["experts_implementation"] = request["experts_implementation"]
    with torch.device(request.get("device", "cuda")):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request["dtype"]), **options)


def keep_groups(model: Any) -> None:
    """Hand key heads to the fused gated delta rule as they are, as kernelguard_train's fused layers do.

    What the model's own code repeated before the call is taken back, so the training's kernels run and not others.
    """
    for module in model.modules():
        keys, values = getattr(module, "num_k_heads", None), getattr(module, "num_v_heads", None)
        if not isinstance(keys, int) or keys == values:
            continue
        for holder in (module, sys.modules[type(module).__module__]):
            for name in ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"):
                function = vars(holder).get(name)
                if callable(function) and not hasattr(function, "keeps_groups"):
                    setattr(holder, name, _grouped(function, keys))


def _grouped(function: Any, keys: int) -> Any:
    def call(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        every = query.shape[2] // keys
        return function(query[:, :, ::every].contiguous(), key[:, :, ::every].contiguous(), *args, **kwargs)

    call.keeps_groups = True  # type: ignore[attr-defined]
    return call


def _slow_gates(torch: Any, model: Any) -> None:
    """Gates that remember, as trained ones do: exp(A_log) near exp(-5), and small steps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last == "A_log":
                parameter.copy_(-5.0 + 0.1 * torch.randn_like(parameter))
            elif last == "dt_bias":
                parameter.copy_(0.1 * torch.randn_like(parameter))


def main(request: dict[str, Any], out: Any) -> None:
    """One record for each set of signals."""
    out.stage("import torch")
    try:
        torch = importlib.import_module("torch")
        torch.backends.cuda.matmul.allow_tf32 = False
        out.stage("cuda")
        if request.get("device", "cuda") == "cuda":
            torch.cuda.init()
        model = Model(request, out)
        _pin_first(out)
        transformers = sys.modules["transformers"]
        out.write("built", model=type(model.model).__name__, transformers=transformers.__version__)
    except BaseException as error:
        out.error("build", error)
        return
    apart: Any = None
    for number, check in enumerate(request["checks"]):
        names = check["signals"]
        try:
            found = model.check(names)
        except BaseException as error:
            out.error("signals", error, number=number)
            continue
        try:
            if check.get("parameters"):
                out.stage("one sample at a time")
                if apart is None:
                    half = torch.finfo(model.dtype).eps / 2
                    apart = (*model.gradients_apart(), model.gradients_apart(half)[1])
                found.update(_equivalence(model, names, apart))
        except BaseException as error:
            out.error("parameters", error, number=number)
        out.write("signals", number=number, **found)


def _equivalence(model: Model, names: Any, apart: Any) -> dict[str, Any]:
    """Packed beside one at a time, with what rounding does to each gradient beside it."""
    model.out.stage(f"{'+'.join(names)}: parameters")
    loss, packed = model.gradients(model.signals(names))
    loss_apart, single, shaken = apart
    parameters = {}
    for name, gradient in single.items():
        size = float(gradient.norm()) or 1.0
        error = float((packed[name] - gradient).norm()) / size if name in packed else 1e30
        parameters[name] = (error, float((shaken[name] - gradient).norm()) / size)
    return {"loss_packed": loss, "loss_unpacked": loss_apart, "parameters": parameters}


if __name__ == "__main__":
    _out = recorder(sys.argv[2])
    with open(sys.argv[1], encoding="utf-8") as _handle:  # noqa: PTH123  # as in every worker, without pathlib
        _request = json.load(_handle)
    main(_request, _out)
    _out.done()
