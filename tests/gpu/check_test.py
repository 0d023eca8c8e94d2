"""The check of compiled steps: what it says of texts, and of steps that were made worse."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.gpu import check, hlo, rules, steps
from raslik_jax.run import gpus

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WHEELS = _ROOT / ".venv-gpu"
_GPU = gpus.GPUS["h100-80gb"]
_KERNELS = "".join(
    f'  %k{place} = f32[8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
    f'metadata={{op_name="jit(f)/{kernel}/pallas_call"}}\n'
    for place, kernel in enumerate(steps.STEPS["sketch_binned"].kernels)
)


def _problems(
    *lines: str,
    kernels: str = _KERNELS,
    gib: float = 1.0,
    step: str = "sketch_binned",
    model: str = "olmo2-7b",
) -> list[str]:
    body = "".join(f"  {line}\n" for line in lines)
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{body}{kernels}}}\n"
    sizes = {"params": 100_000, "vocab": 50_304, "base_bytes": 1e9}
    found = steps.Compiled(text, gib * 2**30, 1.0, **sizes)
    return rules.problems_of(steps.STEPS[step], steps.MODELS[model], found, _GPU)


def test_a_step_that_is_as_it_must_be():
    # A stack of layers may be larger than the logits would be.
    assert _problems("%stack = bf16[32,64,128,11008]{3,2,1,0} copy(%x)") == []


@pytest.mark.parametrize("shape", ["64,100000", "2,65536,64"])
def test_gradients_are_held_once_and_binned_ones_also_transposed(shape):
    gradients = [f"%g{place} = f32[{shape}] copy(%x)" for place in range(3)]
    assert _problems(*gradients[:2]) == []
    (many,) = _problems(*gradients)
    assert many == "must hold the gradients [B, P] at most 2 times, holds them 3 times"
    dense = steps.STEPS["sketch_dense"]
    assert (dense.gradients, steps.STEPS["sketch_binned"].gradients) == (1, 2)
    (trained,) = _problems("%g = f32[16,100000] copy(%x)", step="finetune")
    assert trained == "must hold the gradients [B, P] at most 0 times, holds them 1 times"


def test_what_a_step_must_not_hold_or_lose():
    (logits,) = _problems("%logits = f32[64,128,50304]{2,1,0} copy(%x)")
    assert logits.startswith("must not hold all logits")
    (lost,) = _problems(kernels="".join(_KERNELS.splitlines(keepends=True)[:-1]))
    known = "['binned_transpose', 'mha_backward', 'mha_forward']"
    assert lost == f"must call its kernel binned_sums, calls {known}"
    (large,) = _problems(gib=100.0)
    assert large == "must take at most 75.1 GiB, takes 100.0"


@pytest.mark.parametrize(
    "line",
    [
        "%out = token[] outfeed(%x)",
        '%out = f32[8] custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"',
        "%out = f32[8]{0:S(5)} copy(%x)",
    ],
)
def test_nothing_goes_to_the_host(line):
    (host,) = _problems(line)
    assert "the host" in host


def test_a_large_product_of_a_loop_multiplies_16_bits():
    loop = (pathlib.Path(__file__).parent / "loop.hlo").read_text()
    given = steps.STEPS["decode"], steps.MODELS["olmo2-7b"]
    for text, count in ((loop, 0), (loop.replace("bf16", "f32"), 1)):
        found = steps.Compiled(text, 1.0, 1.0, 100_000, 50_304, 1e9)
        (case,) = [rules.Case(*given, found, _GPU, hlo.Program(text))]
        assert len(list(rules.multiplies_16_bits(case))) == count


@pytest.mark.parametrize(
    ("step", "line", "says"),
    [
        ("sketch_binned", "%g = bf16[4096,11008] all-gather(%x)", ""),
        ("sketch_binned", "%g = f32[64,32,512,8] all-gather(%x)", "must gather weights of bf16"),
        ("sketch_binned", "%s = f32[100000] all-reduce(%x)", "must add up at most 0.0 MB a step"),
        ("sketch_binned", "%s = s32[] all-reduce(%x)", ""),
        ("finetune", "%s = f32[100000] all-reduce(%x)", ""),
        ("finetune", "%s = f32[200000] all-reduce(%x)", "must add up at most 0.4 MB a step"),
        ("finetune", "%s = f32[8] all-to-all(%x)", "must gather weights and add up gradients"),
    ],
)
def test_devices_send_weights_and_one_sum_of_gradients(step, line, says):
    found = _problems(line, step=step, model="olmo2-13b")
    assert [problem.partition(",")[0][: len(says)] for problem in found] == [says] * bool(says)


def test_more_than_was_stated():
    assert check.excess_of({"gib": 10.2}, {"gib": 10.0}) == []
    (more,) = check.excess_of({"gib": 10.4}, {"gib": 10.0})
    assert more == "must take 10 GiB, takes 10.4"


def test_exchanges_and_products_of_loops_are_counted_as_often_as_they_run():
    program = hlo.Program((pathlib.Path(__file__).parent / "loop.hlo").read_text())
    (exchange,) = program.collectives()
    assert exchange == ("all-reduce", ("f32[32,64]",), 7) and exchange.size == 4 * 32 * 64
    ((dtypes, share),) = program.loop_products()
    assert (set(dtypes), share) == ({"bf16"}, 1.0)
    assert "f32[7,32,64]{2,1,0}" in list(program.shapes())
    assert hlo.size_of("(s32[], bf16[7,64]{1,0}, pred[3], s4[8])") == 4 + 2 * 7 * 64 + 3 + 4


def test_the_start_of_a_gather_stands_next_to_its_operand():
    start = "  %g = (bf16[4,8], bf16[32,8]) all-gather-start(%x), dimensions={0}\n"
    (exchange,) = hlo.Program(f"ENTRY %m (x: f32[8]) -> f32[8] {{\n{start}}}\n").collectives()
    assert (exchange.kind, exchange.arrays) == ("all-gather", ("bf16[32,8]",))


def test_every_step_of_every_model_is_stated():
    _, stated = check.read_stated()
    models = [model for model in steps.MODELS if model != "pythia-14m"]
    missing = {f"{m} {name}" for m in models for name in steps.steps_of(m)} - stated.keys()
    # A new objective is stated where the compiler is (`--state`), and not by its file.
    assert {name for name in missing if " unlearn_" not in name} == set()


def test_what_is_stated_is_of_one_gpu():
    with pytest.raises(ValueError, match="--state must compile for .* h100-80gb, got --gpu=h200"):
        check.Options(state=True, gpu="h200")


# Compiles a step of Pythia-14m three times more: each time as somebody could make it worse.
_WORSE = """
import jax
import jax.numpy as jnp
from experiments.gpu import check, rules, steps
from raslik_jax.models import attention
from raslik_jax.run import gpus
from raslik_jax.sketch import loss

gpus.prepare()
model, name = "pythia-14m", "sketch_binned"

def compiled():
    jax.clear_caches()
    return steps.compile_step(model, name, "h100-80gb")

good = compiled().record()

def problems():
    found = compiled()
    of = steps.STEPS[name], steps.MODELS[model]
    return [
        *rules.problems_of(*of, found, gpus.GPUS["h100-80gb"]),
        *check.excess_of(found.record(), good),
    ]

policies = jax.checkpoint_policies
kernel, policy = attention.attend_by_kernel, policies.save_only_these_names
attention.attend_by_kernel = lambda *heads, scale: attention._attend_by_products(scale, *heads)
assert any("kernel" in problem for problem in problems()), "a kernel less"
attention.attend_by_kernel = kernel
policies.save_only_these_names = lambda name: policies.everything_saveable
assert any(problem.startswith("must take") for problem in problems()), "more is stored"
policies.save_only_these_names = policy


def plain_nll(table, hidden_TE, label_T, is_counted_T, vocab_axis, cap):
    logits_TV = jax.lax.dot_general(
        hidden_TE, table, (((1,), (1 - vocab_axis,)), ((), ())), preferred_element_type=jnp.float32
    )
    nll_T = jax.nn.logsumexp(logits_TV, -1) - logits_TV[jnp.arange(len(label_T)), label_T]
    return jnp.where(is_counted_T, nll_T, 0.0)


loss.target_nll = plain_nll
assert any("logits" in problem for problem in problems()), "logits are stored"
"""


@pytest.mark.heavy
def test_compiled_steps_are_within_their_bounds_and_worse_ones_are_found():
    if not _WHEELS.is_dir() and importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("XLA's compiler for GPUs is not installed: make .venv-gpu")
    path = os.pathsep.join([str(_ROOT), str(_WHEELS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": ""}
    steps = "--steps=sketch_dense,unlearn_ga_klr,score_bfloat16"
    check_all = ["experiments/gpu/check.py", "--models=pythia-14m", steps]
    for arguments in (check_all, ["-c", _WORSE]):
        ran = subprocess.run(
            [sys.executable, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
