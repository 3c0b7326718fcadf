"""A model of Hugging Face: its architecture by name with random weights, and random batches of the largest size.

No weights are downloaded: the configuration alone decides what a training step takes. The constants are the parameters;
`--set NAME=VALUE` gives them other values, and `--write-workload FILE` writes this file with the values in place, to be
changed further: load weights with `from_pretrained`, and take batches from your data.
"""

from contextlib import nullcontext

import torch
import transformers
import transformers.integrations.sdpa_attention

name = "Qwen/Qwen2.5-7B"  # a name on the hub, or a folder with a config.json
task = "auto"  # the X of transformers' AutoModelForX, such as CausalLM; auto: the one that the configuration names
length = 0  # tokens per sample, with those of images; encoder-decoders: of the source; 0: 1024, or the most possible
target_length = 128  # tokens of each target, for encoder-decoders and speech recognition
padding = False  # whether samples are of different lengths, padded and with a mask; else each has `length` tokens
image_size = 0  # height and width in pixels; 0: the size that the model was made for
seconds = 10.0  # seconds of sound per sample, at 16 kHz
classes = 10  # number of classes, for classifiers
dtype = "auto"  # dtype of the weights: float32, bfloat16 or float16; auto: as published
precision = "fp32"  # autocast to bf16 or fp16; fp32: no autocast, so the model computes in `dtype`
attention = "auto"  # sdpa, eager, flash_attention_2 ...; auto: sdpa, or eager if the model has no other
repeat_kv = False  # whether shared key and value heads are copied before sdpa, which is slow without on a T4 or V100
gradient_checkpointing = None  # whether layers run again in backward; None: only if weights are quantized, as in peft
load_in_4bit = False  # NF4 weights of bitsandbytes, as for QLoRA: give lora as well
load_in_8bit = False  # 8-bit weights of bitsandbytes: give lora as well
double_quant = False  # whether the scales of 4-bit weights are quantized too
lora = 0  # rank of the LoRA adapters of peft, which are then all that is trained; 0: the whole model is trained
lora_targets = ""  # layers with adapters, such as q_proj,v_proj, or all-linear; empty: peft's default, else all-linear
lora_dropout = 0.0  # dropout in front of the adapters
optimizer = "AdamW"  # a class in torch.optim, or in bitsandbytes.optim, such as AdamW8bit

TASKS = (  # Where the configuration names no task, the first one here that has the model is used.
    *("ImageTextToText", "SpeechSeq2Seq", "Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification", "CTC"),
    *("AudioClassification", "SequenceClassification", "TokenClassification"),
)
CUT_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # These take patches of images of any size.
WHOLE_IMAGES = ("llava", "internvl", "gemma3")
SPECTROGRAMS = ("whisper", "audio-spectrogram-transformer")


def load_config():
    """Return the configuration from a folder or the local cache, else from the hub."""
    try:
        try:
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except OSError:
            return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise OSError(
            f"there is no configuration of {name!r}, in a folder, the local cache or on the hub "
            f"({str(error).splitlines()[0]}): check the name and the network, log in with `hf auth login` if access is "
            f"restricted, or give a folder with a config.json"
        ) from None


def find_task():
    """Return the task of the model, a name in TASKS."""
    mappings = {known: getattr(transformers, f"AutoModelFor{known}")._model_mapping for known in TASKS}
    fitting = [known for known in TASKS if task in ("auto", known) and type(config) in mappings[known]]
    if not fitting:
        raise ValueError(f"no model for task {task} of a {config.model_type}: the tasks are auto, {', '.join(TASKS)}")
    named = [known for known in fitting if mappings[known][type(config)].__name__ in (config.architectures or ())]
    return (named or fitting)[0]


def adapt_config():
    """Put the parameters into the configuration."""
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "some method")
        raise ValueError(f"{name} is quantized by {method}: name the model it was made of, and set load_in_4bit")
    if (load_in_4bit or load_in_8bit) and not lora:
        raise ValueError("quantized weights are not trained: set lora to the rank of adapters, such as 16")
    config.use_cache = text.use_cache = False
    config.num_labels = classes
    text.output_router_logits = config.output_router_logits = False  # Balancing experts compares samples of a batch.
    if kind == "SequenceClassification" and text.pad_token_id is None:
        text.pad_token_id = config.pad_token_id = 0
    config.ctc_loss_reduction = "mean"
    config.mask_time_prob = config.mask_feature_prob = 0.0  # NumPy would draw these masks, apart from PyTorch's seed.
    config.layerdrop = config.encoder_layerdrop = config.decoder_layerdrop = 0.0  # The largest step has all layers.
    if image_size and kind == "ImageClassification":
        config.image_size = image_size


def find_length():
    """Return the tokens of a sample."""
    most = None if getattr(text, "rope_parameters", None) else getattr(text, "max_position_embeddings", None)
    if most and kind not in ("ImageClassification", "AudioClassification", "CTC", "SpeechSeq2Seq"):
        most -= most % 8  # RoBERTa and its kin count positions from 2, and have 514.
        if length > most:
            raise ValueError(f"length is {length}, and {name} has positions for {most} tokens")
    return length or min(1024, most or 1024)


def count_image_tokens():
    """Return the tokens that an image takes."""
    if config.model_type in CUT_IMAGES:
        taken = (side // vision.patch_size // vision.spatial_merge_size) ** 2
    elif config.model_type in WHOLE_IMAGES:
        taken = getattr(config, "image_seq_length", None) or config.mm_tokens_per_image
    else:
        raise ValueError(
            f"{name} is a {config.model_type}, and this file makes images for {', '.join(CUT_IMAGES + WHOLE_IMAGES)}"
        )
    if image_size and config.model_type in WHOLE_IMAGES:
        raise ValueError(f"a {config.model_type} takes images of one size: leave image_size out")
    if tokens < taken + 2:
        raise ValueError(
            f"length is {tokens}, and an image of {side} pixels takes {taken} tokens: set length above that"
        )
    return taken


config = load_config()
kind = find_task()
text = config.get_text_config()
vision = getattr(config, "vision_config", config)
if kind in ("SpeechSeq2Seq", "CTC", "AudioClassification"):
    if not hasattr(config, "conv_stride") and config.model_type not in SPECTROGRAMS:
        raise ValueError(f"{name} is a {config.model_type}, and this file does not know the sound that it takes")
elif kind == "Seq2SeqLM" and not config.is_encoder_decoder:
    raise ValueError(f"{name} is a {config.model_type}, which takes more than text")
adapt_config()
weights_dtype = config.dtype or text.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype, None)
if not isinstance(weights_dtype, torch.dtype):
    raise ValueError(f"dtype is {dtype!r}: set it to auto, float32, bfloat16 or float16")
tokens = find_length()
made_for = getattr(vision, "image_size", None) or 224
side = image_size or (made_for if isinstance(made_for, int) else made_for[0])
image_tokens = count_image_tokens() if kind == "ImageTextToText" else 0
runs_again = load_in_4bit or load_in_8bit if gradient_checkpointing is None else gradient_checkpointing
if not isinstance(runs_again, bool):
    raise ValueError(f"gradient_checkpointing is {runs_again!r}: set it to true or false")


def model():
    """Build the model on the default device, or on the host if it is quantized next: the card may not have the room."""
    if repeat_kv:
        transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    auto = getattr(transformers, f"AutoModelFor{kind}")
    chosen = None if attention == "auto" else attention
    quantized = load_in_4bit or load_in_8bit
    with torch.device("cpu") if quantized else nullcontext():
        built = auto.from_config(config, dtype=weights_dtype, attn_implementation=chosen)
    if quantized:
        built = quantize(built)
    if runs_again:
        enable = getattr(built, "activation_checkpointing_enable", built.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return add_adapters(built) if lora else built


def quantize(built):
    """Load the model's weights as `from_pretrained` does those of a checkpoint, quantized by bitsandbytes."""
    from peft import prepare_model_for_kbit_training

    if load_in_4bit:
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quant}
        settings |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": weights_dtype}
    else:  # A threshold above 0 would look for outliers in the values of each batch.
        settings = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    tied = built.all_tied_weights_keys  # A checkpoint holds these weights once.
    transformers.utils.logging.disable_progress_bar()
    loaded = type(built).from_pretrained(
        None,
        config=built.config,
        state_dict={key: values for key, values in built.state_dict().items() if key not in tied},
        dtype=weights_dtype,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
        quantization_config=transformers.BitsAndBytesConfig(**settings),
    )
    return prepare_model_for_kbit_training(loaded.train(), use_gradient_checkpointing=False)


def add_adapters(built):
    """Freeze the model and put adapters beside its layers."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    targets = lora_targets if lora_targets == "all-linear" else lora_targets.replace(",", " ").split()
    if not targets and config.model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        targets = "all-linear"
    if runs_again:
        built.enable_input_require_grads()
    return get_peft_model(built, LoraConfig(r=lora, target_modules=targets or None, lora_dropout=lora_dropout))


def batch(size):
    """Make `size` samples of the task."""
    if kind in ("ImageClassification", "AudioClassification", "SequenceClassification"):
        labels = torch.randint(classes, (size,))
    elif kind in ("Seq2SeqLM", "SpeechSeq2Seq", "CTC"):
        labels = torch.randint(1, text.vocab_size, (size, target_length))
    if kind == "ImageClassification":
        return {"pixel_values": torch.randn(size, config.num_channels, side, side), "labels": labels}
    if kind in ("AudioClassification", "SpeechSeq2Seq", "CTC"):
        return make_sounds(size) | {"labels": labels}
    ids = torch.randint(text.vocab_size // 2, (size, tokens))  # Special tokens are in the upper half.
    samples = {"input_ids": ids}
    if kind == "CausalLM":
        labels = ids.clone()
    elif kind == "MaskedLM":
        labels = ids.masked_fill(torch.arange(tokens) % 7 != 0, -100)
    elif kind == "TokenClassification":
        labels = torch.randint(classes, ids.shape)
    elif kind == "ImageTextToText":
        samples |= add_images(ids)
        labels = ids.masked_fill(torch.arange(tokens) <= image_tokens, -100)
    samples["labels"] = labels
    if padding:  # Each sample ends earlier than the one before.
        ends = 1 + torch.arange(size)[:, None]
        samples["attention_mask"] = (torch.arange(tokens) < tokens - ends % (tokens // 2)).long()
        if labels.ndim == 2:
            most = labels.shape[1]
            labels[torch.arange(most) >= most - ends % (most // 2)] = -100
    return samples


def add_images(ids):
    """Put the tokens of an image behind the first token of each text, and return the images."""
    image = getattr(config, "image_token_id", None) or config.image_token_index
    ids[:, 1 : 1 + image_tokens] = image
    is_image = (ids == image).long()
    if config.model_type in WHOLE_IMAGES:
        types = {"token_type_ids": is_image} if config.model_type == "gemma3" else {}
        return {"pixel_values": torch.randn(len(ids), 3, side, side), **types}
    edge = side // vision.patch_size // vision.spatial_merge_size * vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.randn(len(ids), edge**2, values),
        "image_grid_thw": torch.tensor([[1, edge, edge]]).repeat(len(ids), 1),
        "mm_token_type_ids": is_image,
    }


def make_sounds(size):
    """Make sounds as the model takes them: values, or the frames of a spectrogram."""
    if config.model_type == "whisper":
        return {"input_features": torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)}
    if config.model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(size, config.max_length, config.num_mel_bins)}
    return {"input_values": torch.randn(size, int(16_000 * seconds))}


def loss(model, batch):
    """Compute the model's own loss, the mean over what `weight` counts."""
    if kind == "ImageTextToText" and config.model_type in CUT_IMAGES:  # Patches of all images are rows of one tensor.
        batch = {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}
    return model(**batch).loss


def weight(batch):
    """Count what the loss is the mean of: tokens that have a label, or samples."""
    labels = batch["labels"]
    if labels.ndim == 1 or kind == "CTC":
        return len(labels)
    if kind in ("CausalLM", "ImageTextToText"):
        labels = labels[:, 1:]  # The model shifts them, so that the first has nothing to predict it.
    return (labels != -100).sum()


if optimizer.lower() not in {known.lower() for known in dir(torch.optim)}:
    import bitsandbytes

    if not hasattr(bitsandbytes.optim, optimizer):
        raise ValueError(f"optimizer is {optimizer!r}, which neither torch.optim nor bitsandbytes.optim has")
    optimizer = getattr(bitsandbytes.optim, optimizer)
