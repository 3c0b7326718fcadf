"""Writes a tiny Llama with its tokenizer, and a dataset of short texts, for TRL's command line:

python make_trl_files.py files
HF_HUB_OFFLINE=1 trl sft --model_name_or_path files/model --dataset_name files/data --output_dir out --report_to none \
    --max_length 128 --packing --packing_strategy wrapped --use_cpu \
    --per_device_train_batch_size {micro_batch} --gradient_accumulation_steps {iter_size}

`trl sft` calls what `accelerate launch` calls, which runs `trl/scripts/sft.py` in a process of its own. Without
`--use_cpu` it trains in bf16 on the GPU.
"""
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
SPECIAL = ["<pad>", "<s>", "</s>"]
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")

config = LlamaConfig(
    vocab_size=len(vocab), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")

random.seed(0)
words = ["the", "a", "cat", "dog", "house", "river", "sees", "eats", "builds", "crosses", "slowly", "and", "then"]
data = folder / "data"
data.mkdir(parents=True, exist_ok=True)
with open(data / "train.jsonl", "w") as file:
    for _ in range(512):
        file.write(json.dumps({"text": " ".join(random.choices(words, k=40))}) + "\n")
