"""The pure parts of the scores against measured runs: no table of measurements and no library of models is needed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accuracy import TABLES
from truths import timm_a100_40gb, timm_rtx3090, xmem_rtx4060
from truths.cases import Case, Predicted, Scored, Verdict, scored_from_record
from truths.crew import predict_all
from truths.model_classes import class_of
from truths.report import format_misses, format_scores
from truths.scores import percentile, score
from truths.worker import read_case, write_case

GIB, MIB = 1 << 30, 1 << 20
ACCURACY = Path(__file__).with_name("accuracy.py")

BRACKET = {"model": "resnet50", "img_size": "224", "channels_last": "1", "fits": "64", "fails": "96"}
RUN = {
    "family": "CNN",
    "model": "ResNet101",
    "batch": "399",
    "optimizer": "SGD",
    "gpu": "NVIDIA GeForce RTX 4060",
    "gpu_total_bytes": str(8 * GIB),
    "zero_grad_position": "",
    "ground_bytes": str(6 * GIB),
    "real_oom": "false",
    "min_cap_ok_bytes": str(5 * GIB),
    "max_cap_oom_bytes": str(4 * GIB),
}


def predicted(batch: int = 64, outcome: str = "ok", **changes: Any) -> Predicted:
    made = Predicted(
        batch=batch,
        outcome=outcome,
        capacity_bytes=7 * GIB,
        peak_bytes=9 * GIB,
        shown_bytes=5 * GIB,
        allocated_bytes=4 * GIB,
        least_bytes=4 * GIB + 1,
        band_bytes=0,
        start_bytes=0,
        modules_bytes=0,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("row", "outcomes", "crashes", "timid", "right"),
    [
        ({}, ("ok", "oom"), False, False, True),
        ({}, ("tight", "oom"), False, False, True),
        ({}, ("ok", "ok"), True, False, False),
        ({}, ("ok", "tight"), True, False, False),
        ({}, ("oom", "oom"), False, True, False),
        ({"fails": ""}, ("ok",), None, False, True),
        ({"fits": ""}, ("ok",), True, None, False),
    ],
)
def test_a_bracket_is_right_where_both_batches_do_what_they_did(
    row: dict[str, str], outcomes: tuple[str, ...], crashes: bool | None, timid: bool | None, right: bool
) -> None:
    (case,) = timm_rtx3090.read([{**BRACKET, **row}])
    verdict = timm_rtx3090.judge(case, [predicted(*run) for run in zip(case.batches, outcomes, strict=True)])
    assert (verdict.would_crash, verdict.too_timid, verdict.right) == (crashes, timid, right)
    assert verdict.complete == (len(outcomes) == 2)


@pytest.mark.parametrize(
    ("row", "least_bytes", "outcome", "crashes", "timid", "complete"),
    [
        ({}, 4 * GIB + 1, "ok", False, False, True),
        ({}, 5 * GIB, "ok", False, False, True),
        ({}, 4 * GIB, "ok", True, False, True),
        ({}, 5 * GIB + 1, "ok", False, True, True),
        ({"min_cap_ok_bytes": ""}, 9 * GIB, "oom", False, None, False),
        ({"max_cap_oom_bytes": ""}, GIB, "ok", None, False, False),
        ({"max_cap_oom_bytes": str(5 * GIB)}, GIB, "ok", None, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 5 * GIB, "ok", True, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 8 * GIB, "oom", False, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 3 * GIB, "oom", True, None, False),
    ],
)
def test_the_least_is_right_between_the_caps(
    row: dict[str, str], least_bytes: int, outcome: str, crashes: bool | None, timid: bool | None, complete: bool
) -> None:
    (case,) = xmem_rtx4060.read([{**RUN, **row}])
    verdict = xmem_rtx4060.judge(case, [predicted(399, outcome, least_bytes=least_bytes)])
    assert (verdict.would_crash, verdict.too_timid, verdict.complete) == (crashes, timid, complete)


def test_the_peak_is_compared_where_the_card_did_not_cut_it_short() -> None:
    for real_oom, error in (("false", 0.5), ("true", None)):
        (case,) = xmem_rtx4060.read([{**RUN, "real_oom": real_oom}])
        verdict = xmem_rtx4060.judge(case, [predicted(399, shown_bytes=8 * GIB, modules_bytes=GIB, start_bytes=GIB)])
        assert verdict.peak_error == error


def test_the_smallest_and_the_largest_batch_of_a_model_tell_its_growth() -> None:
    rows = [{"model": "resnet50", "batch": str(b), "process_mib": str(1000 + 100 * b)} for b in (16, 8, 32)]
    (case,) = timm_a100_40gb.read(rows)
    assert case.batches == (8, 32)
    runs = [predicted(8, shown_bytes=1000 * MIB, start_bytes=300 * MIB), predicted(32, shown_bytes=4210 * MIB)]
    verdict = timm_a100_40gb.judge(case, runs)
    assert verdict.right is None
    assert verdict.peak_error == pytest.approx(4210 / 4200 - 1)
    assert verdict.error_bytes == 10 * MIB
    assert verdict.per_sample_error == pytest.approx(2910 / 2400 - 1)


@pytest.mark.parametrize(
    ("kind", "models"),
    [
        (
            "ResNets",
            "gluon_resnet152_v1d seresnet50t res2next50 legacy_senet154 regnetz_c16 nf_ecaresnet101 skresnet50d",
        ),
        (
            "EfficientNets",
            "tf_mixnet_l rexnetr_130 MobeNetV3Small mobilenetv2_120d fbnetv3_d MNASNet1_0 efficientnet_em",
        ),
        ("other CNNs", "VGG16 densenetblur121d inception_resnet_v2 dm_nfnet_f0 cs3edgenet_x ConvNeXtBase repvgg_b3"),
        (
            "ViTs",
            "vit_large_patch32_224 deit3_base_patch16_224 swinv2_cr_small_384 cait_m36_384 pit_b_224 jx_nest_base",
        ),
        ("mixers", "gmlp_ti16_224 resmlp_36_224 mixer_b16_224_miil convmixer_1536_20 poolformer_m48 sequencer2d_s"),
        ("attention hybrids", "coat_tiny mobilevit_xxs bat_resnext26ts sehalonet33ts vit_base_resnet26d_224 levit_128"),
        ("attention hybrids", "vit_small_r26_s32_224 sebotnet33ts_256 maxvit_tiny_tf_224 eca_halonext26ts"),
        ("GPTs", "openai-community/gpt2 facebook/opt-125m EleutherAI/pythia-70m cerebras/Cerebras-GPT-111M"),
        ("T5", "T5-small t5-base google/flan-t5-small google/mt5-small"),
        ("BERTs", "bert-large-uncased distilbert-base-uncased google/electra-small-discriminator"),
        ("others", "test_byobnet nothing_known"),
    ],
)
def test_a_name_tells_the_class(kind: str, models: str) -> None:
    assert {model: class_of(model) for model in models.split()} == dict.fromkeys(models.split(), kind)


def test_percentiles_lie_between_values() -> None:
    assert percentile([10, 0], 0.95) == pytest.approx(9.5)
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([], 0.5) is None


def test_scores_count_each_kind_of_miss_and_both_signs_of_an_error() -> None:
    verdicts = [
        Verdict(would_crash=False, too_timid=False, complete=True, peak_error=-0.1, error_bytes=-MIB),
        Verdict(would_crash=True, too_timid=False, complete=True, peak_error=0.3, error_bytes=3 * MIB),
        Verdict(too_timid=True),
        Verdict(peak_error=-0.2, error_bytes=-2 * MIB),
    ]
    found = score("ViTs", verdicts)
    assert (found.judged, found.right, found.complete, found.complete_right) == (3, 1, 2, 1)
    assert (found.would_crash, found.too_timid, found.peaks) == (1, 1, 3)
    assert (found.median_error, found.bias, found.median_error_bytes) == (0.2, -0.1, -MIB)


def make_scored(row: dict[str, str], **changes: Any) -> Scored:
    (case,) = timm_rtx3090.read([{**BRACKET, **row}])
    return Scored(case=case, **changes)


def test_a_report_has_classes_by_name_then_all_and_names_what_was_skipped() -> None:
    done = [
        make_scored({}, verdict=Verdict(would_crash=True, too_timid=False), predicted=(predicted(), predicted(96))),
        make_scored({"model": "vit_tiny"}, verdict=Verdict(would_crash=False, too_timid=False)),
        make_scored({"model": "semobilevit_s"}, unknown=True),
        make_scored({"model": "gone"}, failure="RuntimeError: no | such\nshape"),
    ]
    text = format_scores("Brackets", done)
    heading, table, unknown, *failures = text.split("\n\n")
    assert heading == "### Brackets"
    assert [line.split("|")[1].strip() for line in table.splitlines()] == ["class", "-" * 7, "ResNets", "ViTs", "all"]
    assert "1 (50.0 %)" in table
    assert "median error" not in table
    assert unknown.endswith("1 rows skipped, of models that are not in the installed library: semobilevit_s")
    assert failures[0] == "1 rows could not be predicted:"
    assert failures[1:] == ["- timm_rtx3090 gone 224 1 64 96: RuntimeError: no | such shape"]
    assert [line.split(" (")[0] for line in format_misses(done)] == ["timm_rtx3090 resnet50 224 1 64 96"]


def test_a_case_survives_the_way_to_a_worker() -> None:
    (case,) = timm_rtx3090.read([BRACKET])
    assert read_case(write_case(case)) == case


@pytest.mark.parametrize(
    ("record", "unknown", "failure"),
    [({"unknown": True}, True, None), ({"failure": "ValueError: no", "seconds": 1.0}, False, "ValueError: no")],
)
def test_a_worker_that_predicts_nothing_leaves_no_verdict(
    record: dict[str, Any], unknown: bool, failure: str | None
) -> None:
    (case,) = timm_rtx3090.read([BRACKET])
    scored = scored_from_record(case, timm_rtx3090.judge, record)
    assert (scored.verdict, scored.unknown, scored.failure) == (None, unknown, failure)


def test_a_worker_that_dies_is_a_failure_with_its_last_words_and_the_next_case_has_another() -> None:
    cases = [Case(table="no_such_table", row={}, model=model, kind="others", batches=()) for model in ("one", "two")]
    answers = {case.model: record["failure"] for case, record in predict_all(cases, 1)}
    died = "exit status 1: ModuleNotFoundError: No module named 'truths.no_such_table'"
    assert answers == {"one": died, "two": died}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_named_like_its_file(name: str) -> None:
    table = importlib.import_module(f"truths.{name}")
    assert name == table.NAME
    assert table.read([]) == []


def test_missing_tables_are_said_and_skipped(tmp_path: Path) -> None:
    done = ask_accuracy(tmp_path)
    assert done.returncode == 3
    *missing, last = done.stderr.splitlines()
    assert missing == [f"{tmp_path / f'{name}.csv'} is missing: skipped" for name in TABLES]
    assert last == "nothing was scored: there are no such tables or rows"
    assert done.stdout.startswith("`python ")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = ask_accuracy(tmp_path / "gone")
    assert done.returncode == 2
    assert done.stderr.endswith(f"{tmp_path / 'gone'} is not a folder: give the one that holds the tables\n")


def ask_accuracy(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ACCURACY), str(folder)], capture_output=True, text=True, check=False)
