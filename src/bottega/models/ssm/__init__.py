"""The state-space layer (Mamba-2), its scan and its CUDA kernels."""
