"""Run by the observed interpreter: `python live_checks.py CASE...` trains tiny real models with one thing wrong each.

Prints one JSON object: case -> what the guard said of it, as [row, status, text], and whether the step was stopped.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.optim import optimizer as optimizers

import configs
from kernelguard.guard.expectation import Expectation
from kernelguard.guard.ticket import ExpectedPath
from kernelguard.guard.watch import Refused, Watch

T = 16
QWEN3_5 = {**configs.QWEN3_5, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
QWEN3_NEXT = {**configs.QWEN3_NEXT, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ORIGINAL_CALL = torch.nn.Module.__call__
XLSTM = {"model_type": "xlstm", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
RWKV = {"model_type": "rwkv", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32}
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2,
    "num_experts_per_tok": 1, "layer_types": ["full_attention"],
}  # fmt: skip
BOTH = {
    "position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None],
    "seq_idx": torch.tensor([[0] * 9 + [1] * 7], dtype=torch.int32),
    "cu_seq_lens_q": torch.tensor([0, 9, 16], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 9, 16], dtype=torch.int32),
    "max_length_q": 9,
    "max_length_k": 9,
}


def build(raw, **settings):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    for name, value in settings.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).train()


def only(batch, *names):
    return {name: value for name, value in batch.items() if name in names}


def train(model, expected=None, *, batch=None, between=None, any_model=False, steps=2, ids=None):
    """A plain loop; what the guard said, and what is left of it."""
    before = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    watch = Watch(None, on_refusal="raise")
    watch.expected = expected or Expectation()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if any_model:
        watch.wait_for_any_model()
    else:
        watch.wait_for(model, optimizer)
    batch = {"use_cache": False} if batch is None else {"use_cache": False, **batch}
    ids = torch.arange(20, 20 + T)[None] if ids is None else ids
    stopped = ""
    try:
        for step in range(steps):
            for micro in range(2):
                stage = f"step {step}.{micro}"
                loss = model(input_ids=ids, labels=ids, **batch).loss
                stage += " backward"
                loss.backward()
                if between is not None:
                    between(model)
            stage = f"step {step} optimizer"
            optimizer.step()
            optimizer.zero_grad()
    except Refused as refused:
        stopped = f"{stage}: {refused.code}"
    left = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()) - before
    left += len(torch.nn.modules.module._global_forward_pre_hooks)
    left += torch.nn.Module.__call__ is not ORIGINAL_CALL
    left += len(optimizers._global_optimizer_pre_hooks)
    left += len(optimizers._global_optimizer_post_hooks) + len(optimizer._optimizer_step_post_hooks)
    return {
        "findings": [[f.row, f.status, f.what] for f in watch.findings],
        "stopped": stopped,
        "state": watch.state,
        "left": left,
        "bound": {f"{e.symbol}": e.mechanism for e in (watch.live.bound if watch.live else ())},
        "counts": {symbol: n for (_, symbol), n in (watch._counter.counts if watch._counter else {}).items()},
        "ops": sum(watch._trace.ops.values()) if watch._trace else 0,
    }


def qwen_module():
    import transformers.models.qwen3_5.modeling_qwen3_5 as module

    return module


# --- nothing wrong -----------------------------------------------------------------------------------------------


def check_clean():
    return train(build(QWEN3_5))


def check_clean_any_model():
    return train(build(QWEN3_5), any_model=True)


def check_clean_packed():
    expected = Expectation(packed=True, signals=("position_ids", "cu_seq_lens_q", "seq_idx"))
    return train(build(QWEN3_5), expected, batch=BOTH)


def check_clean_signals_of_attention():
    """What the bundled trainer sends: recurrent layers get two of these, attention the others."""
    names = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
    return train(build(QWEN3_5), Expectation(packed=True, signals=names), batch=BOTH)


def check_clean_mamba2():
    return train(build(configs.MAMBA2))


def check_clean_llama():
    return train(build(configs.LLAMA), Expectation(attention="sdpa"))


def check_checkpointing():
    model = build(QWEN3_5)
    model.gradient_checkpointing_enable()
    return train(model, batch=BOTH)


def check_compiled():
    """Compiled, and the same after the guard has gone: hooks that torch.compile traced would compile it again."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = build(configs.LLAMA)
    model.compile(backend=counter)
    answer = train(model, steps=1)
    first = counter.frame_count
    ids = torch.arange(20, 20 + T)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {**answer, "left": 0, "compiled": first, "compiled_again": counter.frame_count - first}


def check_another_model_first():
    """A plain torch model trains before; it is nobody's business."""
    import torch as _torch

    other = _torch.nn.Sequential(_torch.nn.Linear(4, 4), _torch.nn.Linear(4, 1))
    model = build(QWEN3_5)
    watch = Watch(None, on_refusal="raise")
    watch.wait_for_any_model()
    optimizer = _torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        other(_torch.ones(4)).sum().backward()
        optimizer.step()
    waiting = watch.state
    ids = torch.arange(20, 20 + T)[None]
    model(input_ids=ids, labels=ids, use_cache=False)
    began = watch.state
    watch.close()
    return {**train(build(QWEN3_5)), "waiting": waiting, "began": began}


def check_an_evaluation_before():
    model = build(QWEN3_5)
    teacher = build(configs.LLAMA).eval()
    watch = Watch(None, on_refusal="raise")
    watch.wait_for_any_model()
    with torch.no_grad():
        teacher(input_ids=torch.arange(4)[None])
        model.eval()(input_ids=torch.arange(4)[None])
    model.train()
    waiting = watch.state
    watch.close()
    return {**train(model, any_model=True), "waiting": waiting}


# --- rows 1 to 5: what is bound --------------------------------------------------------------------------------------


def check_row_1_absent():
    return train(build(QWEN3_5))


check_row_1_broken = check_row_2_ignored = check_row_3_dropped = check_row_1_absent


def check_row_3_packed():
    return train(build(QWEN3_5), Expectation(packed=True), batch=BOTH)


def check_row_4_layer_attributes():
    return train(build(QWEN3_NEXT))


def check_row_4_gate():
    return train(build(configs.MAMBA2))


def mamba2_for_a_gpu():
    """The helpers of transformers up to 5.14 ask for a GPU, once, when a layer is made."""
    before, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        model = build(configs.MAMBA2)
    finally:
        torch.cuda.is_available = before
    import transformers.models.mamba2.modeling_mamba2 as module

    assert module.is_fast_path_available
    return model


def check_row_5_device():
    return train(mamba2_for_a_gpu(), Expectation(device="cuda"))


def check_row_5_compile():
    model = mamba2_for_a_gpu()
    model.compile(backend="eager")
    return train(model, Expectation(device="cpu"))


# --- rows 6 to 8, 13, 20: what stands in a layer's place ------------------------------------------------------------


LAYERS = """
import torch

class FastNorm(torch.nn.Module):
    can_torch_compile = True
    has_backward = True
    weight: torch.Tensor
    def forward(self, x):
        return x * self.weight

class DecodingNorm(torch.nn.Module):
    has_backward = False
    weight: torch.Tensor
    def forward(self, x):
        return x * self.weight
"""


class PreTrainedModel(torch.nn.Module):
    """What the guard looks for by name, so that these need no transformers whose window has this `kernels`."""


def hub_model():
    """A model with one layer that the hub may replace, through the real `kernels` and a repository on disk."""
    import tempfile
    import types

    import kernels

    @kernels.use_kernel_forward_from_hub("TinyNorm")
    class TinyNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.weight

    class Tiny(PreTrainedModel):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(model_type="tiny")
            self.norm = TinyNorm()

        def forward(self, input_ids, labels, **kwargs):
            return types.SimpleNamespace(loss=self.norm(torch.ones(8)).sum())

    repository = Path(tempfile.mkdtemp()) / "tiny_kernel"
    folder = repository / "build" / "torch-universal"
    folder.mkdir(parents=True)
    about = {"name": "tiny-kernel", "id": "tiny", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (folder / "metadata.json").write_text(json.dumps({**about, "backend": {"type": "cpu"}}))
    (folder / "__init__.py").write_text("from . import layers\n")
    (folder / "layers.py").write_text(LAYERS)

    def kernelize(model, layer, mode):
        place = kernels.LocalLayerRepository(repo_path=repository, layer_name=layer)
        mapping = {"TinyNorm": {"cpu": {mode: place}}}
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=True)

    return Tiny().train(), kernelize, kernels.Mode


def check_row_6_nothing_replaced():
    model, _, _ = hub_model()
    return train(model, Expectation(use_kernels=True))


def check_row_6_replaced():
    model, kernelize, mode = hub_model()
    kernelize(model, "FastNorm", mode.TRAINING)
    return train(model, Expectation(use_kernels=True))


def check_row_6_a_verified_layer():
    model, _, _ = hub_model()
    path = ExpectedPath(symbol="TinyNorm", bound_to="", mechanism="hub", module=__name__)
    return train(model, Expectation(paths=(path,)))


def check_row_7_switched_off():
    import os

    os.environ["USE_HUB_KERNELS"] = "0"
    try:
        return check_row_6_nothing_replaced()
    finally:
        del os.environ["USE_HUB_KERNELS"]


def check_row_8_inference():
    model, kernelize, mode = hub_model()
    kernelize(model.eval(), "DecodingNorm", mode.INFERENCE)
    return train(model.train())


def check_row_8_kernelized_later():
    model, kernelize, mode = hub_model()

    def later(model):
        kernelize(model, "FastNorm", mode.TRAINING)

    return train(model, between=later)


def check_row_8_rebound():
    def another_model_rebinds(model):
        module = qwen_module()
        torch_form = (
            dict(
                zip(
                    module.causal_conv1d_fn.__code__.co_freevars,
                    (c.cell_contents for c in module.causal_conv1d_fn.__closure__),
                )
            )["torch_function"]
            if hasattr(module.causal_conv1d_fn, "__wrapped__")
            else module.causal_conv1d_fn
        )
        module.causal_conv1d_fn = torch_form

    module = qwen_module()
    original = module.causal_conv1d_fn
    try:
        return train(build(QWEN3_5), between=another_model_rebinds)
    finally:
        module.causal_conv1d_fn = original


def check_row_13_liger():
    return train(build(configs.LLAMA), Expectation(liger=True))


def check_row_13_liger_there():
    model = build(configs.LLAMA)
    import liger_kernel

    for layer in model.modules():
        if type(layer).__name__ == "LlamaRMSNorm":
            layer.forward = liger_kernel.forward.__get__(layer)
    return train(model, Expectation(liger=True))


def check_row_20_class():
    model = build(QWEN3_5)

    class Qwen3_5GatedDeltaNet(qwen_module().Qwen3_5GatedDeltaNet):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    for layer in model.modules():
        if type(layer).__name__ == "Qwen3_5GatedDeltaNet":
            layer.__class__ = Qwen3_5GatedDeltaNet
    return train(model)


def check_row_20_forward():
    module = qwen_module()
    original = module.Qwen3_5GatedDeltaNet.forward

    def faster(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    module.Qwen3_5GatedDeltaNet.forward = faster
    try:
        return train(build(QWEN3_5))
    finally:
        module.Qwen3_5GatedDeltaNet.forward = original


# --- rows 9 to 12, 14 to 16, 18: what was chosen ---------------------------------------------------------------------


def check_row_9_attention():
    model = build(configs.LLAMA)
    model.config._attn_implementation = "eager"
    return train(model, Expectation(attention="sdpa"))


def check_row_9_other_part():
    """A part of the model that resolves its attention by itself."""
    model = build(configs.LLAMA)
    part = build(configs.LLAMA).model
    part.config._attn_implementation = "eager"
    model.side = part
    return train(model, Expectation(attention="sdpa"))


def check_row_10_math():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name = "scaled_dot_product_attention"
    expected = Expectation(fallbacks={name: ("aten::_scaled_dot_product_attention_math",)}, device="cpu")
    with sdpa_kernel(SDPBackend.MATH):
        return train(build(configs.LLAMA), expected)


def check_row_11_eager():
    return train(build(QWEN3_NEXT, _experts_implementation="eager"))


def check_row_11_fallback():
    expected = Expectation(fallbacks={"grouped_mm": ("transformers::grouped_mm_fallback",)}, device="cpu")
    model = build(GPT_OSS, _experts_implementation="grouped_mm")
    for layer in model.modules():
        if type(layer).__name__.endswith("Experts"):
            # While torch.compile traces, weights that are not bfloat16 go around torch's grouped product.
            layer.compile(backend="eager")
    return train(model, expected)


def check_row_12_dequantized():
    model = build(GPT_OSS, _experts_implementation="grouped_mm")
    model.config.quantization_config = {"quant_method": "mxfp4", "dequantize": True}
    return train(model)


def check_row_14_not_loaded():
    return train(build(RWKV))


def check_row_15_xlstm():
    return train(build(XLSTM))


def check_row_15_mambapy():
    return train(build({**configs.JAMBA, "num_hidden_layers": 2}, use_mambapy=True))


def check_row_16_cache():
    return train(build(configs.MAMBA2), batch={"use_cache": True})


def check_row_16_cache_that_costs_nothing():
    return train(build(QWEN3_5), batch={"use_cache": True})


def check_row_18_exporting():
    torch.compiler._is_exporting_flag, before = True, torch.compiler._is_exporting_flag
    try:
        return train(build(configs.LLAMA))
    finally:
        torch.compiler._is_exporting_flag = before


def check_row_18_graph():
    model = build(configs.LLAMA)
    model.lm_head = torch.fx.symbolic_trace(model.lm_head)
    return train(model)


# --- row 17: the first batch -----------------------------------------------------------------------------------------


def check_row_17_positions_only():
    return train(build(QWEN3_5), batch=only(BOTH, "position_ids"))


def check_row_17_no_seq_idx():
    return train(build(QWEN3_5), batch={n: v for n, v in BOTH.items() if n != "seq_idx"})


def check_row_17_no_cuts():
    return train(build(QWEN3_5), batch=only(BOTH, "position_ids", "seq_idx"))


def check_row_17_nothing_in_a_packed_run():
    return train(build(QWEN3_5), Expectation(packed=True, signals=("cu_seq_lens_q", "seq_idx")))


def check_row_17_disagree():
    cuts = torch.tensor([0, 8, 16], dtype=torch.int32)
    return train(build(QWEN3_5), batch={**BOTH, "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts})


def check_row_17_empty_sample():
    cuts = torch.tensor([0, 9, 9, 16], dtype=torch.int32)
    return train(build(QWEN3_5), batch={**BOTH, "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts})


def check_row_17_attention_without_a_mask():
    """An all-ones mask makes transformers leave the mask between samples out."""
    batch = {**only(BOTH, "position_ids"), "attention_mask": torch.ones(1, T, dtype=torch.long)}
    return train(build(configs.LLAMA), batch=batch)


def check_row_17_attention_with_its_mask():
    return train(build(configs.LLAMA), batch=only(BOTH, "position_ids"))


def check_row_17_padding_on_the_left():
    mask = torch.tensor([[0] * 3 + [1] * 13])
    ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return train(build(QWEN3_5), batch={"attention_mask": mask, "position_ids": ids})


def check_row_17_ends_of_text_inside():
    ids = torch.arange(T)[None] % 64
    ids[0, 5] = ids[0, 11] = 63
    return train(build(QWEN3_5, eos_token_id=63), ids=ids)


# --- row 19: bound, and gone around -----------------------------------------------------------------------------------


def check_row_19_never_called():
    name = "transformers.models.qwen3_5.modeling_qwen3_5"
    sites = {
        (name, symbol): {
            "kind": "closure", "module": name, "name": attribute, "package": package, "symbol": symbol,
            "import_module": package,
        }
        for attribute, symbol, package in (
            ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d"),
            ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla"),
        )
    }  # fmt: skip
    paths = tuple(ExpectedPath(symbol=s, bound_to="", mechanism="package", module=m, layers=1) for m, s in sites)
    expected = Expectation(ticketed=True, paths=paths, sites=sites, device="cpu")
    raw = {**QWEN3_5, "layer_types": ["full_attention"] * 2}
    return {"goes_around": train(build(raw), expected), "calls": train(build(QWEN3_5), expected)}


def main() -> None:
    found = {}
    for name in sys.argv[1:]:
        try:
            found[name] = globals()[f"check_{name}"]()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
