"""Problems of the GEMM family: products, their gradients, and a strategy over all that operations ask for."""

from dataclasses import replace

from hypothesis import strategies as st

from isogemm.epilogues.operands import Epilogue
from isogemm.gemm.configs import Problem, accumulation_chunk, token_chunk

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
NUMBERS = [("bfloat16", "ieee"), ("float16", "ieee"), *(("float32", name) for name in ("ieee", "tf32", "tf32x3"))]


def make_problem(m=512, n=4096, k=4096, layout="nt", dtype="bfloat16", precision="ieee", **changes):
    """Contiguous operands, or transposed views of contiguous ones."""
    a_strides = (k, 1) if layout[0] == "n" else (1, m)
    b_strides = (n, 1) if layout[1] == "n" else (1, k)
    problem = Problem(m, n, k, dtype, dtype, precision, a_strides, b_strides, (n, 1))
    return replace(problem, **changes)


def linear(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return _product(make_problem(tokens, n, k, "nt", dtype, precision), changes)


def input_grad(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return _product(make_problem(tokens, k, n, "nn", dtype, precision), changes)


def _product(problem, changes):
    return replace(problem, **{"chunk": accumulation_chunk(problem)} | changes)


def weight_grad(tokens, n, k, dtype="bfloat16", precision="ieee", **changes):
    return make_problem(n, k, tokens, "tn", dtype, precision, chunk=token_chunk(n, k, dtype), **changes)


SIZES = st.one_of(
    st.sampled_from([1, 3, 8, 16, 17, 33, 63, 64, 65, 127, 128, 1000, 1024, 4096, 4097, 14336, 32000, 128256]),
    st.integers(1, 2**17),
)


EPILOGUES = (
    Epilogue(), Epilogue(bias="n"), Epilogue(bias="n", activation="gelu"), Epilogue(bias="m", residual=True),
    Epilogue(activation="swiglu", saves="pre"), Epilogue(bias="n", bias_up=True, activation="geglu"),
    Epilogue(activation="silu", gradient="pre"), Epilogue(activation="swiglu", gradient="pre"),
    Epilogue(activation="silu", gradient="pre", sums=True), Epilogue(activation="swiglu", gradient="pre", sums=True),
)  # fmt: skip


@st.composite
def problems(draw):
    """All that operations ask for: layouts, gaps, misalignment, batches, levels of k, chunks, sums, epilogues."""
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    dtype, precision = draw(st.sampled_from(NUMBERS))

    def strides(rows, columns):
        outer, inner = draw(
            st.sampled_from([(columns, 1), (1, rows), (2 * columns, 2), (columns + 3, 1), (1, rows + 8)])
        )
        return outer, inner

    kind = draw(st.sampled_from(["product", "weight gradient"]))
    out_dtype = draw(st.sampled_from([dtype, "float32"]))
    problem = Problem(
        m, n, k, dtype, out_dtype, precision, strides(m, k), strides(k, n), (n, 1),
        a_aligned=draw(st.booleans()), b_aligned=draw(st.booleans()), tma=draw(st.sampled_from([True, True, False])),
        arch=draw(st.sampled_from(ARCHS)), sm_count=draw(st.sampled_from([1, 20, 108, 132, 148, 304])),
    )  # fmt: skip
    if kind == "product":
        batch = draw(st.sampled_from([1, 1, 2, 6, 4096]))
        inner = 3 if batch == 6 else batch
        epilogue = draw(st.sampled_from(EPILOGUES if batch == 1 else EPILOGUES[:2]))
        return replace(
            problem, chunk=accumulation_chunk(problem), epilogue=epilogue, batch=batch, batch_inner=inner,
            a_batch_strides=(inner * m * k, m * k) if batch > 1 else (0, 0),
        )  # fmt: skip
    accumulate = draw(st.booleans())
    k_inner = draw(st.sampled_from([0, 0, 7]))
    return replace(
        problem, chunk=token_chunk(m, n, dtype), accumulate=accumulate, out_dtype="float32" if accumulate else dtype,
        c_strides=draw(st.sampled_from([(n, 1), (1, m), (n + 5, 1)])) if accumulate else (n, 1),
        c_aligned=not accumulate or draw(st.booleans()),
        k_inner=k_inner, k_outer_strides=(7 * m, 9 * n) if k_inner else (0, 0),
    )  # fmt: skip
