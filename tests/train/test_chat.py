"""Response masks on real templates (those that trl ships) and on malformed conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl

from kernelguard_train.chat import load_chat
from kernelguard_train.errors import DataError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MULTI = [
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Second answer."},
]


def trained_runs(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> list[str]:
    """The text of each run of trained tokens."""
    sample = load_chat(tokenizer, template).encode("row 7", messages)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.trained.astype(int), [0]])))
    return [tokenizer.decode(sample.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


THINK = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("qwen3_5_think_training", THINK, "<|im_end|>\n"),
        ("qwen3_5_nothink_training", THINK, "<|im_end|>\n"),
        ("qwen3_6_training", THINK, "<|im_end|>\n"),
        ("qwen3_8_training", THINK, "<|im_end|>\n"),
        ("qwen3_8", "\n</think>\n\n", "<|im_end|>"),
        ("qwen3_instruct_2507", "", "<|im_end|>"),
        ("qwen2_5_training", "\n", "<|im_end|>\n"),
        ("qwen2_5", "", "<|im_end|>"),
        ("llama3_1", "", "<|eot_id|>"),
        ("llama3_2", "", "<|eot_id|>"),
    ],
)
def test_real_templates_train_exactly_the_answers(tokenizer: Any, name: str, opening: str, closing: str) -> None:
    tokenizer = _with_bos(tokenizer)
    runs = trained_runs(tokenizer, str(TEMPLATES / f"{name}.jinja"), MULTI)
    assert runs == [f"{opening}First answer.{closing}", f"{opening}Second answer.{closing}"]


def _with_bos(tokenizer: Any) -> Any:
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens(
        {"bos_token": "<|begin_of_text|>", "additional_special_tokens": ["<|im_start|>", "<|eot_id|>"]}
    )
    return tokenizer


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"])
def test_a_template_whose_prefix_is_not_a_prefix_is_refused_by_sample(tokenizer: Any, name: str) -> None:
    path = str(TEMPLATES / f"{name}.jinja")
    with pytest.raises(DataError, match=r"row 7: .* is not how the whole conversation begins") as caught:
        load_chat(tokenizer, path).encode("row 7", MULTI)
    assert "data.chat_template=trl" in str(caught.value)
    single = trained_runs(tokenizer, path, MULTI[:2])  # one turn is fine with the same template
    assert len(single) == 1
    assert single[0].endswith("First answer.<|im_end|>")
    assert "First question" not in single[0]


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_8", "qwen3"])
def test_trl_is_asked_for_the_prefix_safe_template(tokenizer: Any, name: str) -> None:
    import copy

    stock = copy.deepcopy(tokenizer)
    stock.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    chat = load_chat(stock, "trl")
    assert chat.marked
    assert trained_runs(stock, "trl", MULTI) == [f"{THINK}{t}<|im_end|>\n" for t in ("First answer.", "Second answer.")]


def test_a_marked_template_that_lies_is_caught(tokenizer: Any, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped.jinja"
    swapped.write_text(
        "{%- for m in messages %}{%- if m.role == 'user' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
    )
    with pytest.raises(DataError, match="row 7: what the template marked as assistant turn 0 does not hold its text"):
        load_chat(tokenizer, str(swapped)).encode("row 7", MULTI)
    once = tmp_path / "once.jinja"
    once.write_text("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    with pytest.raises(DataError, match="marked 1 generated spans for 2 assistant turns"):
        load_chat(tokenizer, str(once)).encode("row 7", MULTI)


def test_sharegpt_names_and_absent_keys_are_understood(tokenizer: Any) -> None:
    messages = [
        {"from": "human", "value": "Q", "tool_calls": None},
        {"from": "gpt", "value": "Answer.", "tool_calls": None},
    ]
    assert trained_runs(tokenizer, "", messages) == ["Answer.<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("text", "expected a non-empty list of turns"),
        ([], "expected a non-empty list of turns"),
        ([{"role": "user", "content": "Q"}], "no assistant turn"),
        ([{"role": "user"}, {"role": "assistant", "content": "A"}], r"turn 0 \(user\) has no content"),
        ([{"content": "Q"}], "turn 0 has no role"),
        (["Q", "A"], "turn 0 is 'Q'"),
    ],
)
def test_malformed_conversations_are_named(tokenizer: Any, messages: Any, expected: str) -> None:
    with pytest.raises(DataError, match=f"row 7: .*{expected}"):
        load_chat(tokenizer, "").encode("row 7", messages)


def test_a_template_that_refuses_is_quoted(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "strict.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="row 7: the chat template refused it: TemplateError: roles must alternate"):
        load_chat(tokenizer, str(path)).encode("row 7", MULTI)


def test_a_token_across_the_border_to_the_prompt_is_not_trained(tokenizer: Any, tmp_path: Path) -> None:
    # A prompt that ends inside a merged token must not train that token.
    path = tmp_path / "glued.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    whole = tokenizer("Usually", add_special_tokens=False)["input_ids"]
    assert len(whole) == 1, "the premise: this word is one token"
    sample = load_chat(tokenizer, str(path)).encode(
        "row 7", [{"role": "user", "content": "Usu"}, {"role": "assistant", "content": "ally is"}]
    )
    assert sample.ids[0] == whole[0]
    assert sample.trained.tolist() == [False] + [True] * (len(sample) - 1)
