"""GEMM problems compiled for GPUs that are not here: as jobs of the compile matrix, and within its limits."""

import re

from compile_matrix import CompileJob, compile_job, disassemble, limit_violations

from isogemm.epilogues import ACTIVATIONS
from isogemm.epilogues.operands import TENSORS, Epilogue
from isogemm.gemm import configs
from isogemm.gemm.kernels.products import SLOTS, describe_gemm

NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
FEW_WORDS = 48  # bytes, kept across the loop over k where a tile has all the registers
# Wide tiles of two warps, with both operands across k: what spills nothing (by 16 of k) was measured, and is slower.
ACROSS = 144
BARRIERS = 128  # bytes of shared memory


def product_job(problem, config):
    """The product's launch, its tensors as the plan gives them."""
    accumulation = configs.accumulation(problem, config)
    launch = describe_gemm(problem, config)
    operand, out = NAMES[problem.dtype], NAMES["float32" if accumulation == "partials" else problem.out_dtype]
    apart = problem.weights > 1 and not configs.reads_b_by_tma(problem, config)
    rest = () if config.kernel == "stream" else (operand if config.rest_n or apart else None,)
    scratch = "fp32" if accumulation != "partials" and configs.chunk_bytes(problem, config) else None
    left, right = (problem.b_aligned, problem.a_aligned)[:: 1 if config.swapped else -1]
    aligned = (left, right, *(right for _ in rest), accumulation == "partials" or problem.c_aligned, True)
    matrix = "fp32" if problem.reads_float32 else operand
    read = _read(Epilogue() if accumulation == "partials" else problem.epilogue, operand, matrix)
    addressed = (operand, operand, *rest, out, scratch, *read.values())
    loose = ("bias", "bias_up", "row_scale", "col_scale", *(() if problem.read_aligned else ("c", "residual")))
    return launch_job(f"{problem} {config}", launch, addressed, (*aligned, *(name not in loose for name in read)))


def _read(e, operand, matrix):
    """The type behind each address that an epilogue reads or writes."""
    wanted = {
        "bias": operand if e.bias else None, "bias_up": operand if e.bias_up else None,
        "c": matrix if e.beta else None, "residual": matrix if e.residual else None,
        "row_scale": "fp32" if e.row_scale else None, "col_scale": "fp32" if e.col_scale else None,
        "alpha": "fp32" if e.alpha == "device" else None, "beta": "fp32" if e.beta == "device" else None,
        "seed": "i64" if e.dropout else None, "second": operand if e.gated and e.gradient else None,
        "row_sums": "fp32" if e.sums else None,
    }  # fmt: skip
    if e.saves or e.gradient:
        wanted["saved"] = saved_type(e, operand)
    return {name: wanted.get(name) for name in (*TENSORS, *range(len(TENSORS), SLOTS))}


def saved_type(e, operand):
    """The type of what the forward saves for an epilogue's gradient."""
    if "mask" in (e.saves, e.gradient):
        return "u8"
    return "fp32" if operand == "fp16" and not ACTIVATIONS[e.activation].levels_off else operand


def launch_job(name, launch, addressed, aligned):
    """`addressed`: the elements' type behind each address, None where the launch has no use for it."""
    arguments = launch.kernel.arg_names
    signature, constexprs, attrs = {}, dict(launch.constants), {}
    maps = (*launch.maps, *(None,) * (len(addressed) - len(launch.maps)))
    for argument, kind, seen, even in zip(arguments, addressed, maps, aligned, strict=False):
        if kind is None:
            constexprs[argument] = None
        elif seen is not None:
            layout = "" if seen.layout is None else f",{seen.layout!r}"
            signature[argument] = f"tensordesc<{kind}{list(seen.block)}{layout}>"
        else:
            signature[argument] = f"*{kind}"
            if even:
                attrs[argument] = 16
    for param, value in zip(
        launch.kernel.params[len(addressed) :], (*launch.scalars, *launch.numbers), strict=False
    ):  # as Triton specialises integers
        if value is None or (value == 1 and not isinstance(value, float) and not param.do_not_specialize):
            constexprs[param.name] = value
            continue
        if isinstance(value, float):
            signature[param.name] = "fp32"
            continue
        signature[param.name] = "i32" if value < 2**31 else "i64"
        if value % 16 == 0 and not param.do_not_specialize:
            attrs[param.name] = 16
    options = dict(launch.options)
    along = any(launch.constants.get(name, True) for name in ("A_K_CONTIGUOUS", "B_K_CONTIGUOUS"))
    is_across = launch.constants.get("PRECISION") == "tf32" and not along and options["num_warps"] == 2
    return CompileJob(
        name=name,
        kernel=launch.kernel,
        signature=signature,
        constexprs=constexprs,
        attrs=attrs,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages", 3),
        options=options,
        allowed_spill_bytes=ACROSS if is_across else FEW_WORDS,
    )


def check_compiled(problem, config):
    """Also that the tensor cores are used where they may be, by warpgroups where a tile is made for them.

    Both instructions sum in the same order, so bits do not depend on which one a smaller tile gets. That is Triton's
    choice: tiles of 8 columns use mma.sync before 3.9, wgmma since.
    """
    used = compile_within_limits(problem, config)
    tensor_cores = used.instructions & {"mma", "wgmma"}
    if problem.number == "ieee":
        assert not tensor_cores
    elif for_warpgroups(problem, config):
        assert tensor_cores == {"wgmma"}
    else:
        assert len(tensor_cores) == 1
    by_tma = configs.reads_a_by_tma(problem, config) or configs.reads_b_by_tma(problem, config)
    assert ("tma" in used.instructions) == by_tma
    return used


def compile_within_limits(problem, config):
    """Within the limits, and with no more shared memory than `configs` expected, but for barriers."""
    job = product_job(problem, config)
    used = compile_job(job, problem.arch)
    assert limit_violations(job, problem.arch, used) == ()
    biases = 4 * max(config.block_m, config.block_n) if problem.epilogue.bias_first else 0  # turned on their way
    assert used.shared_bytes <= configs.shared_memory(problem, config) // config.residents + BARRIERS + biases
    return used


def assert_wgmmas_overlap(problem, config):
    """Assert that a block's products are issued together, and the next block's while these run."""
    code = disassemble(product_job(problem, config), "sm_90")
    steps = re.findall(r"HGMMA|WARPGROUP\.(?:ARRIVE|DEPBAR\S* gsb\d+, 0x[0-9a-f]+)", code)
    before, *begun = " ".join(steps).split("WARPGROUP.ARRIVE")
    assert "HGMMA" not in before
    at_once = [re.match(r"(?: HGMMA)*", each)[0].count("HGMMA") for each in begun]
    assert at_once
    warps = config.num_warps // (configs.ROLE_GROUPS if config.alternating else 1)  # that share a tile
    assert min(at_once) == config.block_m // (16 * warps) * config.block_k // 16  # 64 rows, 16 k each
    assert any(re.search(r"gsb0, 0x[1-9]", each) for each in steps)


def for_warpgroups(problem, config):
    """Whether its tiles are made for wgmma."""
    return config.block_m >= 64 and config.block_n >= 16 and config.num_warps >= 4 and problem.number != "ieee"
