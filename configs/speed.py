# Step times of the model of 1m_ctx.py from 8K to 128K tokens a sequence, and the same dense.
#     python data/pysrc/prepare.py --max_bytes 120000000 --tokenizer gpt2 --out data/pysrc_gpt2
#     python train.py configs/speed.py
#     python train.py configs/speed.py --attention=dense --out_dir=out/speed_dense
#     python train.py configs/speed.py --n_kv_head=2 --n_proxy_head=2 --out_dir=out/speed_2   # fewer heads
#
# Each sequence is one document (document_mask=False): masks would make long sequences cheap. The table at the
# end has seconds of a step of 2^17 tokens, an eighth of 1m_ctx.py's; the optimizer's share counts eight times
# as much as there. For 1M tokens a sequence see configs/speed_1m.py.
from configs import Stage

out_dir = "out/speed"
dataset = "pysrc_gpt2"

n_layer = 24
d_model = 1024
n_head = 16
n_kv_head = 4
n_proxy_head = 4
head_dim = 128
d_mlp = 2816
vocab_size = 50304
top_k = 2048

tokens_per_step = 2**17
micro_batch_tokens = 2**16
stages = [
    Stage(steps=6, seq_len=2**13, attention="sparse", document_mask=False),
    Stage(steps=6, seq_len=2**15, attention="sparse", document_mask=False),
    Stage(steps=4, seq_len=2**17, attention="sparse", document_mask=False),
]

log_interval = 1
eval_interval = 0
kl_interval = 0
checkpoint_interval = 0
