"""What this machine can run, tried out: python -m msa.check

Prints one line for each fact and each trial, and a remedy below each that FAILED. Exit code 0 if all that
this machine should be able to do works: with a Hopper GPU the kernels, compiled and compared with the
reference; elsewhere the reference, and, where the packages are there, that the kernels compile for sm_90a.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import msa
from msa import reference

INSTALL_KERNELS = "pip install -c constraints.txt -e '.[hopper]'"
KERNEL_PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "flash-attn-4", "triton")
NEEDED_PACKAGES = KERNEL_PACKAGES[:3]  # FlashAttention-4 and its triton serve dense and warmup alone
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
HOPPER = (9, 0)


class Report:
    """Prints what was found, and remembers whether something failed."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, name: str, text: str) -> None:
        print(f"{name:<20} {text}", flush=True)

    def fail(self, name: str, text: str, remedy: str) -> None:
        self.failed += 1
        self.say(name, f"FAILED: {text}")
        print(f"{'':<20}   remedy: {remedy}", flush=True)

    def judge(self, name: str, ok: bool, text: str, remedy: str) -> None:
        if ok:
            self.say(name, f"ok, {text}")
        else:
            self.fail(name, text, remedy)


# ---- what is installed ------------------------------------------------------------------------------


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def ask_driver() -> tuple[list[str], str | None]:
    """(GPUs that the driver sees, the newest CUDA that it supports), empty and None without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
        header = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return [], None
    gpus = [line.split(" (UUID")[0] for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", header.stdout)
    return gpus, found.group(1) if found else None


def major(version: str) -> int:
    return int(version.split(".")[0])


def check_torch_and_driver(report: Report, gpus: list[str], driver_cuda: str | None) -> None:
    build = torch.version.cuda
    report.say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    report.say("torch", f"{torch.__version__}, " + (f"built for CUDA {build}" if build else "no CUDA build"))
    if not gpus and not torch.cuda.is_available():
        report.say("driver", "no NVIDIA GPU here")
        return
    report.say("driver", f"sees {len(gpus)} GPUs, supports CUDA {driver_cuda or 'of an unknown version'}")
    if torch.version.hip is None and build is None:
        wheel = "cu130" if driver_cuda is None or major(driver_cuda) >= 13 else "cu128"
        version = torch.__version__.split("+")[0]
        report.fail(
            "CUDA",
            "this PyTorch can't use the GPU",
            f"pip install torch=={version} --index-url https://download.pytorch.org/whl/{wheel}",
        )
    elif build and driver_cuda and major(driver_cuda) < major(build):
        report.fail(
            "CUDA",
            f"the driver supports CUDA {driver_cuda}, PyTorch was built for {build}",
            f"install an NVIDIA driver for CUDA {major(build)}, or a PyTorch built for {major(driver_cuda)}",
        )
    elif not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        report.fail(
            "CUDA",
            "the driver sees a GPU, PyTorch does not",
            "python -c 'import torch; torch.cuda.init()' says why"
            if hidden is None
            else f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it",
        )


def check_gpus(report: Report) -> bool:
    """Whether the first GPU runs the kernels."""
    if not torch.cuda.is_available():
        return False
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        capability = (card.major, card.minor)
        runs = "the kernels" if capability == HOPPER else "the reference: the kernels need sm_90"
        memory = card.total_memory / 2**30
        report.say(f"GPU {i}", f"{card.name}, sm_{card.major}{card.minor}, {memory:.0f} GiB, {runs}")
    return torch.cuda.get_device_capability(0) == HOPPER


def check_packages(report: Report, needed: bool) -> bool:
    """Whether the kernels can be compiled."""
    missing = []
    for name in KERNEL_PACKAGES:
        version = package_version(name)
        if version is not None:
            report.say(name, version)
        elif needed:
            report.fail(name, "not installed", INSTALL_KERNELS)
        else:
            report.say(name, "not installed")
        if version is None and name in NEEDED_PACKAGES:
            missing.append(name)
    return not missing


# ---- the kernels ------------------------------------------------------------------------------------


def compiler_errors() -> tuple[type[BaseException], ...]:
    """What compiling or launching a kernel raises. The compiler has exceptions that no builtin one covers."""
    errors = (ImportError, RuntimeError, TypeError, ValueError)
    try:
        from cutlass.base_dsl.common import DSLBaseError
    except ImportError:
        return errors
    return (DSLBaseError, *errors)


def check_cache(report: Report) -> None:
    from msa.hopper import jit

    folder = jit.cache_dir()
    if os.environ.get("MSA_CACHE_DIR") == "off":
        report.say("kernel cache", "off (MSA_CACHE_DIR)")
    elif folder is None:
        report.fail(
            "kernel cache",
            "the folder can't be used, so that every process compiles (reason above)",
            "set MSA_CACHE_DIR to a folder of your own that others can't write to",
        )
    else:
        files = list(folder.glob("*.o"))
        size = sum(file.stat().st_size for file in files) / 2**20
        report.say("kernel cache", f"{folder}, {len(files)} kernels, {size:.1f} MiB")


def check_kernels(report: Report, run: bool) -> bool:
    """Compiles each kernel, or loads it where it will `run`: whether all of that worked."""
    from msa import hopper
    from msa.hopper import jit

    failed = report.failed
    groups: dict[str, list[Any]] = {}
    for kernel in hopper.all_kernels():
        groups.setdefault(type(kernel).__name__, []).append(kernel)
    for name, kernels in groups.items():
        begin, compiled, failed_before = time.perf_counter(), jit.compile_count, report.failed
        for kernel in kernels:
            try:
                if run:
                    jit.load(kernel)
                else:
                    jit.compile(kernel)
            except compiler_errors() as error:
                report.fail(name, f"{kernel} does not compile: {first_line(error)}", INSTALL_KERNELS)
        if report.failed == failed_before:
            from_disk = len(kernels) - (jit.compile_count - compiled) if run else 0
            variants = f"{len(kernels)} variant{'s' if len(kernels) > 1 else ''}"
            how = f"{variants} compiled for sm_90a in {time.perf_counter() - begin:.1f} s"
            report.say(
                name, f"ok, {how}" + (f", {from_disk} of them loaded from the cache" if from_disk else "")
            )
    return report.failed == failed


# ---- the op against something that is known to be right -------------------------------------------


def make_inputs(
    device: str,
    dtype: torch.dtype,
    *,
    n_queries: int,
    heads: int,
    kv_heads: int,
    proxy_heads: int,
    head_dim: int,
) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, q_proxy, k_proxy as leaves, grad_out), one sequence and one proxy key head."""
    generator = torch.Generator().manual_seed(0)

    def randn(n_heads: int) -> Tensor:
        return torch.randn(1, n_queries, n_heads, head_dim, generator=generator).to(device, dtype)

    leaves = [randn(n).requires_grad_() for n in (heads, kv_heads, kv_heads, proxy_heads, 1)]
    return leaves, randn(heads)


def by_op(
    inputs: list[Tensor], grad_out: Tensor, block_indices: Tensor, block_size: int
) -> dict[str, Tensor]:
    """out, the KL of each proxy head as the backward counts it, its sum in the forward, five gradients."""
    proxy_heads, queries = inputs[3].shape[2], inputs[3].shape[1]
    kl_probe = torch.zeros(proxy_heads, device=grad_out.device, requires_grad=True)
    out, kl = msa.sparse_attention(
        *inputs,
        block_indices=block_indices,
        block_size=block_size,
        kl_probe=kl_probe,
        materialize_kl=True,
    )
    factor = torch.full_like(kl, 1 / (queries * proxy_heads))
    grads = torch.autograd.grad([out, kl], [*inputs, kl_probe], [grad_out, factor])
    gradients = {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=False)}
    return {"out": out.detach(), "kl": kl.detach(), "kl_probe": grads[-1], **gradients}


def by_reference(
    inputs: list[Tensor], grad_out: Tensor, block_indices: Tensor, block_size: int
) -> dict[str, Tensor]:
    """The same from the PyTorch reference, in fp32."""
    tensors = [x.detach().float() for x in inputs]
    _, queries, proxy_heads, head_dim = tensors[3].shape
    places = (block_indices, None, None)
    scale = head_dim**-0.5
    out, kl, lse, lse_proxy = reference.forward(*tensors, *places, scale, block_size, True)
    factor = torch.full_like(kl, 1 / (queries * proxy_heads))
    *grads, kl_heads = reference.backward(
        grad_out.float(), factor, *tensors, *places, out, lse, lse_proxy, scale, block_size, True
    )
    gradients = {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {"out": out, "kl": kl, "kl_probe": kl_heads, **gradients}


def by_autograd(
    inputs: list[Tensor], grad_out: Tensor, block_indices: Tensor, block_size: int
) -> dict[str, Tensor]:
    """The same from whole masked score matrices and PyTorch's autograd: slow, and nothing to get wrong."""
    q, k, v, q_proxy, k_proxy = leaves = [x.detach().float().requires_grad_() for x in inputs]
    _, queries, proxy_heads, head_dim = q_proxy.shape
    group, kv_group, scale = q.shape[2] // proxy_heads, q.shape[2] // k.shape[2], head_dim**-0.5
    place = torch.arange(queries, device=q.device)
    chosen = (block_indices[..., None] == place // block_size).any(3).transpose(1, 2)  # (B, Hp, S, S)
    mask = chosen & (place <= place[:, None])
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(kv_group, 2)) * scale
    p = s.masked_fill(~mask.repeat_interleave(group, 1), -math.inf).softmax(-1)  # (B, H, S, S)
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(kv_group, 2))
    teacher = p.detach().unflatten(1, (proxy_heads, group)).mean(2)
    s = torch.einsum("bihd,bjd->bhij", q_proxy, k_proxy[:, :, 0]) * scale
    log_student = s.masked_fill(~mask, -math.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    kl_heads = (torch.xlogy(teacher, teacher) - teacher * log_student).sum((0, 2, 3))
    kl = kl_heads.sum()
    grads = torch.autograd.grad(
        [out, kl], leaves, [grad_out.float(), torch.full_like(kl, 1 / (queries * proxy_heads))]
    )
    gradients = {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {"out": out.detach(), "kl": kl.detach(), "kl_probe": kl_heads.detach(), **gradients}


def distance(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """(relative error, cosine)."""
    got, expected = got.double().flatten(), expected.double().flatten()
    error = (got - expected).norm() / expected.norm()
    return error.item(), torch.cosine_similarity(got, expected, dim=0).item()


def selection_agreement(got: Tensor, expected: Tensor) -> float:
    """Share of the expected blocks that were picked too, whatever their order."""
    found = (expected[..., :, None] == got[..., None, :]).any(-1) & (expected >= 0)
    return (found.sum() / (expected >= 0).sum()).item()


def check_op(
    report: Report,
    device: str,
    dtype: torch.dtype,
    shape: dict[str, int],
    top_k: int,
    oracle: Callable[..., dict[str, Tensor]],
    tolerance: float,
    remedy: str,
    block_size: int = 128,
) -> None:
    facts = ", ".join(f"{name} {n}" for name, n in shape.items())
    report.say("op", f"on {device} in {str(dtype).removeprefix('torch.')}: {facts}, top_k {top_k}")
    inputs, grad_out = make_inputs(device, dtype, **shape)
    errors = compiler_errors()
    begin = time.perf_counter()
    try:
        proxy = [x.detach() for x in inputs[3:]]
        picked = msa.select_blocks(*proxy, top_k=top_k, block_size=block_size)
        got = by_op(inputs, grad_out, picked, block_size)
        if device == "cuda":
            torch.cuda.synchronize()
    except errors as error:
        report.fail("sparse attention", first_line(error), remedy)
        return
    seconds = time.perf_counter() - begin
    scale = shape["head_dim"] ** -0.5
    best = reference.select(*(x.float() for x in proxy), None, None, top_k // block_size, scale, block_size)
    agreement = selection_agreement(picked, best)
    # Scores that are equal but for rounding may go either way.
    report.judge("selection", agreement > 0.95, f"{agreement:.2%} of the blocks agree", remedy)
    expected = oracle(inputs, grad_out, picked, block_size)
    for name, value in expected.items():
        if got[name].shape != value.shape:
            report.fail(name, f"shape {tuple(got[name].shape)}, should be {tuple(value.shape)}", remedy)
            continue
        error, cosine = distance(got[name], value)
        text = f"relative error {error:.1e}" + (f", cosine {cosine:.6f}" if value.numel() > 2 else "")
        report.judge(name, error < tolerance, text, remedy)
    report.say("seconds", f"{seconds:.1f}, the first selection, forward and backward")


SMALL = dict(n_queries=320, heads=4, kv_heads=2, proxy_heads=2, head_dim=32)
KERNEL_SHAPE = dict(n_queries=1024, heads=16, kv_heads=2, proxy_heads=2, head_dim=128)


def kernel_calls() -> int:
    """How often this process has asked for a kernel."""
    from msa.hopper import jit

    info = jit.load.cache_info()
    return info.hits + info.misses


def main(arguments: Iterable[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments:
        print(__doc__)
        return 0 if arguments[0] in ("-h", "--help") else 2
    report = Report()
    gpus, driver_cuda = ask_driver()
    check_torch_and_driver(report, gpus, driver_cuda)
    hopper_gpu = check_gpus(report)
    has_packages = check_packages(report, needed=hopper_gpu)

    has_kernels = False
    if has_packages:
        try:
            check_cache(report)
            has_kernels = check_kernels(report, run=hopper_gpu)
        except ImportError as error:
            report.fail("kernels", first_line(error), INSTALL_KERNELS)
    else:
        report.say("kernels", f"can't be compiled here; on Linux x86-64: {INSTALL_KERNELS}")

    bug = "that is a bug: please report it with all of the above"
    check_op(report, "cpu", torch.float32, SMALL, 64, by_autograd, 1e-4, bug, block_size=32)
    if hopper_gpu and has_kernels:
        before = kernel_calls()
        check_op(report, "cuda", torch.bfloat16, KERNEL_SHAPE, 512, by_reference, 2e-2, bug)
        report.judge("dispatch", kernel_calls() > before, "the op asks for the kernels", bug)
    elif torch.cuda.is_available():
        check_op(report, "cuda", torch.bfloat16, KERNEL_SHAPE, 512, by_autograd, 2e-2, bug)

    if report.failed:
        print(f"\n{report.failed} FAILED; the remedies are above.")
        return 1
    runs = "the Hopper kernels" if hopper_gpu and has_kernels else "the PyTorch reference"
    print(f"\nAll that this machine should do works: attention runs {runs}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
