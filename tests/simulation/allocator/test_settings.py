"""Allocator settings from the environment: their form, which variable wins, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings, read_settings
from autoaccum.units import MIB


def read(text: str) -> AllocatorSettings:
    return read_settings({"PYTORCH_ALLOC_CONF": text})


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        (" expandable_segments : True , ", {"expandable_segments": True}),
        ("max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
        ("max_split_size_mb:128MB", {"max_split_bytes": 128 * MIB}),
        ("roundup_power2_divisions:8", {"roundup_divisions": 8}),
        ("pinned_use_cuda_host_register:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", {}),
        ("garbage_collection_threshold:0.8,max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
    ],
)
def test_settings_are_read_as_torch_reads_them(text: str, changed: dict[str, Any]) -> None:
    assert read(text) == AllocatorSettings(**changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend:cudaMallocAsync", "has backend:cudaMallocAsync, which is not simulated"),
        ("max_split:3", "PYTORCH_ALLOC_CONF has max_split:3, which is not simulated"),
        ("expandable_segments:true", "torch accepts only True and False"),
        ("max_split_size_mb:19", "at least 20: leave that key out, or give a value that torch accepts"),
        ("per_process_memory_fraction:0.5", "which is not simulated"),
        ("roundup_power2_divisions:[1:2,>:4]", "only one power of two for all sizes"),
    ],
)
def test_invalid_and_unsupported_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read(text)


def test_the_older_variable_wins_even_when_empty() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    both = {new: "expandable_segments:True", old: "max_split_size_mb:40"}
    assert read_settings(both) == AllocatorSettings(max_split_bytes=40 * MIB)
    assert read_settings({new: "expandable_segments:True", old: ""}) == AllocatorSettings()
    with pytest.raises(UsageError, match=old):
        read_settings({old: "nonsense:1"})


def test_an_allocator_without_its_cache_is_not_simulated() -> None:
    with pytest.raises(UsageError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set, .*: unset it to plan"):
        read_settings({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"})
