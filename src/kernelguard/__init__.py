"""kernelguard: will this model train on its fused kernels here, and do they compute the right thing?"""

__version__ = "0.1.0"
