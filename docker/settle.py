"""Make an installed tree the same bytes whenever it is installed: fixed dates, bytecode that goes with them.

A layer of the same wheels then has the same digest in every build, and a registry takes it only once.
"""

import compileall
import os
import sys

DATE = 315_532_800
"""1980-01-01, in seconds."""


def date(top: str) -> None:
    """Give everything below a folder the same date."""
    for folder, _, _ in os.walk(top, topdown=False):
        for entry in os.scandir(folder):
            os.utime(entry.path, (DATE, DATE), follow_symlinks=False)


def main(top: str) -> None:
    """Settle `top`, whose files will lie without it in front."""
    date(top)
    # Templates for other languages and other Pythons lie among the modules: they do not compile, and need not.
    compileall.compile_dir(top, maxlevels=64, quiet=2, stripdir=top)
    date(top)


if __name__ == "__main__":
    main(*sys.argv[1:])
