"""The allocator gives the statistics of PyTorch's own, request by request, as recorded from libc10_cuda.so.

`python tests/shared/real_allocator/record_statistics.py SITE_PACKAGES` prints this table again. torch 2.11.0+cu130 and
2.15.0+cu132 give the same for one stream; those for several are 2.15.0's.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from allocator_requests import CAPACITIES, CASES, STREAMS, make_requests, stream_of

from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import CachingAllocator, CudaOutOfMemoryError, read_settings

# Per settings and number of streams, and per capacity: allocated, reserved, their peaks, retries and failures at the
# end; and a digest of them after each.
RECORDED = {
    ("", 1): (
        ((396787200, 549453824, 493046272, 549453824, 0, 0), "7a6f764611a7460a"),
        ((443554816, 520093696, 504369664, 524288000, 68, 66), "6494c70992383496"),
        ((177746432, 209715200, 194419712, 209715200, 41, 40), "f1ccf9d26c5a0927"),
        ((47203328, 60817408, 57687040, 62914560, 94, 93), "faf7f56fcf9e572d"),
    ),
    ("expandable_segments:True", 1): (
        ((419645440, 551550976, 468933632, 551550976, 0, 0), "71b042f9e26cfa67"),
        ((349592576, 515899392, 471227904, 515899392, 18, 15), "ee4c5d9d539aaf49"),
        ((118499840, 130023424, 188744704, 195035136, 14, 14), "6ba338be5b0cc3b0"),
        ((40367104, 50331648, 48555008, 52428800, 135, 135), "9cc8170bc3a3d2d6"),
    ),
    ("max_split_size_mb:20", 1): (
        ((897892352, 1063256064, 897892352, 1063256064, 0, 0), "1c5a0f0b078ee959"),
        ((482031616, 490733568, 508348928, 524288000, 25, 19), "51f9f67876acac7f"),
        ((149519872, 199229440, 207091712, 209715200, 98, 93), "96d8b727199d23bd"),
        ((35975680, 48234496, 55587840, 60817408, 101, 97), "872b74583cc0a3c4"),
    ),
    ("roundup_power2_divisions:4", 1): (
        ((178641920, 425721856, 360049152, 425721856, 0, 0), "eb204c20a022fff7"),
        ((445245440, 507510784, 506674176, 522190848, 44, 43), "cf73cebf03b297d0"),
        ((170407424, 199229440, 200803840, 205520896, 89, 89), "69440bbae7483e40"),
        ((41036288, 62914560, 55185920, 62914560, 49, 49), "6572154e1b615949"),
    ),
    ("expandable_segments:True,max_split_size_mb:24", 1): (
        ((602125312, 1814036480, 695537152, 1814036480, 0, 0), "f94f43dec6e9f3be"),
        ((362082816, 488636416, 478691328, 513802240, 46, 37), "ba2e42c1124b0100"),
        ((128238080, 192937984, 184552448, 195035136, 31, 23), "600e5a96b28c0a3d"),
        ((40266752, 52428800, 49390080, 54525952, 129, 129), "0af1d1d2a6f82823"),
    ),
    ("expandable_segments:True,roundup_power2_divisions:8", 1): (
        ((1075845120, 1251999744, 1120935936, 1251999744, 0, 0), "f9ccf355531ac989"),
        ((445478400, 509607936, 489795072, 509607936, 47, 40), "df41f8c7b90477ff"),
        ((69730304, 169869312, 191496192, 197132288, 79, 78), "778753fd00d8f38a"),
        ((22394880, 50331648, 44654592, 50331648, 120, 120), "d4356c44792225a7"),
    ),
    ("", 4): (
        ((394692608, 859832320, 489906176, 859832320, 0, 0), "b2990f95850f10f4"),
        ((425726976, 515899392, 509614080, 524288000, 109, 89), "a8d641e7ddbf8c1c"),
        ((169352704, 199229440, 190220800, 209715200, 76, 54), "7c82d96a9844d1de"),
        ((20992512, 58720256, 52443136, 62914560, 135, 127), "2f7e27d12a32e27b"),
    ),
    ("expandable_segments:True", 4): (
        ((419645440, 935329792, 468933632, 935329792, 0, 0), "fbfe174d4f97b126"),
        ((361127424, 499122176, 456339968, 522190848, 39, 20), "6cc882cff80c4c39"),
        ((118499840, 155189248, 156244992, 199229440, 35, 19), "f0425ab190e2db0f"),
        ((33027072, 52428800, 37114880, 62914560, 159, 146), "4e9278777b0cb820"),
    ),
    ("max_split_size_mb:20", 4): (
        ((877971456, 1725956096, 877971456, 1725956096, 0, 0), "2d42c95ff21a9e07"),
        ((451625472, 494927872, 488427520, 524288000, 40, 22), "19f20dc6f885c88c"),
        ((154762752, 195035136, 200483840, 209715200, 123, 98), "a304f17338490724"),
        ((21291520, 52428800, 53587968, 62914560, 131, 113), "4df56cf5c8510c4c"),
    ),
    ("roundup_power2_divisions:4", 4): (
        ((175234048, 838860800, 358214144, 838860800, 0, 0), "32cf922e1bdb122b"),
        ((408545280, 482344960, 505533952, 524288000, 72, 49), "f61860f37dd676c0"),
        ((159921664, 203423744, 199230976, 209715200, 137, 109), "6906111b754c4c57"),
        ((46017024, 62914560, 57927168, 62914560, 78, 72), "52ee60ee4b382abf"),
    ),
    ("expandable_segments:True,max_split_size_mb:24", 4): (
        ((602125312, 2139095040, 695537152, 2139095040, 0, 0), "6791a0507ead213c"),
        ((282391040, 515899392, 436543488, 517996544, 56, 42), "9353c80537997ea6"),
        ((122994688, 199229440, 175113728, 209715200, 53, 31), "c8c860407e6de4d8"),
        ((39216640, 60817408, 44460032, 62914560, 154, 148), "1227af6f3c51ed0e"),
    ),
    ("expandable_segments:True,roundup_power2_divisions:8", 4): (
        ((1075845120, 1512046592, 1120935936, 1512046592, 0, 0), "45bff1c7f2a2a64d"),
        ((414021120, 517996544, 458669056, 517996544, 64, 44), "8104b5271dbd0945"),
        ((69730304, 192937984, 177341440, 199229440, 108, 85), "5b11db00d9b2dffd"),
        ((29603840, 52428800, 44151296, 56623104, 144, 135), "b086e8afb15533d5"),
    ),
}


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("streams", [1, STREAMS])
@pytest.mark.parametrize("index", range(len(CAPACITIES)))
def test_statistics_equal_those_of_pytorch(text: str, streams: int, index: int) -> None:
    capacity, total = CAPACITIES[index]
    settings = read_settings({"PYTORCH_CUDA_ALLOC_CONF": text}, total)
    made, live, failed, digest = CachingAllocator(capacity, settings), dict[int, Block](), 0, hashlib.sha256()
    statistics: tuple[int, ...] = ()
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
        statistics = (made.allocated_bytes, made.reserved_bytes, *peaks, made.retries, failed)
        digest.update((" ".join(map(str, statistics)) + "\n").encode())
    assert (statistics, digest.hexdigest()[:16]) == RECORDED[text, streams][index]
