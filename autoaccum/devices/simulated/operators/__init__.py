"""Operators of the simulated card by family: the kernel that CUDA would choose, and the memory it takes.

A family such as attention lies in `attention.py`; the sizes of its workspaces lie in `attention_workspace.py`, which
does not import torch.
"""
