"""The compiled kernels, as ctypes sees them. The structures are those of `native/decoder.cpp`, field by field.

Called by `decoder` and `draws` here, and by `limits`. A call lets go of the interpreter's lock for as long as it
computes.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from stallfree_worker.model.errors import ModelLoadError

LIBRARY_PATH = Path(__file__).with_name("_kernels.so")
_INTERFACE = 5
"""Of `stallfree_interface` in `native/decoder.cpp`: raised there and here together."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
    )


class Sketch(ctypes.Structure):
    _fields_ = (
        ("tiles", c_void_p),
        ("scales", c_void_p),
        ("per_input", c_void_p),
        ("per_error", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("group", c_int32),
        ("rope", c_int32),
        ("window", c_int32),
        ("padding", c_int32),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("sketch", Sketch),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("inverse_frequencies", c_void_p),
        ("rope_factors", c_void_p),
        ("is_bfloat16", c_int32),
        ("num_layers", c_int32),
        ("num_ropes", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("activation", c_int32),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float),
        ("logit_softcap", c_float),
        ("embedding_scale", c_float),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("num_computed", c_void_p),
        ("num_shared", c_void_p),
        ("wanted_rows", c_void_p),
        ("tables", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_wanted", c_int32),
        ("num_groups", c_int32),
    )


_FUNCTIONS: dict[str, tuple[type[Any] | None, tuple[type[Any], ...]]] = {
    "stallfree_is_supported": (c_int, (c_int,)),
    "stallfree_scratch_bytes": (c_int64, (POINTER(DecoderStruct), c_int64, c_int)),
    "stallfree_forward": (None, (POINTER(DecoderStruct), POINTER(Batch), c_void_p, c_void_p, c_int)),
    "stallfree_logits": (
        None,
        (POINTER(DecoderStruct), c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "stallfree_make_sketch": (None, (POINTER(Matrix), POINTER(Sketch), c_int)),
    "stallfree_find_likeliest": (
        None,
        (POINTER(DecoderStruct), c_void_p, c_void_p, c_int, POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_int),
    ),
    "stallfree_most_maxima": (c_int, (c_int,)),
    "stallfree_draw": (
        None,
        (c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p, POINTER(c_void_p), c_void_p, c_int),
    ),
    "stallfree_read": (c_int64, (c_void_p, c_int64, c_int)),
}
"""What each gives, and takes."""


def reason_against(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot compute in `dtype` here; None where they can."""
    if not LIBRARY_PATH.exists():
        return "they were not compiled at install, which takes Linux on x86-64 and a C++ compiler"
    try:
        library = load_library()
    except ModelLoadError as error:
        return str(error)
    if not library.stallfree_is_supported(int(dtype == torch.bfloat16)):
        return f"this CPU lacks the AVX-512 instructions for {str(dtype).removeprefix('torch.')}"
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise ModelLoadError(f"they cannot be loaded: {error}; install stallfree-worker again") from error
    if not _fits(library):
        raise ModelLoadError("they are of another version; install stallfree-worker again")
    _declare(library)
    return library


def _fits(library: ctypes.CDLL) -> bool:
    """Whether the kernels were compiled from the sources that go with this module."""
    if getattr(library, "stallfree_interface", int)() != _INTERFACE:  # old ones have no such function
        return False
    library.stallfree_struct_bytes.argtypes = (c_int,)
    library.stallfree_struct_bytes.restype = c_int
    structs = (Matrix, Sketch, Layer, DecoderStruct, Batch)
    sizes = [library.stallfree_struct_bytes(number) for number in range(len(structs))]
    return sizes == [ctypes.sizeof(struct) for struct in structs]


def _declare(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
