"""The allocator gives the statistics of PyTorch's own, request by request, as recorded from libc10_cuda.so.

`python tests/shared/real_allocator/record_statistics.py SITE_PACKAGES` prints this table again; torch 2.11.0+cu130 and
2.15.0+cu132 give the same.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from allocator_requests import CAPACITIES, CASES, make_requests

from autoaccum.devices.simulated.allocator.blocks import Block
from autoaccum.devices.simulated.allocator.caching_allocator import CachingAllocator, CudaOutOfMemoryError
from autoaccum.devices.simulated.allocator.settings import read_settings

# Per capacity: allocated, reserved, their peaks, retries and failures at the end; and a digest of them after each.
RECORDED = {
    "": (
        ((396787200, 549453824, 493046272, 549453824, 0, 0), "7a6f764611a7460a"),
        ((443554816, 520093696, 504369664, 524288000, 68, 66), "6494c70992383496"),
        ((177746432, 209715200, 194419712, 209715200, 41, 40), "f1ccf9d26c5a0927"),
        ((47203328, 60817408, 57687040, 62914560, 94, 93), "faf7f56fcf9e572d"),
    ),
    "expandable_segments:True": (
        ((419645440, 551550976, 468933632, 551550976, 0, 0), "71b042f9e26cfa67"),
        ((349592576, 515899392, 471227904, 515899392, 18, 15), "ee4c5d9d539aaf49"),
        ((118499840, 130023424, 188744704, 195035136, 14, 14), "6ba338be5b0cc3b0"),
        ((40367104, 50331648, 48555008, 52428800, 135, 135), "9cc8170bc3a3d2d6"),
    ),
    "max_split_size_mb:20": (
        ((897892352, 1063256064, 897892352, 1063256064, 0, 0), "1c5a0f0b078ee959"),
        ((482031616, 490733568, 508348928, 524288000, 25, 19), "51f9f67876acac7f"),
        ((149519872, 199229440, 207091712, 209715200, 98, 93), "96d8b727199d23bd"),
        ((35975680, 48234496, 55587840, 60817408, 101, 97), "872b74583cc0a3c4"),
    ),
    "roundup_power2_divisions:4": (
        ((178641920, 425721856, 360049152, 425721856, 0, 0), "eb204c20a022fff7"),
        ((445245440, 507510784, 506674176, 522190848, 44, 43), "cf73cebf03b297d0"),
        ((170407424, 199229440, 200803840, 205520896, 89, 89), "69440bbae7483e40"),
        ((41036288, 62914560, 55185920, 62914560, 49, 49), "6572154e1b615949"),
    ),
    "per_process_memory_fraction:0.5,expandable_segments:True": (
        ((404875776, 520093696, 496204800, 538968064, 50, 44), "f4589564279674a5"),
        ((405835776, 517996544, 477127680, 520093696, 22, 18), "237ce74d48f61764"),
        ((147451904, 192937984, 183712256, 195035136, 44, 43), "66bdda1126d6a965"),
        ((24126464, 48234496, 49283584, 62914560, 148, 147), "49a9296b50ba1592"),
    ),
    "expandable_segments:True,max_split_size_mb:24": (
        ((602125312, 1814036480, 695537152, 1814036480, 0, 0), "f94f43dec6e9f3be"),
        ((362082816, 488636416, 478691328, 513802240, 46, 37), "ba2e42c1124b0100"),
        ((128238080, 192937984, 184552448, 195035136, 31, 23), "600e5a96b28c0a3d"),
        ((40266752, 52428800, 49390080, 54525952, 129, 129), "0af1d1d2a6f82823"),
    ),
    "expandable_segments:True,roundup_power2_divisions:8": (
        ((1075845120, 1251999744, 1120935936, 1251999744, 0, 0), "f9ccf355531ac989"),
        ((445478400, 509607936, 489795072, 509607936, 47, 40), "df41f8c7b90477ff"),
        ((69730304, 169869312, 191496192, 197132288, 79, 78), "778753fd00d8f38a"),
        ((22394880, 50331648, 44654592, 50331648, 120, 120), "d4356c44792225a7"),
    ),
}


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("index", range(len(CAPACITIES)))
def test_statistics_equal_those_of_pytorch(text: str, index: int) -> None:
    capacity, total = CAPACITIES[index]
    settings = read_settings({"PYTORCH_CUDA_ALLOC_CONF": text}).for_card(total)
    made, live, failed, digest = CachingAllocator(capacity, settings), dict[int, Block](), 0, hashlib.sha256()
    statistics: tuple[int, ...] = ()
    for block, size in make_requests(10 * CASES[text] + index):
        if size is None:
            if block in live:
                made.free(live.pop(block))
        else:
            failed += 1
            with suppress(CudaOutOfMemoryError):
                live[block] = made.malloc(size)
                failed -= 1
        peaks = made.peak_allocated_bytes, made.peak_reserved_bytes
        statistics = (made.allocated_bytes, made.reserved_bytes, *peaks, made.retries, failed)
        digest.update((" ".join(map(str, statistics)) + "\n").encode())
    assert (statistics, digest.hexdigest()[:16]) == RECORDED[text][index]
