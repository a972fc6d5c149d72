# 122M parameters to 32K tokens: 42 minutes of steps on one H200, by the speed of shorter runs.
#     python data/pysrc/prepare.py --max_bytes 0 --tokenizer gpt2 --out data/pysrc_gpt2
#     python data/passkey/prepare.py --length 32768 --tokenizer gpt2 \
#         --haystack pysrc_gpt2 --out data/passkey_32k
#     torchrun train.py configs/small_32k.py    # --nproc_per_node=8 on a node: the same config
#
# Tokens: 2800 steps of 2^18 = 734M, a third of them in warmup. Python sources of one machine are some 10M to
# 100M tokens, which then pass many times: enough to see the method work. For a better model give
# --dataset a larger one (data/hf, data/text).
# Time: a token costs 6 x 122M = 0.73 GFLOP in matrices and 0.4 to 0.5 in attention (12 layers, forward and
# backward; 2048 selected tokens of 8 heads x 128 cost what dense attention costs at 4K), selection and KL
# included, so 1.2 GFLOP in all and 0.88 EFLOP for the run. At 276,000 to 306,000 tokens/s, as measured on one
# H200 (2026-11-30, see README), that is 42 minutes, a third of the peak.
from configs import Stage

out_dir = "out/small_32k"
dataset = "pysrc_gpt2"
retrieval_sets = ["passkey_32k"]

n_layer = 12
d_model = 768
n_head = 8
n_kv_head = 2
n_proxy_head = 2
head_dim = 128
d_mlp = 2048
vocab_size = 50304  # gpt2's 50257, rounded up to 128
rope_theta = 500_000.0

tokens_per_step = 2**18
micro_batch_tokens = 2**16
stages = [
    Stage(steps=1000, seq_len=4096, attention="warmup"),
    Stage(steps=800, seq_len=8192, attention="sparse"),
    Stage(steps=600, seq_len=16384, attention="sparse"),
    Stage(steps=400, seq_len=32768, attention="sparse"),
]

lr = 1e-3
lr_warmup_tokens = 100 * tokens_per_step
