"""What does this model's code ask for?"""

from kernelguard.declare.config import parse_config, read_config
from kernelguard.declare.declaration import Reader, declare
from kernelguard.declare.intent import resolve_intent
from kernelguard.declare.tree import find_tree, tree_of_version

__all__ = ["Reader", "declare", "find_tree", "parse_config", "read_config", "resolve_intent", "tree_of_version"]
