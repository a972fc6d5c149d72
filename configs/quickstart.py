# A toy for the CPU that goes through all three modes, to see the machinery run and the curves come out.
#     python data/pysrc/prepare.py --max_document 1023    # Python sources on this machine, as bytes
#     python train.py configs/quickstart.py               # `make train` does both, then samples
# 0.7M parameters; 375 steps of 4096 tokens = 1.5M tokens, about 7 TFLOP in matrices.
# Documents of 1023 tokens and their EOS: so short a run should see pieces of many packages.
from configs import Stage

out_dir = "out/quickstart"
dataset = "pysrc"

n_layer = 3
d_model = 128
n_head = 4
n_kv_head = 2
n_proxy_head = 2
head_dim = 32
d_mlp = 384
block_size = 32
top_k = 128  # 4 of the 32 blocks of the longest sequence

tokens_per_step = 4096
stages = [
    Stage(steps=180, seq_len=256, attention="dense"),
    Stage(steps=90, seq_len=512, attention="warmup"),
    Stage(steps=80, seq_len=512, attention="sparse"),
    Stage(steps=25, seq_len=1024, attention="sparse"),
]

optimizer = "muon"
lr = 4e-3
proxy_lr = 2e-3
lr_warmup_tokens = 10 * tokens_per_step
lr_decay_share = 0.5

layer_interval = 60
eval_interval = 90
eval_tokens = 2**15
kl_interval = 15
checkpoint_interval = 90
