"""Problems of the tiny family, and a strategy over all that are eligible."""

from dataclasses import replace

from hypothesis import strategies as st

from isogemm.tiny.configs import DTYPES, Problem

PRECISIONS = ("ieee", "tf32")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def make_problem(batch=1024, m=12, n=12, k=64, dtype="float32", precision="ieee", a="n", b="n", **changes):
    """Contiguous operands, or transposed views of contiguous ones."""
    problem = Problem(
        batch,
        m,
        n,
        k,
        dtype,
        precision,
        a_strides=(m * k, k, 1) if a == "n" else (m * k, 1, m),
        b_strides=(k * n, n, 1) if b == "n" else (k * n, 1, k),
    )
    return replace(problem, **changes)


SIZES = st.one_of(st.sampled_from([1, 2, 3, 4, 8, 12, 15, 16, 17, 32, 63, 64]), st.integers(1, 64))
BATCHES = st.one_of(st.sampled_from([2, 3, 256, 65535, 65536]), st.integers(2, 2**31))


@st.composite
def problems(draw):
    """All that an eligible problem can be: layouts, gaps between rows and matrices, shared operands, misalignment."""
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    dtype = draw(st.sampled_from(DTYPES))
    itemsize = 4 if dtype == "float32" else 2

    def strides(rows, columns):
        inner, outer = draw(st.sampled_from([(1, columns), (rows, 1), (2, 2 * columns)]))
        if 1 in (inner, outer):
            gap = draw(st.sampled_from([0, 0, 1, 2, 3, 16]))
            inner, outer = (inner, outer + gap) if inner == 1 else (inner + gap, outer)
        extent = (rows - 1) * outer + (columns - 1) * inner + 1
        batch = draw(st.sampled_from([0, rows * columns, extent, extent + 1, extent + 16, 2**31 + 16]))
        return batch, outer, inner

    alignments = [size for size in (2, 4, 8, 16) if size >= itemsize]
    return Problem(
        batch=draw(BATCHES),
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        precision=draw(st.sampled_from(PRECISIONS)) if dtype == "float32" else "ieee",
        a_strides=strides(m, k),
        b_strides=strides(k, n),
        a_alignment=draw(st.sampled_from(alignments)),
        b_alignment=draw(st.sampled_from(alignments)),
        arch=draw(st.sampled_from(ARCHS)),
        sm_count=draw(st.sampled_from([1, 20, 108, 132, 148, 304])),
    )
