"""Exactly which bytes, and put them there."""

from kernelguard.lock.check import check_hub_files, check_lock, local_kernels
from kernelguard.lock.document import load_lock
from kernelguard.lock.files import recipe, write_lock
from kernelguard.lock.make import NoSetError, Places, Subject, make_lock, no_set
from kernelguard.lock.sync import sync
from kernelguard.lock.values import Lock

__all__ = [
    "Lock",
    "NoSetError",
    "Places",
    "Subject",
    "check_hub_files",
    "check_lock",
    "load_lock",
    "local_kernels",
    "make_lock",
    "no_set",
    "recipe",
    "sync",
    "write_lock",
]
