"""Compiles each kernel once, and keeps what it compiled on disk for the next process.

A kernel is a dataclass whose fields are all that its code depends on (head counts, slots, flags): never
sequence lengths, the batch or data. `load(kernel)` returns a function that takes torch tensors, ints and
floats and launches on PyTorch's current stream. Compiling needs no GPU.

Compiled kernels go to $MSA_CACHE_DIR, by default $XDG_CACHE_HOME/nanomsa or ~/.cache/nanomsa, under a name
that holds a hash of these sources and of the compiler's version. A file is used only if it is the user's own
and its digest matches; otherwise it is compiled again and replaced. MSA_CACHE_DIR=off keeps nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The DSL reads the architecture when it is first imported. Without a GPU it has none to look at.
if not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Float32, Int32  # noqa: E402

ENTRY = "msa_kernel"
compile_count = 0  # kernels compiled (not loaded) by this process
compile_seconds = 0.0
_modules: list[Any] = []  # a loaded module must outlive its functions

DTYPES = {"bf16": BFloat16, "f32": Float32, "i32": Int32}


def tensor(dtype: str, *shape: int) -> Any:
    """A stand-in for a contiguous tensor of any length: (length, *shape), 16-byte aligned."""
    dims = (cute.sym_int(), *shape)
    order = tuple(reversed(range(len(dims))))
    return cute.runtime.make_fake_compact_tensor(DTYPES[dtype], dims, stride_order=order, assumed_align=16)


def batch(dtype: str, *shape: int) -> Any:
    """A stand-in for a contiguous tensor (batch, length, *shape)."""
    dims = (cute.sym_int(), cute.sym_int(), *shape)
    order = tuple(reversed(range(len(dims))))
    return cute.runtime.make_fake_compact_tensor(DTYPES[dtype], dims, stride_order=order, assumed_align=16)


def stream() -> Any:
    """A stand-in for the stream, which a compiled kernel takes from PyTorch by itself."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def compile(kernel: Any, options: str = "") -> Any:
    """Compiles `kernel` for sm_90a. `kernel.arguments()` gives stand-ins for what it is called with."""
    options = f"--enable-tvm-ffi --gpu-arch=sm_90a {options}".strip()
    return cute.compile(kernel, *kernel.arguments(), stream(), options=options)


@functools.cache
def fingerprint() -> str:
    """What compiled code depends on besides the kernel's own fields."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} sm_90a".encode())
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels"):
        digest.update(f"{package}={importlib.metadata.version(package)} ".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_dir() -> Path | None:
    """The folder for compiled kernels, None where none can be used (said once, with the reason)."""
    setting = os.environ.get("MSA_CACHE_DIR")
    if setting == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(setting or Path(base) / "nanomsa")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError("it belongs to another user, or others may write to it")
    except OSError as error:
        _say(f"kernels are not kept on disk, {path} can't be used: {error}")
        return None
    return path


def _say(message: str) -> None:
    print(f"msa: {message}", file=sys.stderr, flush=True)


def _name(kernel: Any) -> str:
    fields = "-".join(str(getattr(kernel, field.name)) for field in dataclasses.fields(kernel))
    return f"{type(kernel).__name__}-{fields}-{fingerprint()}"


def _read(path: Path) -> Callable | None:
    """The function in a cache file, None if there is none that can be trusted."""
    try:
        body, digest = path.read_bytes(), path.with_suffix(".sha256").read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        _say(f"compiles again, {path} can't be read: {error}")
        return None
    if hashlib.sha256(body).hexdigest() != digest or path.stat().st_uid != os.getuid():
        _say(f"compiles again, {path} is damaged or not this user's")
        return None
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    _modules.append(module)
    return getattr(module, ENTRY)


def _write(path: Path, function: Any) -> None:
    # Beside it and renamed, so that a kill or another rank leaves no half file; the digest comes last.
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / "kernel.o"
            function.export_to_c(object_file_path=str(part), function_name=ENTRY)
            digest = part.with_suffix(".sha256")
            digest.write_text(hashlib.sha256(part.read_bytes()).hexdigest())
            part.replace(path)
            digest.replace(path.with_suffix(".sha256"))
    except OSError as error:
        _say(f"a compiled kernel is not kept on disk: {error}")


@functools.cache
def load(kernel: Any) -> Callable:
    """The compiled kernel: from this process, from disk, or compiled now."""
    global compile_count, compile_seconds
    folder = cache_dir()
    path = None if folder is None else folder / f"{_name(kernel)}.o"
    function = None if path is None else _read(path)
    if function is None:
        begin = time.perf_counter()
        function = compile(kernel)
        compile_count += 1
        compile_seconds += time.perf_counter() - begin
        if path is not None:
            _write(path, function)
            function = _read(path) or function  # the plain function costs the host less than the compiler's
    return function
