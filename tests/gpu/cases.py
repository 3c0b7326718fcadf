"""The cases of the comparison: workloads of `tests/gpu/compared`, each at one or two micro-batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "compared"


@dataclass(frozen=True)
class Case:
    """A workload at one micro-batch size.

    Attributes:
        file: The stem of its file in `FOLDER`.
        name: The name of the workload in the file.
        size: Samples in each of the two micro-batches.
        least: Whether to search for its least memory, too.
    """

    file: str
    name: str
    size: int
    least: bool = True

    @property
    def title(self) -> str:
        """The title of its row, such as `gpt bf16_adamw_fused 16`."""
        return f"{self.file} {self.name} {self.size}"

    @property
    def reference(self) -> str:
        """The reference for `load_workload`."""
        return f"{FOLDER / self.file}.py:{self.name}"

    @property
    def parts(self) -> tuple[int, int]:
        """The parts of its trial."""
        return self.size, self.size


def _cases(file: str, name: str, *sizes: int) -> tuple[Case, ...]:
    """Make a case for each size; only the last one searches for the least memory, which takes most of the time."""
    return tuple(Case(file, name, size, least=size == sizes[-1]) for size in sizes)


CASES = (
    *_cases("cnn", "fp32_sgd", 16, 64),
    *_cases("gpt", "bf16_adamw_foreach", 8, 24),
    *_cases("vit", "bf16_adamw_fused", 16, 96),
    *_cases("bert", "fp32_adamw_foreach", 4, 16),
    *_cases("lstm", "fp32_sgd", 64, 256),
    *_cases("unet", "bf16_adamw_fused", 2, 8),
    *_cases("cnn", "bf16_channels_last", 96),
    *_cases("gpt", "fp32_adamw_foreach", 12),
    *_cases("vit", "fp32_adamw", 48),
    *_cases("bert", "bf16_adamw_fused", 24),
    *_cases("lstm", "fp16_adamw_foreach", 256),
    *_cases("unet", "fp32_adamw_foreach", 6),
    *_cases("gpt", "bf16_checkpointed", 8, 24),
    *_cases("vit", "bf16_checkpointed", 128),
    *_cases("bert", "fp16_checkpointed", 24),
    *_cases("cnn", "fp16_adamw_fused", 64),
    *_cases("gpt", "bf16_adamw_fused", 24),
    *_cases("gpt", "fp16_adamw_fused", 24),
    *_cases("vit", "fp16_sgd", 96),
    *_cases("vit", "bf16_adamw_foreach", 96),
    *_cases("unet", "fp32_checkpointed", 8),
    *_cases("lstm", "fp32_bidirectional", 128),
    *_cases("lstm", "bf16_dropout", 256),
    *_cases("bert", "fp16_sgd", 24),
    *_cases("cnn", "bf16_sgd", 96),
    *_cases("cnn", "fp32_adamw_foreach", 64),
    *_cases("cnn", "fp32_channels_last", 64),
    *_cases("unet", "bf16_channels_last", 8),
    *_cases("unet", "fp16_sgd", 8),
    *_cases("cnn", "fp16_benchmark", 64),
)
"""In the order of measurement: every family and precision comes early, in case time runs short."""
