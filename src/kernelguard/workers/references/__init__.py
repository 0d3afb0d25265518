"""What is the right answer? The formulas that kernels are measured against, in plain torch.

Nothing here is fast. Each function is written to be read beside its formula, in whatever precision its inputs have
(fp64 for the truth), and is itself tested by finite differences. `precision.Precision` says how products are rounded,
so that the same formula also tells how far plain torch in the kernel's own dtype is from the truth.
"""
