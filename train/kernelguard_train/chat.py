"""Which tokens of a conversation are trained on?

The answer tokens of every assistant turn, and nothing else. A template that marks them (`{% generation %}`) says so
itself. For any other template each turn is located by rendering the conversation up to it, and that rendering is used
only if it really is the beginning of the whole text: Qwen3.5's template, for one, writes an empty think block only
after the last user turn, so earlier turns look different on their own, and a mask found by length would be shifted.
Where the check fails the sample is refused with its name. A mask is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.utils.chat_template_utils import render_jinja_template

from kernelguard_train.errors import DataError

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One tokenised conversation."""

    name: str
    """Where it came from, as a person can find it: `file:line`, or data set and row."""
    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    """Per token: is it an answer token, to be predicted?"""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A tokenizer with the template that conversations are rendered with."""

    tokenizer: Any
    template: str

    @property
    def marked(self) -> bool:
        """Whether the template itself says which text is generated."""
        return bool(_MARKER.search(self.template))

    def encode(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """Tokens and mask of one conversation.

        Raises:
            DataError: naming the sample, when it is malformed or its mask cannot be established.
        """
        turns = _checked(name, messages)
        text, spans = self._marked_spans(name, turns) if self.marked else self._prefix_spans(name, turns)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            # A token that straddles the border to the prompt is not trained: at inference it could not be produced.
            trained |= (starts >= start) & (ends <= end) & (ends > starts)
        if not trained.any():
            raise DataError(f"{name}: no token of an assistant turn is left to train on")
        return Sample(name=name, ids=ids, trained=trained)

    def _render(self, name: str, turns: Sequence[dict[str, Any]], *, prompt: bool = False, marks: bool = False) -> Any:
        special = {k: v for k, v in self.tokenizer.special_tokens_map.items() if isinstance(v, str)}
        try:
            texts, marked = render_jinja_template(
                conversations=[list(turns)],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **special,
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise DataError(f"{name}: the chat template refused it: {type(error).__name__}: {error}") from error
        return texts[0], (marked[0] if marks else [])

    def _marked_spans(self, name: str, turns: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._render(name, turns, marks=True)
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        if len(spans) != len(answers):
            raise DataError(
                f"{name}: the template marked {len(spans)} generated spans for {len(answers)} assistant turns"
            )
        for number, ((start, end), turn) in enumerate(zip(spans, answers, strict=True)):
            content = turn.get("content")
            if isinstance(content, str) and content.strip() not in text[start:end]:
                raise DataError(f"{name}: what the template marked as assistant turn {number} does not hold its text")
        return text, list(spans)

    def _prefix_spans(self, name: str, turns: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        text, _ = self._render(name, turns)
        spans = []
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before, _ = self._render(name, turns[:number], prompt=True)
            through, _ = self._render(name, turns[: number + 1])
            # The end of the very last turn may be cut by the template (no trailing newline), never a later one's.
            for what, prefix in (("the prompt before", before), ("the text through", through)):
                if not text.startswith(prefix):
                    at = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), len(text))
                    raise DataError(
                        f"{name}: {what} assistant turn {number}, rendered alone, is not how the whole conversation "
                        f"begins (they part at {text[max(0, at - 30) : at]!r}: {prefix[at : at + 20]!r} against "
                        f"{text[at : at + 20]!r}). Its answer tokens cannot be located. Use a template with "
                        "{% generation %} markers: data.chat_template=trl, or the path of one"
                    )
            span = text[len(before) : len(through)]
            content = turn.get("content")
            if isinstance(content, str) and content.strip() not in span:
                raise DataError(f"{name}: the text of assistant turn {number} is not where its turn was rendered")
            # What follows the end-of-turn token (usually one newline) is the template's, not the model's.
            stripped = span.rstrip()
            closed = any(stripped.endswith(token) for token in self.tokenizer.all_special_tokens)
            spans.append((len(before), len(before) + len(stripped if closed else span)))
        return text, spans


def _checked(name: str, messages: Any) -> list[dict[str, Any]]:
    """The turns as role and content (ShareGPT's from and value too), or a DataError that says what is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{name}: expected a non-empty list of turns, found {_short(messages)}")
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{name}: turn {number} is {_short(message)}; expected role and content")
        # Table formats fill absent keys of a struct with None; templates test for presence.
        turn = {key: value for key, value in message.items() if value is not None}
        if "from" in turn and "role" not in turn:
            turn["role"] = _ROLES.get(turn["from"], turn.pop("from"))
            turn["content"] = turn.pop("value", None)
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str):
            raise DataError(f"{name}: turn {number} has no role: {_short(message)}")
        if not isinstance(content, str | list) and not turn.get("tool_calls"):
            raise DataError(f"{name}: turn {number} ({role}) has no content: {_short(message)}")
        turns.append(turn)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError(f"{name}: no assistant turn, so nothing to train on")
    return turns


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def load_chat(tokenizer: Any, template: str) -> Chat:
    """The tokenizer with the template that `data.chat_template` names.

    Raises:
        DataError: when there is no such template.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} is not a fast tokenizer: it cannot say where its tokens lie in the text"
        )
    if template == "trl":
        try:
            from trl.chat_template_utils import get_training_chat_template  # noqa: PLC0415 - an optional package
        except ImportError as error:
            raise DataError("data.chat_template = trl, but trl cannot be imported: pip install trl") from error
        try:
            found = get_training_chat_template(tokenizer) or tokenizer.chat_template
        except ValueError as error:
            raise DataError(f"trl knows no training template for this tokenizer's: {error}") from error
    elif template:
        try:
            found = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"data.chat_template: cannot read {template}: {error.strerror}") from error
    else:
        found = tokenizer.chat_template
    if not isinstance(found, str):
        raise DataError("the tokenizer has no (single) chat template: set data.chat_template to the path of one")
    return Chat(tokenizer=tokenizer, template=found)
