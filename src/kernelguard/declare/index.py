"""Which classes and files stand behind a model_type? Read from the auto mappings, without parsing 800 files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelguard.declare.source import ParsedModule, Source, called, dotted, literal

_MAPPING = re.compile(
    r"^([A-Z][A-Z0-9_]*_NAMES|SPECIAL_MODEL_TYPE_TO_MODULE_NAME)\b[^\n=]*=\s*OrderedDict", re.MULTILINE
)
_PAIR = re.compile(r"""\(\s*["']([^"']+)["'],\s*\(?\s*["'](\w+)["']""")
_KEYWORD_PAIR = re.compile(r"""["']([\w.-]+)["']:\s*["'](\w+)["']""")
_ROOTS = frozenset({"PreTrainedConfig", "PretrainedConfig"})
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_TYPE = re.compile(r"""^    model_type(?:\s*:[^=\n]+)?\s*=\s*["']([\w.-]+)["']""", re.MULTILINE)

# A config.json without `architectures` is loaded by some AutoModel class; for training it is most often one of these.
_PREFERRED_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


@dataclass(frozen=True, slots=True)
class TypeEntry:
    """A model_type this transformers knows."""

    model_type: str
    config_class: str
    folder: str
    """Below `models/`."""


@dataclass(frozen=True, slots=True)
class SubConfig:
    """A nested configuration that a config class declares."""

    key: str
    model_type: str | None
    """Of its class, or the documented default; None: nothing says."""
    fixed: bool
    """The class is fixed, so a model_type in the file does not matter; else AutoConfig decides by it."""
    optional: bool = False
    entry: TypeEntry | None = None
    """The fixed class."""
    defaults: Mapping[str, Any] | None = field(default_factory=dict)
    """What its class is given where the file has nothing; None: it is no literal."""


class Index:
    """The model types of one transformers tree."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._auto: dict[str, dict[str, str]] | None = None
        self._scanned: dict[str, TypeEntry] | None = None
        self._sub_configs: dict[tuple[str, str], tuple[SubConfig, ...]] = {}
        self._classes: dict[tuple[str, str], dict[str, str]] = {}
        """By folder and kind of file: the file that defines each class."""

    def entry(self, model_type: str) -> TypeEntry | None:
        """The entry of a model_type, or None when this transformers does not know it."""
        auto = self._mappings()
        config_class = auto["CONFIG_MAPPING_NAMES"].get(model_type)
        if config_class is not None:
            special = auto.get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", {}).get(model_type)
            folder = special or model_type.replace("-", "_")
            for candidate in (folder, f"deprecated/{folder}"):
                if (self.source.tree.root / "models" / candidate).is_dir():
                    return TypeEntry(model_type, config_class, candidate)
        # Some nested types are in no auto mapping (inkling_vision); only their class says so.
        return self._scan().get(model_type)

    def types(self) -> tuple[str, ...]:
        """Every model_type, sorted."""
        return tuple(sorted({*self._mappings()["CONFIG_MAPPING_NAMES"], *self._scan()}))

    def nearest(self, model_type: str) -> str | None:
        """The known type whose name is closest, if one is close."""
        import difflib  # noqa: PLC0415 - only for an error text, and it costs 10 ms

        known = self.types()
        near = difflib.get_close_matches(model_type.lower().replace("-", "_"), known, n=1, cutoff=0.6)
        return near[0] if near else None

    def auto_classes(self, model_type: str) -> tuple[str, ...]:
        """The model classes that the auto mappings name for a type, the likeliest for training first."""
        auto = self._mappings()
        order = [*_PREFERRED_MAPPINGS, *(name for name in auto if name.startswith("MODEL_"))]
        return tuple(dict.fromkeys(auto[n][model_type] for n in order if model_type in auto.get(n, {})))

    def base_class(self, model_type: str) -> str | None:
        """What `AutoModel.from_config` builds for a type."""
        return self._mappings().get("MODEL_MAPPING_NAMES", {}).get(model_type)

    def auto_class(self, mapping: str, model_type: str) -> str | None:
        """The class that one mapping (`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`) names for a type."""
        return self._mappings().get(mapping, {}).get(model_type)

    def builds(self, auto: str, model_type: str) -> bool:
        """Whether an AutoModel class (`AutoModelForCausalLM`) has a class of transformers' own for a type."""
        text = self.source.text("models/auto/modeling_auto.py") or ""
        found = re.search(
            rf"^class {re.escape(auto)}\(.*\n(?:    .*\n|\n)*?    _model_mapping = (\w+)", text, re.MULTILINE
        )
        return found is not None and self.auto_class(f"{found.group(1)}_NAMES", model_type) is not None

    def config_module(self, entry: TypeEntry) -> ParsedModule | None:
        """The parsed file that defines the type's configuration class."""
        return self._defining(entry.folder, "configuration_", entry.config_class)

    def modeling_module(self, entry: TypeEntry, class_name: str) -> ParsedModule | None:
        """The parsed file of the type's folder that defines a model class."""
        return self._defining(entry.folder, "modeling_", class_name)

    def modeling_files(self, entry: TypeEntry) -> tuple[str, ...]:
        """Every PyTorch modeling file of the type's folder, relative to the transformers folder."""
        return tuple(self._files(entry.folder, "modeling_"))

    def sub_configs(self, entry: TypeEntry) -> tuple[SubConfig, ...]:
        """The nested configurations that the type's config class declares, base classes included."""
        key = (entry.folder, entry.config_class)
        if key not in self._sub_configs:
            module = None if self._stands_alone(entry) else self.config_module(entry)
            found: dict[str, SubConfig] = {}
            if module is not None:
                for owner, node in class_and_bases(self.source, module, entry.config_class):
                    for sub in self._declared_subs(owner, node):
                        found.setdefault(sub.key, sub)
            self._sub_configs[key] = tuple(found.values())
        return self._sub_configs[key]

    def _stands_alone(self, entry: TypeEntry) -> bool:
        """Told without parsing: nothing in its file declares nested configurations, and it inherits from the root."""
        self._defining(entry.folder, "configuration_", "")
        file = self._classes[entry.folder, "configuration_"].get(entry.config_class)
        text = self.source.text(file) or "" if file is not None else ""
        base = re.search(rf"^class {re.escape(entry.config_class)}\(\s*(\w+)\s*\):", text, re.MULTILINE)
        return base is not None and base.group(1) in _ROOTS and "sub_configs" not in text

    def coded_default(self, entry: TypeEntry, key: str) -> str | None:
        """The type that a config class gives a missing nested config in its own code (up to 5.17)."""
        module = self.config_module(entry)
        if module is None:
            return None
        name = re.escape(key)
        patterns = (
            rf"""{name}(?:\["model_type"\])? = \S*{name}\.get\("model_type", "([\w.-]+)"\)""",
            rf"""{name} = CONFIG_MAPPING\["([\w.-]+)"\]""",
        )
        for pattern in patterns:
            found = re.search(pattern, module.text)
            if found is not None:
                return found.group(1)
        return None

    def type_of_class(self, module: ParsedModule, class_name: str) -> str | None:
        """The `model_type` that a configuration class sets."""
        for owner, node in class_and_bases(self.source, module, class_name):
            del owner
            for statement in node.body:
                target, value = _class_assignment(statement)
                if target == "model_type":
                    text = literal(value)
                    if isinstance(text, str):
                        return text
        return None

    def _declared_subs(self, module: ParsedModule, node: ast.ClassDef) -> Iterator[SubConfig]:
        # `sub_configs` up to 5.17, `sub_configs_defaults` with SubConfigSpec after.
        for statement in node.body:
            target, value = _class_assignment(statement)
            if target not in {"sub_configs", "sub_configs_defaults"} or not isinstance(value, ast.Dict):
                continue
            for key, spec in zip(value.keys, value.values, strict=True):
                name = literal(key)
                if isinstance(name, str):
                    yield self._sub_config(module, name, spec)

    def _sub_config(self, module: ParsedModule, key: str, spec: ast.expr) -> SubConfig:
        default: object = None
        defaults: object = {}
        optional = False
        config_class: ast.expr | None = spec
        if isinstance(spec, ast.Call) and called(spec) == "SubConfigSpec":
            keywords = {k.arg: k.value for k in spec.keywords}
            config_class = keywords.get("config_class", spec.args[0] if spec.args else None)
            default = literal(keywords.get("model_type"))
            optional = literal(keywords.get("optional")) is True
            defaults = literal(keywords.get("init_kwargs", ast.Constant(None))) or {}
        given = defaults if isinstance(defaults, dict) else None
        name = dotted(config_class) if config_class is not None else None
        if name is None or name == "AutoConfig":
            model_type = default if isinstance(default, str) else None
            return SubConfig(key, model_type, fixed=False, optional=optional, defaults=given)
        found = self.source.resolve(module, name)
        model_type = self.type_of_class(*found) if found else None
        entry = None
        if found is not None and model_type is not None:
            folder = found[0].file.removeprefix("models/").rpartition("/")[0]
            entry = TypeEntry(model_type, found[1], folder)
        return SubConfig(key, model_type, fixed=True, optional=optional, entry=entry, defaults=given)

    def _defining(self, folder: str, prefix: str, class_name: str) -> ParsedModule | None:
        if (folder, prefix) not in self._classes:
            found: dict[str, str] = {}
            for file in self._files(folder, prefix):
                for name in _CLASS.findall(self.source.text(file) or ""):
                    found.setdefault(name, file)
            self._classes[folder, prefix] = found
        defining = self._classes[folder, prefix].get(class_name)
        return None if defining is None else self.source.module(defining)

    def _files(self, folder: str, prefix: str) -> Iterator[str]:
        path = self.source.tree.root / "models" / folder
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        for name in names:
            if (
                name.startswith(prefix)
                and name.endswith(".py")
                and not name.startswith((f"{prefix}tf_", f"{prefix}flax_"))
            ):
                yield f"models/{folder}/{name}"

    def _mappings(self) -> dict[str, dict[str, str]]:
        if self._auto is None:
            found: dict[str, dict[str, str]] = {"CONFIG_MAPPING_NAMES": {}}
            # auto_mappings.py holds the config mapping since 5.6; older releases have it in configuration_auto.py.
            for file in ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py"):
                text = self.source.text(f"models/auto/{file}")
                for name, pairs in _read_mappings(text or ""):
                    for key, value in pairs:
                        found.setdefault(name, {}).setdefault(key, value)
            self._auto = found
        return self._auto

    def _scan(self) -> dict[str, TypeEntry]:
        """The slow way: every configuration file is searched for `model_type = ...`."""
        if self._scanned is None:
            self._scanned = {}
            models = self.source.tree.root / "models"
            for path in sorted(models.glob("**/configuration_*.py")):
                folder = path.parent.relative_to(models).as_posix()
                text = self.source.text(f"models/{folder}/{path.name}")
                if text is None or folder == "auto":
                    continue
                classes = [(m.start(), m.group(1)) for m in _CLASS.finditer(text)]
                for match in _TYPE.finditer(text):
                    owner = [name for start, name in classes if start < match.start()]
                    if owner:
                        self._scanned.setdefault(match.group(1), TypeEntry(match.group(1), owner[-1], folder))
        return self._scanned


def _read_mappings(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for match in _MAPPING.finditer(text):
        end = text.find("\n)", match.end())
        line_end = text.find("\n", match.end())
        # `OrderedDict(**{"gpt-sw3": "GPT2Config"}, ...)` stands on one line, the big ones end with a bare parenthesis.
        block = text[match.end() : line_end if text[match.end() : line_end].rstrip().endswith(")") else end]
        pairs = _PAIR.findall(block) if "\n" in block else _KEYWORD_PAIR.findall(block)
        yield match.group(1), pairs


def _class_assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    return None, None


def class_and_bases(source: Source, module: ParsedModule, name: str) -> Iterator[tuple[ParsedModule, ast.ClassDef]]:
    """A class and its bases that are defined in files of the tree, in (approximate) resolution order."""
    todo: list[tuple[ParsedModule, str]] = [(module, name)]
    seen: set[tuple[str, str]] = set()
    while todo:
        owner, current = todo.pop(0)
        found = source.resolve(owner, current)
        if found is None or (found[0].file, found[1]) in seen:
            continue
        seen.add((found[0].file, found[1]))
        node = found[0].definitions.get(found[1])
        if isinstance(node, ast.ClassDef):
            yield found[0], node
            todo += [(found[0], base) for base in map(dotted, node.bases) if base is not None and "." not in base]


def default_of(index: Index, entry: TypeEntry, name: str) -> object:
    """The default that a type's configuration class gives a setting; `...` when it is no literal or not there."""
    module = index.config_module(entry)
    for _, node in class_and_bases(index.source, module, entry.config_class) if module is not None else ():
        for statement in node.body:
            target, value = _class_assignment(statement)
            if target == name:
                return literal(value)
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                arguments = statement.args
                positional = [*arguments.posonlyargs, *arguments.args]
                with_default = zip(reversed(positional), reversed(arguments.defaults), strict=False)
                keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                for argument, default in (*with_default, *keywords):
                    if argument.arg == name and default is not None:
                        return literal(default)
    return ...
