"""The sequences of a step, as programs that advance states read them from the device. The grid depends on shapes only,
so the host does not wait, and a CUDA graph serves any sequences."""

import triton
import triton.language as tl


@triton.jit
def sequence_at(number, query_start, context_lens, block_tables, table_stride):
    """A sequence's first row, the row after its last, its block, and whether its state is read and written. Without
    query tokens, neither is. A state that begins as zeros is not read. A row without a context, a CUDA graph's padding,
    has a state of zeros that is not written. number: int64."""
    first = tl.load(query_start + number).to(tl.int64)
    end = tl.load(query_start + number + 1).to(tl.int64)
    context_len = tl.load(context_lens + number)
    block = tl.load(block_tables + number * table_stride).to(tl.int64)
    writes = (context_len > 0) & (end > first)
    reads = writes & (context_len > end - first)
    return first, end, block, reads, writes
