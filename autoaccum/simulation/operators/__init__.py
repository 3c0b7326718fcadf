"""Operators of the simulated card by family: the kernel that CUDA would choose, and the memory it takes.

Rules for the sizes of workspaces do not import torch. Those of families that need it for their kernels are in
`attention_workspace.py` and `workspace_rules.py`.
"""
