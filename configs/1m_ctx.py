# 400M parameters (350M in layers, 51M in the tied embedding) to 1M tokens of context.
#     torchrun train.py configs/1m_ctx.py --dry_run   # stages, parameters, memory, data, and nothing else
#     torchrun train.py configs/1m_ctx.py             # one GPU
# (A rank takes whole sequences today, so 8 ranks need tokens_per_step = 2**23, or a config without the last
# two stages; train.py says so before it starts.)
#
# Tokens: 10B = 9539 steps of 2^20, 25 a parameter: 2B in warmup and 4B sparse at 8K, where they are cheap,
# then 2B at 32K, 1B at 128K, and half a billion each (477 steps) at 512K and at 1M, where a step is 2
# sequences and 1.
# Time: a token costs 2.4 GFLOP in matrices (6 x 401M; from 128K on 3.1, with each layer's forward again) and
# 1.6 in sparse attention (24 layers, 2048 selected tokens of 16 heads x 128), whatever the length; warmup at
# 8K costs 3.2 there instead. Selection grows with the length, 4 heads x 128 over half of it: 0.1 GFLOP at 8K,
# 1.6 at 128K, 13 at 1M. In all 5.6 GFLOP a token in warmup, then 4.1, 4.4, 6.3, 11 and 18: 57 EFLOP. Steps
# of at most 14.9, then 10.6, 11.5, 14.6, 24.3 and 31.9 s, as measured on one H200 (2026-11-30, see README),
# make 37 hours, without evaluations.
# Memory: what layers keep for backward is chosen by stage, the most that fits. Predicted for one GPU: 78 GiB
# at 8K and 32K, where nothing is computed again; 57 at 128K, where what attention takes and gives is kept;
# 60 at 512K and 107 at 1M, where layers keep their inputs, 2 GiB each, or 65 with those in host memory.
#
# Data: documents as long as there are, billions of tokens of them. Books alone (PG-19: 3B tokens, 100K each)
# pass three times; better is code beside them, with the files of a repository as one document. To have both,
# sort the code by repository, bring all into parquet files with columns text and document, and name those.
#     python data/hf/prepare.py --path emozilla/pg19 --tokenizer gpt2 --out data/long
#     python data/hf/prepare.py --path parquet --data_files long/*.parquet --group_by document \
#         --max_tokens 10000000000 --tokenizer gpt2 --out data/long
#     for n in 8192 131072 1048576; do python data/passkey/prepare.py --length $n --val_documents 8 \
#         --tokenizer gpt2 --haystack long --out data/passkey_$n; done
# Documents of a million tokens are rare, so the last two stages let a sequence see across borders
# (document_mask=False): they are there to train position and selection at that length.
from configs import Stage

out_dir = "out/1m_ctx"
dataset = "long"
retrieval_sets = ["passkey_8192", "passkey_131072", "passkey_1048576"]

n_layer = 24
d_model = 1024
n_head = 16
n_kv_head = 4
n_proxy_head = 4
head_dim = 128
d_mlp = 2816
vocab_size = 50304  # gpt2's 50257, rounded up to 128
top_k = 2048

tokens_per_step = 2**20
micro_batch_tokens = 2**16
# RoPE bases lie above 0.0424 L^1.628, the lower bound that arXiv 2405.14591 (figure 1) finds for a context of
# L tokens and heads of 128: 9.9e4, 9.5e5, 9.1e6, 8.7e7 and 2.7e8 here. Below it, what is like a query loses
# against noise with distance. They rise by stage, since a base that is larger than it need be spends pairs on
# turns that no sequence completes.
stages = [
    Stage(tokens=2_000_000_000, seq_len=2**13, attention="warmup", rope_theta=500_000.0),
    Stage(tokens=4_000_000_000, seq_len=2**13, attention="sparse", rope_theta=500_000.0),
    Stage(tokens=2_000_000_000, seq_len=2**15, attention="sparse", rope_theta=2e6),
    Stage(tokens=1_000_000_000, seq_len=2**17, attention="sparse", rope_theta=1e7),
    Stage(tokens=500_000_000, seq_len=2**19, attention="sparse", rope_theta=1e8, document_mask=False),
    Stage(tokens=500_000_000, seq_len=2**20, attention="sparse", rope_theta=3e8, document_mask=False),
]

lr = 6e-4
lr_warmup_tokens = 200 * tokens_per_step
