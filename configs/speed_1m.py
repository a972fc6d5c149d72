# Step times of the model of 1m_ctx.py at 1M tokens a sequence; prepare the data as configs/speed.py says.
#     python train.py configs/speed_1m.py
#     python train.py configs/speed_1m.py --memory_limit_gib=76 --out_dir=out/speed_1m_76  # an H100's
#     python train.py configs/speed_1m.py --n_layer=2 --out_dir=out/speed_1m_2
#     python train.py configs/speed_1m.py --n_layer=2 --attention=dense --out_dir=out/dense_1m_2
#     python train.py configs/speed_1m.py --n_kv_head=2 --n_proxy_head=2 --out_dir=out/speed_1m_16_2_2
#
# Dense, 24 layers would take ten minutes a step, so two stand for them. A step of n layers takes a + n * b
# seconds; a (embedding, loss, optimizer) follows from the two sparse runs, and is the same when dense. (Two
# layers keep everything where 24 compute some of it again: of the ratio that is half a percent.)
from configs import Stage

out_dir = "out/speed_1m"
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

tokens_per_step = 2**20
stages = [Stage(steps=3, seq_len=2**20, attention="sparse", document_mask=False, rope_theta=3e8)]

log_interval = 1
eval_interval = 0
kl_interval = 0
checkpoint_interval = 0
