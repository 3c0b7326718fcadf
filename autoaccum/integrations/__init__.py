"""Every framework: its Trainers as workloads, exact accumulation within its loops, and its arguments for a plan."""

from typing import Final

LIBRARIES: Final = (
    *("accelerate", "bitsandbytes", "deepspeed", "diffusers", "lightning", "peft", "timm", "torch_geometric"),
    *("torchtitan", "torchvision", "transformers", "trl", "ultralytics"),
)
"""The libraries that the suite trains with: the extra `libraries` of the package."""
