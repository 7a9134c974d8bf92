"""Tensors whose last byte is the last byte of a page that nothing may read past."""

import ctypes
import mmap

import torch


def at_the_edge(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` that ends right before an inaccessible page: one byte read past it ends the process."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + pages * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert refused == 0
    raw = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=pages * mmap.PAGESIZE - size)
    found = raw.view(tensor.dtype).view(tensor.shape)
    return found.copy_(tensor)
