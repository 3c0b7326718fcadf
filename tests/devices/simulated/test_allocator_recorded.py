"""The allocator does what that of PyTorch did, request by request: recorded from libc10_cuda.so without a card.

`python tests/shared/real_allocator/record.py SITE_PACKAGES` gives this table again; torch 2.11.0+cu130 and
2.15.0+cu132 give the same.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from allocator_requests import CAPACITIES, CASES, make_requests

from autoaccum.devices.simulated.allocator import Allocator, CapacityExceeded
from autoaccum.devices.simulated.allocator_blocks import Block
from autoaccum.devices.simulated.allocator_settings import read_settings

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
    "expandable_segments:True,large_segment_size_mb:12": (
        ((900758528, 1264582656, 1137727488, 1264582656, 0, 0), "21854c763996c55c"),
        ((216424960, 522190848, 474271232, 522190848, 18, 14), "f259a59ab4f65bde"),
        ((124803072, 184549376, 185613824, 209715200, 76, 72), "81a50a4915d36612"),
        ((33126912, 46137344, 52533760, 56623104, 93, 93), "dbcea5e982ec1638"),
    ),
    "large_segment_size_mb:32": (
        ((471329792, 761266176, 662907392, 761266176, 0, 0), "24f93cd8a61469d3"),
        ((164651520, 515899392, 513811456, 524288000, 7, 4), "4a188f09494d2ccc"),
        ((162099712, 205520896, 197339136, 205520896, 54, 53), "5304b9e2d1b39276"),
        ((43720704, 60817408, 61344256, 62914560, 115, 114), "621cddc823dea326"),
    ),
    "max_split_size_mb:20": (
        ((897892352, 1063256064, 897892352, 1063256064, 0, 0), "1c5a0f0b078ee959"),
        ((482031616, 490733568, 508348928, 524288000, 25, 19), "51f9f67876acac7f"),
        ((149519872, 199229440, 207091712, 209715200, 98, 93), "96d8b727199d23bd"),
        ((35975680, 48234496, 55587840, 60817408, 101, 97), "872b74583cc0a3c4"),
    ),
    "max_split_size_mb:21,max_non_split_rounding_mb:22": (
        ((403271680, 780140544, 700120064, 780140544, 0, 0), "e6e3cf1ba999279f"),
        ((240658944, 524288000, 457713664, 524288000, 0, 0), "316122151bd473e3"),
        ((166089216, 209715200, 200692736, 209715200, 91, 88), "d0411a4ecdefeee9"),
        ((37233664, 50331648, 60923904, 62914560, 102, 101), "aee51c95b23cf3f0"),
    ),
    "roundup_power2_divisions:4": (
        ((178641920, 425721856, 360049152, 425721856, 0, 0), "eb204c20a022fff7"),
        ((445245440, 507510784, 506674176, 522190848, 44, 43), "cf73cebf03b297d0"),
        ((170407424, 199229440, 200803840, 205520896, 89, 89), "69440bbae7483e40"),
        ((41036288, 62914560, 55185920, 62914560, 49, 49), "6572154e1b615949"),
    ),
    "roundup_power2_divisions:[1:2,4:8,16:4,>:2]": (
        ((302158336, 853540864, 783695872, 853540864, 0, 0), "ec1ec9ca7a167586"),
        ((419445248, 450887680, 435173376, 450887680, 0, 0), "a51644ad189c4749"),
        ((188879872, 192937984, 188880384, 205520896, 74, 74), "7cca97b022f4bed4"),
        ((58739712, 62914560, 59801600, 62914560, 163, 163), "c0d1cf95b6b7a60e"),
    ),
    "roundup_power2_divisions:[2:4,8:0,>:1]": (
        ((961526784, 1220542464, 1124723712, 1220542464, 0, 0), "d59f1af6d1fd8c54"),
        ((410010112, 520093696, 498088960, 520093696, 15, 13), "ef90b6424f3b4d0d"),
        ((186679296, 201326592, 204492288, 209715200, 62, 61), "10569aa2e5e52616"),
        ((56360960, 60817408, 61131776, 62914560, 101, 100), "d7ad9358418b4324"),
    ),
    "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6": (
        ((412120064, 522190848, 489694208, 522190848, 25, 25), "abf4611f9481cdbc"),
        ((321382400, 488636416, 479204864, 520093696, 15, 15), "2f264b56ef31d5e6"),
        ((206581760, 207618048, 208671232, 209715200, 55, 55), "a1e4fdec1fd91adf"),
        ((44666368, 54525952, 55354880, 58720256, 121, 120), "53485f6d7c592ad1"),
    ),
    "per_process_memory_fraction:0.6,garbage_collection_threshold:0.8,max_split_size_mb:32": (
        ((558277632, 616562688, 591733248, 627048448, 14, 14), "ff04fc9111c4eb4e"),
        ((500586496, 515899392, 519869440, 524288000, 58, 56), "ce11a96c8a1b46e9"),
        ((185814016, 192937984, 204574720, 209715200, 17, 13), "dac210ef7d38a5d6"),
        ((59239424, 62914560, 60818432, 62914560, 169, 168), "630e0bbd2c0ff55b"),
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


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("index", range(len(CAPACITIES)))
def test_does_what_torch_does(number: int, index: int) -> None:
    capacity, total = CAPACITIES[index]
    settings = read_settings({"PYTORCH_CUDA_ALLOC_CONF": CASES[number]}).for_card(total)
    made, live, failed, digest = Allocator(capacity, settings), dict[int, Block](), 0, hashlib.sha256()
    told: tuple[int, ...] = ()
    for block, size in make_requests(10 * number + index):
        if size is None:
            if block in live:
                made.free(live.pop(block))
        else:
            failed += 1
            with suppress(CapacityExceeded):
                live[block] = made.malloc(size)
                failed -= 1
        peaks = made.peak_allocated_bytes, made.peak_reserved_bytes
        told = (made.allocated_bytes, made.reserved_bytes, *peaks, made.retries, failed)
        digest.update((" ".join(map(str, told)) + "\n").encode())
    assert (told, digest.hexdigest()[:16]) == RECORDED[CASES[number]][index]
