"""Operators of the simulated card by family: the kernel that CUDA would choose, and the memory it takes.

Rules for the sizes of workspaces do not import torch: where a family such as attention needs it for its kernels, the
rules lie beside them in `attention_workspace.py`.
"""
