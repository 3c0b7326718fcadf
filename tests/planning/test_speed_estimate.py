"""The estimate of an update's time follows the card's rates, and published ratios within the band that is stated."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process_tracer import InProcessTracer

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.simulation_requests import CountCost
from autoaccum.planning.throughput import RATIO_BAND, estimate_seconds, estimate_throughput
from autoaccum.simulation.cards import CardRates, all_cards, card_rates, find_card
from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.sources.source import FileSource
from autoaccum.spec import Precision, TrainingSpec, WorkloadFacts

COST = UpdateCost(
    flops=Amount(sample=1e12),
    moved_bytes=Amount(sample=1e6, part=5e8, update=1e9),
    host_bytes=Amount(update=2e9),
    card_bytes=Amount(sample=1e9, part=1e8),
    kernels=Amount(part=500),
)
NAMES = ("flops", "moved_bytes", "host_bytes", "card_bytes")
A100 = card_rates(find_card("a100-80gb"))

LLAMA_RATIOS = {("h100", "a100-80gb"): (2.09, 2.45), ("a100-40gb", "a100-80gb"): (0.79, 0.90)}
"""Least and most tokens per second and card, by MosaicML's tables of MPT models in bf16 at one micro-batch or more
(mosaicml/llm-foundry, scripts/train/benchmarking/README.md): 760m, 1b, 3b and 7b with 2,048 tokens on 8 cards."""

RESNET_RATIOS = {("rtx4090", "rtx3090"): (1.44, 1.77)}
"""Those of SSD, ResNet-50, BERT base and Transformer-XL large in fp16 (Lambda, "NVIDIA GeForce RTX 4090 vs RTX 3090
Deep Learning Benchmark", 2022)."""

GPT2_TOKENS = {
    "b200": 785_629,
    "h200": 495_147,
    "h100": 466_440,
    "h100-pcie": 289_447,
    "rtx-pro-6000": 287_774,
    "a100-80gb": 208_962,
    "rtx5090": 196_551,
    "l40s": 142_641,
    "rtx6000-ada": 107_156,
    "l40": 96_346,
    "rtx-a6000": 92_444,
    "a40": 87_612,
    "rtx-a5000": 73_707,
    "rtx-a4500": 62_451,
    "rtx4000-ada": 55_103,
    "rtx-a4000": 51_603,
    "l4": 40_423,
}
"""Tokens per second of GPT-2 with 124 million parameters in bf16, compiled, with torch 2.8 on rented machines, at the
largest micro-batch of 16 to 64 that was run: the head of a training script on GitHub ("tok/h: 2,858,007,564")."""


def seconds(cost: UpdateCost, precision: str = "bf16", rates: CardRates = A100, parts: int = 4) -> float:
    return estimate_seconds(cost, rates, [16] * parts, precision=precision)


def only(**amounts: Amount) -> UpdateCost:
    return UpdateCost(**{name: amounts.get(name, Amount()) for name in NAMES})


@pytest.fixture(scope="module")
def gpt2() -> UpdateCost:
    """What an update of GPT-2 costs, counted on a card of the same kernels as most."""
    path = Path(__file__).parents[2] / "examples" / "gpt2.py"
    tracer = InProcessTracer(TrialSettings(source=FileSource(str(path)), rank_samples=64), find_card("rtx4090"))
    try:
        return tracer.call(CountCost(parts=(2, 4, 2)))
    finally:
        tracer.close()


def test_the_rate_of_a_known_card_is_a_part_of_what_its_maker_says() -> None:
    """An A100 has 312 TFLOPS in bf16, 19.5 in fp32, and 2,039 GB/s."""
    computing = only(flops=COST.flops)
    assert 64e12 / seconds(computing) == pytest.approx(0.6 * 312e12)
    assert 64e12 / seconds(computing, "fp32") == pytest.approx(0.6 * 19.5e12)
    assert 64e9 / seconds(only(card_bytes=Amount(sample=1e9))) == pytest.approx(0.8 * 2039e9)


def test_everything_that_is_added_takes_time() -> None:
    whole = seconds(COST)
    parts = [seconds(only(**{name: getattr(COST, name)})) for name in NAMES]
    assert sum(parts) == pytest.approx(whole)
    assert all(part > 0 for part in parts)
    assert seconds(COST, parts=8) > whole


def test_every_card_has_rates_and_newer_precisions_are_no_slower() -> None:
    for card in all_cards():
        rates = card_rates(card)
        assert 0 < seconds(COST, "fp16", rates) <= seconds(COST, "fp32", rates), card.name
        assert seconds(COST, "fp16", rates) <= seconds(COST, "bf16", rates), card.name


def test_small_micro_batches_wait_for_the_host_and_the_knee_lies_where_they_do_not() -> None:
    """Kernels of 3.5 ms a part on the host are as long as 0.66 samples on an A100, and as 1.5 on an H100."""
    cost = UpdateCost(flops=Amount(sample=1e12), moved_bytes=Amount(), host_bytes=Amount(), kernels=Amount(part=5000))
    schedules = [[size] * (64 // size) for size in (1, 2, 4, 8, 16, 32, 64)]
    known = estimate_throughput(cost, A100, schedules, device="a100", precision="bf16")
    rates = {speed.micro_batch: speed.samples_per_second or 0.0 for speed in known.speeds}
    assert rates[2] == pytest.approx(2 * rates[1])
    assert rates[8] == pytest.approx(rates[64])
    assert (known.knee, known.kind) == (8, "estimated")
    faster = estimate_throughput(cost, card_rates(find_card("h100")), schedules, device="h100", precision="bf16")
    assert faster.knee > known.knee, "a faster card waits longer"


def test_ratios_between_cards_are_the_published_ones_within_the_band(gpt2: UpdateCost) -> None:
    def rate(name: str, precision: str = "bf16") -> float:
        return 64 / estimate_seconds(gpt2, card_rates(find_card(name)), [16] * 4, precision=precision)

    for (one, other), (least, most) in (*LLAMA_RATIOS.items(), *RESNET_RATIOS.items()):
        assert least / RATIO_BAND < rate(one) / rate(other) < most * RATIO_BAND, (one, other)
    base = "a100-80gb"
    off = {name: rate(name) / rate(base) * GPT2_TOKENS[base] / tokens for name, tokens in GPT2_TOKENS.items()}
    assert all(1 / RATIO_BAND < each < RATIO_BAND for each in off.values()), off
    close = [name for name, each in off.items() if 1 / 1.3 < each < 1.3]
    assert len(close) >= len(off) * 2 / 3, off


@pytest.mark.parametrize(
    ("dtypes", "precision", "expected"),
    [
        (("fp32",), "fp32", "fp32"),
        (("fp32",), "bf16", "bf16"),
        (("bf16", "fp32"), "fp32", "bf16"),  # LoRA on weights as they are published.
        (("bf16",), "fp16", "fp16"),
        (("uint8", "fp16"), "fp32", "fp16"),
    ],
)
def test_products_without_autocast_are_as_precise_as_the_weights(
    dtypes: tuple[str, ...], precision: Precision, expected: str
) -> None:
    assert WorkloadFacts(dtypes=dtypes).product_precision(TrainingSpec(precision=precision)) == expected
