"""`python -m kernelguard_train config.toml key=value ...`, also under torchrun."""

import sys

from kernelguard_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
