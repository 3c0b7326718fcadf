# a GPT that trains on a laptop in seconds

out_dir = 'out-tiny'
eval_interval = 4
eval_iters = 2
log_interval = 1

dataset = 'random'
batch_size = 4
gradient_accumulation_steps = 2
block_size = 64

n_layer = 2
n_head = 4
n_embd = 128
dropout = 0.1

learning_rate = 1e-3
max_iters = 8
lr_decay_iters = 8
warmup_iters = 2
min_lr = 1e-4

compile = False
