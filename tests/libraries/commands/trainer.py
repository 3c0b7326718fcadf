"""transformers' Trainer, with its own flags:

python trainer.py --output_dir out --per_device_train_batch_size {micro_batch} \
    --gradient_accumulation_steps {iter_size} --use_cpu
"""
import os
from dataclasses import dataclass, field

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_embd: int = field(default=128, metadata={"help": "Width of the model."})
    n_layer: int = field(default=2)
    block_size: int = field(default=128)


@dataclass
class DataArguments:
    samples: int = field(default=256, metadata={"help": "Number of random sequences."})


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, samples, block_size, vocab_size):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (samples, block_size), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=256, n_positions=model_args.block_size, n_embd=model_args.n_embd, n_layer=model_args.n_layer,
        n_head=4, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=RandomTokens(data_args.samples, model_args.block_size, config.vocab_size),
    )
    trainer.train()


if __name__ == "__main__":
    main()
