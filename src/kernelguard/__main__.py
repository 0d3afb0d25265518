"""`python -m kernelguard`: the command line, where its script is not on PATH."""

from kernelguard.cli import main

if __name__ == "__main__":
    main()
