"""What does this model build and call? The interpreter's calls; the rest of it is in the modules beside this one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from kernelguard.declare.source import literal
from kernelguard.declare.symbolic import library
from kernelguard.declare.symbolic.attributes import Attributes
from kernelguard.declare.symbolic.lookup import BUILTIN_NAMES
from kernelguard.declare.symbolic.statements import Flow, Frame
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    Arguments,
    Builtin,
    Choice,
    ClassValue,
    External,
    Function,
    GiveUpError,
    Instance,
    Kernel,
    KernelLoader,
    KernelObject,
    Method,
    Seq,
    Signal,
    Table,
    Value,
    is_known,
    merge,
)

MAX_DEPTH = 60
_MAX_NAME = 200
_CONTAINERS = frozenset({"ModuleList", "Sequential", "ParameterList"})
_TABLES = frozenset({"ModuleDict", "OrderedDict"})
_AUTO = re.compile(r"\.?(AutoModel\w*|AutoBackbone)\.(?:_?from_config)$")
_CONFIG_UTILS = "configuration_utils.py"


class Machine(Attributes):
    """Follows constructors and forwards of one transformers tree."""

    def instantiate(self, cls: ClassValue, arguments: Arguments) -> Value:
        """Makes an object of a class of the tree."""
        if self.is_config(cls):
            from kernelguard.declare.symbolic.configs import build_config  # noqa: PLC0415 - the two need each other

            return build_config(self, cls, arguments)
        if cls.key not in self.relevant:
            if cls.key not in self.universe and not self.calling:
                self.lost = self.lost or f"{cls.node.name} is built, which no root was seen to reach"
            return Instance(cls, self.uncertain, opaque=True)
        self.built.setdefault(cls, [0, 0])[1 if self.uncertain else 0] += 1
        instance = Instance(cls, self.uncertain)
        # A class that calls kernels itself is the end of the way down: one of its kind is as good as another.
        template = self._templates.get(cls.key)
        if template is not None:
            instance.attributes = template.attributes
            return instance
        found = self.find_in_class(cls, "__init__")
        if found is not None and isinstance(found[1], ast.FunctionDef):
            self.run(
                Function(found[0].module, found[1], found[0]),
                Arguments([instance, *arguments.positional], arguments.keywords, arguments.rest),
            )
        if cls.key in self.leaves:
            self._templates[cls.key] = instance
        return instance

    @property
    def leaves(self) -> frozenset[tuple[str, str]]:
        """Classes that name a kernel themselves."""
        if self._leaves is None:
            names: dict[str, set[str]] = {}
            for file, name in self.kernels:
                names.setdefault(file, set()).add(name)
            found = set()
            for file, name in self.relevant:
                module = self.source.module(file) if file in names else None
                if module is not None and module.names_used_by(name) & names[file]:
                    found.add((file, name))
            self._leaves = frozenset(found)
        return self._leaves

    def modules(self, value: Value) -> Iterator[Instance]:
        """Every followed module that a value holds, itself included, each once."""
        seen: set[int] = set()
        todo = [value]
        while todo:
            current = todo.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            if isinstance(current, Instance) and not current.opaque and not current.is_config:
                yield current
                todo += list(current.attributes.values())
            elif isinstance(current, (Seq, tuple)):
                todo += list(current)
            elif isinstance(current, Table):
                todo += list(current.values())
            elif isinstance(current, Choice):
                todo += list(current.options)

    def super_of(self, frame: Frame) -> Value:
        """`super()`."""
        first = next(iter(frame.variables.values()), UNKNOWN)
        return Builtin("super", (frame.owner, first)) if frame.owner is not None else UNKNOWN

    def call(self, function: Value, arguments: Arguments, node: ast.Call | None = None) -> Value:
        """`function(...)`."""
        if isinstance(function, (Kernel, KernelObject)):
            kernel = function if isinstance(function, Kernel) else function.kernel
            if isinstance(function, Kernel) and kernel.is_class:
                return KernelObject(kernel)
            self.calls.append((kernel, arguments))
            return External(f"{kernel.name}()")
        if isinstance(function, KernelLoader):
            return function.results
        if isinstance(function, Function):
            return self._call_function(function, arguments)
        if isinstance(function, Method):
            bound = Arguments(
                [function.this, *arguments.positional], arguments.keywords, arguments.rest, arguments.vague_positional
            )
            return self.run(function.function, bound)
        if isinstance(function, ClassValue):
            return self.instantiate(function, arguments)
        if isinstance(function, Instance):
            return self._call_instance(function, arguments)
        if isinstance(function, Builtin):
            return self._call_builtin_method(function, arguments)
        if isinstance(function, External):
            return self._call_external(function, arguments)
        if isinstance(function, Choice):
            self.uncertain += 1
            results = [self.call(option, arguments) for option in function.options if option is not None]
            self.uncertain -= 1
            result = results[0] if results else UNKNOWN
            for other in results[1:]:
                result = merge(result, other)
            return result
        if isinstance(function, Seq) and self.calling:  # nn.Sequential
            for module in list(function):
                self.call(module, arguments)
            return UNKNOWN
        self._lose(function, arguments)
        if function is UNKNOWN and not self.calling:
            what = f"{ast.unparse(node.func)[:80]}(...), line {node.lineno}," if node is not None else "something"
            self.lost = self.lost or f"{what} is called, and the source does not tell what it is"
        return UNKNOWN

    def _call_function(self, function: Function, arguments: Arguments) -> Value:
        name = getattr(function.node, "name", "")
        known = (function.module.file, name) in self.relevant or function.closure is not None
        passes_dict = any(
            isinstance(v, Table) and v.open for v in (*arguments.positional, *arguments.keywords.values())
        )
        if self.calling and not known and not passes_dict:
            self._lose(function, arguments)
            return UNKNOWN
        return self.run(function, arguments)

    def _call_instance(self, instance: Instance, arguments: Arguments) -> Value:
        found = None if instance.opaque else self.find_in_class(instance.cls, "forward")
        if found is None or not isinstance(found[1], ast.FunctionDef):
            self._lose(instance, arguments)
            return UNKNOWN
        bound = Arguments(
            [instance, *arguments.positional], arguments.keywords, arguments.rest, arguments.vague_positional
        )
        if self.calling:
            self.ran.append(instance)
        return self.run(Function(found[0].module, found[1], found[0]), bound)

    def _call_builtin_method(self, function: Builtin, arguments: Arguments) -> Value:
        this = function.this
        if isinstance(this, Builtin) and this.name == "super":
            owner, instance = this.this
            return self._call_super(owner, instance, function.name, arguments)
        if isinstance(this, ClassValue):
            return self._call_class_method(this, function.name, arguments)
        if isinstance(this, (Signal, Instance)):
            return this
        if arguments.rest is not None and isinstance(this, Table):
            this.vague = True
            return UNKNOWN
        return library.call_method(this, function.name, arguments.positional, arguments.keywords, self.uncertain)

    def _call_class_method(self, cls: ClassValue, name: str, arguments: Arguments) -> Value:
        """A method that the class inherits from outside the tree."""
        if name in {"_from_config", "from_config"} and not self.is_config(cls):
            return self.instantiate(cls, arguments)
        if name == "apply":  # of torch.autograd.Function
            found = self.find_in_class(cls, "forward")
            if found is not None and isinstance(found[1], ast.FunctionDef):
                bound = Arguments([UNKNOWN, *arguments.positional], arguments.keywords, arguments.rest)
                return self.run(Function(found[0].module, found[1], found[0]), bound)
        if cls.key in self.relevant and not self.is_config(cls):
            self.lost = self.lost or f"{cls.node.name}.{name} is called, which is defined elsewhere"
        given = arguments.positional[0] if arguments.positional else None
        if name == "from_dict" and self.is_config(cls) and isinstance(given, Table) and not given.vague:
            return self.instantiate(cls, Arguments(keywords={str(k): v for k, v in given.items()}))
        return UNKNOWN

    def _call_super(self, owner: ClassValue, this: Value, name: str, arguments: Arguments) -> Value:
        if not isinstance(this, Instance):
            return UNKNOWN
        found = self.find_in_class(this.cls, name, after=owner)
        if found is not None and isinstance(found[1], ast.FunctionDef):
            bound = Arguments(
                [this, *arguments.positional], arguments.keywords, arguments.rest, arguments.vague_positional
            )
            return self.run(Function(found[0].module, found[1], found[0]), bound)
        if this.is_config:
            from kernelguard.declare.symbolic.configs import call_base  # noqa: PLC0415 - the two need each other

            return call_base(self, this, name, arguments)
        if name == "__init__":
            config = arguments.positional[0] if arguments.positional else arguments.keywords.get("config", UNKNOWN)
            if isinstance(config, Instance) and config.is_config:
                this.attributes.setdefault("config", config)
        return UNKNOWN

    def _call_external(self, function: External, arguments: Arguments) -> Value:
        name, args = function.name, arguments.positional
        if function.last in _CONTAINERS:
            given = args[0] if len(args) == 1 else None
            items = list(given) if isinstance(given, (Seq, tuple, range)) else list(args)
            vague = given is UNKNOWN or (isinstance(given, Seq) and given.vague)
            return Seq(items, depth=self.uncertain, vague=vague)
        if name == "dict" or function.last in _TABLES:
            if args and not isinstance(args[0], Table):
                return UNKNOWN
            made = args[0].copied(self.uncertain) if args else Table(depth=self.uncertain)
            made.update(arguments.keywords)
            made.vague |= arguments.rest is not None
            return made
        if name in {"getattr", "hasattr", "setattr"}:
            return self._call_attribute_function(name, args)
        if name == "type" and len(args) == 1:
            return args[0].cls if isinstance(args[0], Instance) else UNKNOWN
        if function.last in {"deepcopy", "copy"} and args and name.startswith("copy"):
            return _copied(args[0])
        if function.last == "remap_legacy_layer_types":
            return self.remap(*args[:1])
        if function.last == "_gradient_checkpointing_func" and args:
            return self.call(args[0], Arguments(args[1:], arguments.keywords, arguments.rest))
        auto = _AUTO.search(name)
        if auto is not None and args:
            return self._auto_model(auto.group(1), args[0])
        if name.endswith("AutoConfig.for_model") and args and isinstance(args[0], str):
            cls = self.config_class(args[0])
            keywords = Arguments(keywords=arguments.keywords)
            return self.instantiate(cls, keywords) if isinstance(cls, ClassValue) else UNKNOWN
        if arguments.rest is None and not arguments.vague_positional:
            result = library.call_builtin(name, args, self.iterate, self.uncertain)
            if result is not UNKNOWN or name in BUILTIN_NAMES:
                return result
        self._lose(function, arguments)
        return External(f"{name}()" if len(name) < _MAX_NAME else "?")

    def _call_attribute_function(self, name: str, args: list[Value]) -> Value:
        if len(args) < 2 or not isinstance(args[1], str):
            if name == "setattr":
                raise GiveUpError("an attribute of unknown name is set")
            return UNKNOWN
        if name == "setattr":
            self.assign_attribute(args[0], args[1], args[2] if len(args) > 2 else UNKNOWN)
            return None
        known = self.has_attribute(args[0], args[1])
        if name == "hasattr":
            return UNKNOWN if known is None else known
        if known is False:
            return args[2] if len(args) > 2 else UNKNOWN
        value = self.attribute(args[0], args[1])
        return value if known or len(args) < 3 else merge(value, args[2])

    def _auto_model(self, auto: str, config: Value) -> Value:
        if not isinstance(config, Instance) or not config.is_config:
            raise GiveUpError(f"{auto} is given a configuration that is not known")
        model_type = self.index.type_of_class(config.cls.module, config.cls.node.name)
        entry = self.index.entry(model_type) if model_type else None
        if entry is None:
            raise GiveUpError(f"{auto} is given a configuration of no known type")
        name = "MODEL_MAPPING_NAMES"
        if auto.startswith("AutoModelFor"):
            words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", auto.removeprefix("AutoModelFor"))
            name = f"MODEL_FOR_{'_'.join(words).upper()}_MAPPING_NAMES"
        class_name = self.index.auto_class(name, entry.model_type)
        module = self.index.modeling_module(entry, class_name) if class_name else None
        if module is None or class_name is None:
            return Instance(config.cls, self.uncertain, opaque=True)  # a timm backbone and the like
        cls = self.global_value(module, class_name)
        return self.instantiate(cls, Arguments([config])) if isinstance(cls, ClassValue) else UNKNOWN

    def remap(self, layer_types: Value = UNKNOWN) -> Value:
        """`remap_legacy_layer_types` of transformers >= 5.20, by its own table."""
        node = self.source.fragment(_CONFIG_UTILS, "_LEGACY_LAYER_TYPE_REMAP")
        table = literal(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if not isinstance(table, dict) or not isinstance(layer_types, Seq) or not is_known(layer_types):
            return UNKNOWN
        return Seq((table.get(t, t) for t in layer_types), depth=self.uncertain)

    def _lose(self, function: Value, arguments: Arguments) -> None:
        """Something unknown is called: it may change the containers it gets, and build the classes it gets."""
        for value in (*arguments.positional, *arguments.keywords.values()):
            if isinstance(value, Table) and value.open:
                value.vague = True
            elif isinstance(value, (Kernel, KernelObject)) and self.calling:
                kernel = value if isinstance(value, Kernel) else value.kernel
                self.calls.append((kernel, Arguments(rest=Table(vague=True))))
            elif isinstance(value, ClassValue) and value.key in self.relevant and not self.calling:
                self.lost = self.lost or f"{value.node.name} is handed to {function}"

    def run(self, function: Function, arguments: Arguments) -> Value:
        """Runs a function of the tree."""
        if self._depth >= MAX_DEPTH:
            raise GiveUpError("calls are nested too deeply")
        node = function.node
        frame = Frame(function.module, self.bind(function, arguments), function.owner, function.closure)
        self._depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return self.evaluate(node.body, frame)
            flow = self.run_block(node.body, frame)
        finally:
            self._depth -= 1
            self.uncertain -= frame.pending
        results = frame.returned if flow is Flow.RETURN or not frame.returned else [*frame.returned, None]
        if not results:
            return None
        result = results[0]
        for other in results[1:]:
            result = merge(result, other)
        return result

    def bind(self, function: Function, arguments: Arguments) -> dict[str, Value]:
        """The local variables that a call starts with."""
        spec = function.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        variables: dict[str, Value] = dict(zip(names, arguments.positional, strict=False))
        keywords = dict(arguments.keywords)
        rest = arguments.rest.copied(self.uncertain) if arguments.rest is not None else None
        defaults = dict(_defaults(spec))
        for name in (*names, *(a.arg for a in spec.kwonlyargs)):
            if name in variables:
                continue
            if name in keywords:
                variables[name] = keywords.pop(name)
            elif rest is not None and (rest.vague or name in rest or (rest.open and name not in rest.removed)):
                variables[name] = library.take(rest, name, UNKNOWN, keep=False)
            elif arguments.vague_positional:
                variables[name] = UNKNOWN
            elif name in defaults:
                variables[name] = self.evaluate(defaults[name], Frame(function.module, {}))
            else:
                variables[name] = UNKNOWN
        if spec.vararg is not None:
            extra = tuple(arguments.positional[len(names) :])
            variables[spec.vararg.arg] = UNKNOWN if arguments.vague_positional else extra
        if spec.kwarg is not None:
            table = rest if rest is not None else Table(depth=self.uncertain)
            table.update(keywords)
            table.removed -= set(keywords)
            table.removed.update(names)
            variables[spec.kwarg.arg] = table
        return variables


def _defaults(spec: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*spec.posonlyargs, *spec.args]
    for argument, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
        yield argument.arg, default
    for argument, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if value is not None:
            yield argument.arg, value


def _copied(value: Value) -> Value:
    """`copy.deepcopy`, deep enough: configurations and containers."""
    if isinstance(value, Instance):
        copied = Instance(value.cls, value.depth, {k: _copied(v) for k, v in value.attributes.items()}, value.opaque)
        copied.is_config = value.is_config
        return copied
    if isinstance(value, Seq):
        return Seq(map(_copied, value), depth=value.depth, vague=value.vague)
    if isinstance(value, Table):
        return Table(
            ((k, _copied(v)) for k, v in value.items()),
            depth=value.depth,
            is_open=value.open,
            removed=value.removed,
            vague=value.vague,
        )
    return value
