"""Every kernel of a training step at a few small shapes, for compute-sanitizer on a Hopper GPU:

    python tests/memcheck.py    # first, so that nothing is left to compile under the tool
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/memcheck.py

Without PyTorch's cache each tensor is an allocation of its own, so that the tool sees what leaves it.
"""

import torch

import msa
import msa.hopper

SHAPES = [  # tokens, slots, sequences, documents, workspace, materialise the KL
    (1100, 16, 1, False, None, False),
    (2600, 16, 1, False, 2**20, False),  # three chunks
    (700, 16, 3, True, None, True),
    (2304, 4, 1, True, None, False),
]


def main() -> None:
    torch.manual_seed(0)
    default = msa.hopper.workspace_bytes
    for tokens, slots, batch, documents, workspace, materialize_kl in SHAPES:
        msa.hopper.workspace_bytes = workspace or default
        leaves = [
            torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (16, 2, 2, 2, 1)
        ]
        probe = torch.zeros(2, device="cuda", requires_grad=True)
        doc = None
        if documents:  # of three blocks each
            first = [i // 3 * 3 for i in range(-(-tokens // 128))]
            doc = torch.tensor([first] * batch, dtype=torch.int32, device="cuda")
        options = dict(doc_start_block=doc, kl_probe=probe, materialize_kl=materialize_kl)
        for attend, top_k in ((msa.sparse_attention, {"top_k": 128 * slots}), (msa.warmup_attention, {})):
            out, kl = attend(*leaves, **top_k, **options)
            (out.float().square().mean() + 1e-3 * kl).backward()
        if not all(x.grad.isfinite().all() for x in leaves):
            raise RuntimeError(f"{tokens} tokens, {batch} sequences: a gradient is not finite")
        print(f"ran {batch} x {tokens} tokens, {slots} slots")


if __name__ == "__main__":
    main()
