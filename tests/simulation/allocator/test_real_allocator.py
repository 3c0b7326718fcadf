"""The allocator gives the statistics of PyTorch's own, request by request, as recorded from libc10_cuda.so.

`python tests/shared/real_allocator/record_statistics.py SITE_PACKAGES` prints a table again, with segments at addresses
as NVIDIA's driver gives them. torch 2.13.0+cu130, 2.14.1+cu130 and 2.15.0+cu132 give the first one.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace

import pytest
from allocator_requests import CAPACITIES, CASES, STREAMS, make_requests, stream_of

from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import CachingAllocator, CudaOutOfMemoryError, read_settings

RECORDED = {
    "": (
        "7a6f764611a7460a 6494c70992383496 f1ccf9d26c5a0927 faf7f56fcf9e572d",
        "b2990f95850f10f4 a8d641e7ddbf8c1c 7c82d96a9844d1de 2f7e27d12a32e27b",
    ),
    "expandable_segments:True": (
        "71b042f9e26cfa67 ee4c5d9d539aaf49 6ba338be5b0cc3b0 9cc8170bc3a3d2d6",
        "fbfe174d4f97b126 6cc882cff80c4c39 f0425ab190e2db0f 4e9278777b0cb820",
    ),
    "max_split_size_mb:20": (
        "1c5a0f0b078ee959 51f9f67876acac7f 96d8b727199d23bd 872b74583cc0a3c4",
        "2d42c95ff21a9e07 19f20dc6f885c88c a304f17338490724 4df56cf5c8510c4c",
    ),
    "roundup_power2_divisions:4": (
        "eb204c20a022fff7 cf73cebf03b297d0 69440bbae7483e40 6572154e1b615949",
        "32cf922e1bdb122b f61860f37dd676c0 6906111b754c4c57 52ee60ee4b382abf",
    ),
    "expandable_segments:True,max_split_size_mb:24": (
        "f94f43dec6e9f3be ba2e42c1124b0100 600e5a96b28c0a3d 0af1d1d2a6f82823",
        "6791a0507ead213c 9353c80537997ea6 c8c860407e6de4d8 1227af6f3c51ed0e",
    ),
    "expandable_segments:True,roundup_power2_divisions:8": (
        "f9ccf355531ac989 df41f8c7b90477ff 778753fd00d8f38a d4356c44792225a7",
        "45bff1c7f2a2a64d 8104b5271dbd0945 5b11db00d9b2dffd b086e8afb15533d5",
    ),
}
"""By settings, for one stream and for several: for each capacity, a digest of the bytes allocated and reserved, their
peaks, retries and failures after each request."""
BY_ADDRESS = {
    "": (
        "7a6f764611a7460a 3b2f4d3d7700127c 69449d7d7844f793 faf7f56fcf9e572d",
        "b2990f95850f10f4 086e431eb6390329 7da7a429bf078323 2f7e27d12a32e27b",
    ),
    "max_split_size_mb:20": (
        "1c5a0f0b078ee959 9a9becc8c577e934 cf52b7b10afa91d4 872b74583cc0a3c4",
        "2d42c95ff21a9e07 23ce062b8a8e1cea a304f17338490724 4df56cf5c8510c4c",
    ),
    "roundup_power2_divisions:4": (
        "6cb653ee7ec839a7 460a51ada658cb66 4a77618bcd5c6421 6572154e1b615949",
        "32cf922e1bdb122b 9ba7158685cd54c0 6906111b754c4c57 ac62262c7ab3c69b",
    ),
}
"""Those of 2.9.1+cu128 (which refuses 20 MB), 2.10.0+cu128 and 2.11.0+cu130; the same with expandable segments."""


@pytest.mark.parametrize(
    ("text", "by_address"), [*((text, False) for text in CASES), *((text, True) for text in BY_ADDRESS)]
)
@pytest.mark.parametrize("streams", [1, STREAMS])
@pytest.mark.parametrize("index", range(len(CAPACITIES)))
def test_statistics_equal_those_of_pytorch(text: str, by_address: bool, streams: int, index: int) -> None:
    capacity, total = CAPACITIES[index]
    settings = replace(read_settings({"PYTORCH_CUDA_ALLOC_CONF": text}, total), by_address=by_address)
    made, live, failed, digest = CachingAllocator(capacity, settings), dict[int, Block](), 0, hashlib.sha256()
    for block, size in make_requests(10 * CASES[text] + index):
        if size is None:
            if block in live:
                made.free(live.pop(block))
        else:
            failed += 1
            with suppress(CudaOutOfMemoryError):
                live[block] = made.malloc(size, stream_of(block, streams))
                failed -= 1
        peaks = made.peak_allocated_bytes, made.peak_reserved_bytes
        statistics = made.allocated_bytes, made.reserved_bytes, *peaks, made.retries, failed
        digest.update((" ".join(map(str, statistics)) + "\n").encode())
    assert digest.hexdigest()[:16] == (BY_ADDRESS if by_address else RECORDED)[text][streams > 1].split()[index]
