"""What exactly is verified? The model, the run, and the fast paths with what each was bound to; pure."""

from __future__ import annotations

from dataclasses import asdict

from kernelguard.declare.values import Declaration, FastPath, Intent, Phase
from kernelguard.lock.parts import locked_model
from kernelguard.observe.values import Bindings
from kernelguard.verify.values import Subject, UsedPath


def subject_of(declaration: Declaration, intent: Intent, *, length: int, lock: str = "") -> Subject:
    """The subject of a verdict; `lock` is the digest of the lock that was given."""
    model = locked_model(declaration.config)
    return Subject(
        source=model.source,
        model_type=model.model_type,
        config_sha256=model.sha256,
        lock=lock,
        length=length,
        layers=declaration.layer_order,
        # As JSON holds them, so that a verdict that was read equals the one that was written.
        intent={
            k: list(v) if isinstance(v, tuple) else str(v) if k == "phase" else v for k, v in asdict(intent).items()
        },
    )


def used_paths(declaration: Declaration, intent: Intent, bindings: Bindings | None) -> tuple[UsedPath, ...]:
    """The fast paths that this run calls."""
    return tuple(_used(path, bindings) for path in declaration.fast_paths if is_called(path, intent))


def is_called(path: FastPath, intent: Intent) -> bool:
    """Whether this run gets to it, as far as the source tells."""
    return intent.phase in path.phases and path.layers != 0 and not path.disabled_by


def _used(path: FastPath, bindings: Bindings | None) -> UsedPath:
    mine = [b for b in (bindings.bindings if bindings else ()) if b.symbol == path.symbol]
    # The same kernel can be bound in two modules of one model.
    bound = next((b for b in mine if b.module == path.binding.module), mine[0] if mine else None)
    return UsedPath(
        symbol=path.symbol,
        package=path.package,
        module=path.import_module,
        mechanism=path.mechanism,
        training=Phase.TRAINING in path.phases,
        layers=path.layers,
        called_in=path.binding.module,
        bound_to="" if bound is None else str(bound.bound_to),
        target="" if bound is None else bound.target,
        distribution=(bound.distribution if bound is not None else "") or path.distribution,
    )
