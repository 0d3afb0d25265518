"""Which build of each kernel fits?"""

from kernelguard.resolve.matrix import check_matrix, load_matrix, matrix
from kernelguard.resolve.needs import needs_of
from kernelguard.resolve.request import Options, Request, RuleAnswer, fleet, no_rules
from kernelguard.resolve.resolution import resolve
from kernelguard.resolve.search import Market

__all__ = [
    "Market",
    "Options",
    "Request",
    "RuleAnswer",
    "check_matrix",
    "fleet",
    "load_matrix",
    "matrix",
    "needs_of",
    "no_rules",
    "resolve",
]
