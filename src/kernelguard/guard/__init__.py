"""Inside a rank: may it start, and is it still fast?

This room runs in the training interpreter: standard library, and torch once the training script has imported it.

    python -m kernelguard.guard -- train.py ARGS       any script, unchanged

    import kernelguard.guard as guard                  or two lines in it
    guard.before_training()
    guard.watch(model, optimizer)

    Trainer(..., callbacks=[guard.TrainerGuard()])     or in a Trainer
"""

from __future__ import annotations
